"""Weights of others: every common form is read, nothing hostile or damaged, and all must fit."""

import collections
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, refused
from hostile_checkpoints import ATTACKS, saved
from prepared import prepared
from safetensors.torch import save_file
from torch import Tensor, nn, ones, zeros
from torchvision.models import resnet18
from vocabulary import differing

from mpframe.checkpoint.init_from import fit_weights, read_foreign, rename_weights
from mpframe.config.schema import RunOptions
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.run.resume import take_first_weights

STATE = {
    "conv.weight": torch.arange(6.0).view(2, 3),
    "norm.running_var": torch.tensor([0.1, 1e-30]),
    "norm.num_batches_tracked": torch.tensor(7),
    "head.weight": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
}
INDEX = "model.safetensors.index.json"
WRONG: Any = (CheckpointError, ConfigError)
Made = Callable[[Path], Path]


def content(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def bytes_of(data: bytes) -> Made:
    return lambda folder: content(folder / "a", data)


def saving(state: Any, **options: Any) -> Made:
    return bytes_of(saved(state, **options))


def safetensors(folder: Path) -> Path:
    save_file(STATE, folder / "model.safetensors")
    return folder / "model.safetensors"


def sharded(folder: Path, stem: str = "pytorch_model", kind: str = "bin") -> Path:
    """Two shards and their index, named as Hugging Face's save_pretrained does it."""
    write, places = (torch.save if kind == "bin" else save_file), {}
    for number, names in enumerate((list(STATE)[:2], list(STATE)[2:]), 1):
        shard = f"{stem}-{number:05}-of-00002.{kind}"
        write({name: STATE[name] for name in names}, folder / shard)
        places |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))
    return folder


def hub(folder: Path) -> Path:
    """Hugging Face's cache: links to its store."""
    blobs, version = folder / "blobs", folder / "snapshots" / "abc"
    blobs.mkdir()
    version.mkdir(parents=True)
    for path in list(sharded(folder, "model", "safetensors").glob("model*")):
        (version / path.name).symlink_to(path.rename(blobs / f"digest of {path.name}"))
    return version


FORMS: dict[str, Made] = {
    "safetensors": safetensors,
    "a state dict": saving(collections.OrderedDict(STATE)),
    "in torch's older format": saving(STATE, _use_new_zipfile_serialization=False),
    "parameters": saving({k: torch.nn.Parameter(v, False) for k, v in STATE.items()}),
    "a folder with shards": sharded,
    "the cache of a hub": hub,
    "an index in it": lambda folder: hub(folder) / INDEX,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_bit_for_bit(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path)
    assert differing(read_foreign(path) or {}, STATE) == []


def index_of(**places: str) -> Made:
    """An index that says so of a folder whose only shard holds a."""

    def made(folder: Path) -> Path:
        save_file({"a": zeros(1)}, folder / "s.safetensors")
        return content(folder / INDEX, json.dumps({"weight_map": places}).encode())

    return made


def linked(folder: Path) -> Path:
    (folder / "in").mkdir()
    (folder / "in" / "model.safetensors").symlink_to(safetensors(folder))
    return folder / "in"


CODE = "holds posix.system, and loading it would run code; save only its state dict"
OUT = "refused, it leads out of its folder"
TORN = "damaged, not a file of weights"
EPOCH = "holds no state dict, but epoch, net; save only the state dict"
HOSTILE: dict[str, tuple[Made, str]] = {
    "code": (bytes_of(ATTACKS["code"]), CODE),
    "code, older": (bytes_of(ATTACKS["code in an old file"]), CODE),
    "a bare pickle": (bytes_of(ATTACKS["a bare pickle"]), f"{TORN} (Detected pickle protocol"),
    "a web page": (bytes_of(b"<!DOCTYPE html>"), f"{TORN} (not written by torch.save)"),
    "nothing of use": (saving({"epoch": 1, "net": {"a": 1}}), EPOCH),
    "a shard elsewhere": (index_of(a="../s.safetensors"), OUT),
    "a link out": (linked, f"{OUT}; put the file itself there"),
    "a missing shard": (index_of(a="t.safetensors"), TORN),
    "a missing weight": (index_of(a="s.safetensors", b="s.safetensors"), "misses b, against the i"),
    "a weight too many": (index_of(b="s.safetensors"), "also holds a, against the index"),
    "a FIFO": (lambda folder: os.mkfifo(folder / "a") or folder / "a", TORN),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_hostile_is_refused_in_line(case: str, here: Path) -> None:
    make, text = HOSTILE[case]
    file = make(here)
    assert text in refused(CheckpointError, read_foreign, file)
    assert not (here / "attacked").exists()


def numbered(*names: str) -> dict[str, Tensor]:
    return {name: torch.tensor(float(number)) for number, name in enumerate(names)}


def test_patterns_give_new_names() -> None:
    cases: list[tuple[list[str], dict[str, str], list[str]]] = [
        (["backbone.a", "head.b"], {"backbone.*": "encoder.*"}, ["encoder.a", "head.b"]),
        (["a.x.y"], {"a.*.*": "*.b.*"}, ["x.b.y"]),
        (["a.x", "b"], {"a.x": "first", "*": "rest.*"}, ["first", "rest.b"]),
        (["module._orig_mod.a"], {}, ["a"]),
        (["module.a", "b"], {}, ["module.a", "b"]),  # Not all are within a wrapper.
        (["_orig_mod.module.own"], {}, ["module.own"]),  # The model's own prefix stays.
        (["a[0].w+"], {"a[0].w+": "a"}, ["a"]),
    ]
    for given, names, expected in cases:
        model = {"module.own"} if "module.own" in expected else {"head.weight"}
        result = rename_weights(numbered(*given), names, model, "file")
        assert list(result) == expected
        assert list(map(float, result.values())) == list(range(len(given)))


UNMEANT = [
    ({"backbone.a": "*"}, "init_from_names={backbone.a: *}: each * on the right stands for one on "
     "the left, which has fewer"),
    ({"backbone.a": "head.b"}, "init_from=file: two of its weights would be head.b by "
     "init_from_names; let each pattern give different names"),
]  # fmt: skip


def test_patterns_that_cannot_be_meant_are_refused() -> None:
    weights = numbered("backbone.a", "head.b")
    for names, text in UNMEANT:
        given = weights, names, {"head.weight"}, "file"
        assert refused(WRONG, rename_weights, *given) == text


OWN = {"body.w": zeros(2), "head.w": zeros(3), "head.b": zeros(3)}
SAVED = {"body.w": ones(2), "head.w": ones(5), "old.w": ones(1)}
TIED = {"embed.weight": OWN["head.w"], "head.weight": OWN["head.w"].detach()}
UNFIT: list[tuple[dict[str, Tensor], dict[str, Tensor], list[str], str]] = [
    (SAVED, OWN, [], "init_from=run: missing: head.b; unexpected: old.w; of another shape: head.w "
     "(5,) for (3,); use the model it was made with, rename them by init_from_names, or name what "
     "may differ: init_from_except=[head.*,old.*]"),
    (SAVED, OWN, ["head.b"], "=run: unexpected: old.w; of another shape: head.w (5,) for (3,);"),
    (SAVED, OWN, ["*"], "init_from=run: nothing is left to take; use the model"),
    (SAVED, OWN, ["haed.w"], "=haed.w: matches no weight of the checkpoint or the model; nearest"),
    (numbered(*"abcdefghi") | OWN, OWN, [], "unexpected: a, b, c, d, e and 4 more; use the "
     "model it was made with, or name what may differ: init_from_except=[a,b,c,d,e and 4 more]"),
    ({"a": zeros(2).char(), "n": zeros(())}, {"a": zeros(2), "n": zeros(()).long()}, [],
     "of another kind: a int8 for floating, n floating for int64"),
    ({"a": zeros(2).to_sparse()}, {"a": zeros(2)}, [], "a sparse_coo for floating"),
    ({"embed.weight": ones(3), "head.weight": zeros(3)}, TIED, [],
     "tied, and of different values: embed.weight and head.weight"),
]  # fmt: skip


def test_all_that_does_not_fit_is_listed_and_tied_ones_and_those_of_another_kind() -> None:
    for given, own, left_out, text in UNFIT:
        assert text in refused(WRONG, fit_weights, given, own, left_out, "run")


def test_what_may_differ_keeps_its_first_values_and_a_tied_name_takes_what_was_saved() -> None:
    taken = fit_weights(SAVED, OWN, ["head.*", "old*"], "run")
    assert (taken.kept, taken.unused) == (["head.w", "head.b"], ["head.w", "old.w"])
    assert list(taken.weights) == list(OWN)
    assert torch.equal(taken.weights["body.w"], SAVED["body.w"])
    assert all(taken.weights[name] is OWN[name] for name in ("head.w", "head.b"))
    given = {"embed.weight": ones(3), "other": zeros(3)}
    taken = fit_weights(given, {**TIED, "other": zeros(3)}, [], "file")
    assert taken.weights["head.weight"] is given["embed.weight"]
    assert (taken.kept, taken.unused) == ([], [])


def test_fewer_bits_are_widened_exactly() -> None:
    values = torch.tensor([1.75, -448.0])
    forms = [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64]
    given = {str(dtype): values.to(dtype) for dtype in forms}
    taken = fit_weights(given | {"old": values}, {**given, "c": values}, ["c", "old"], "file")
    assert all(torch.equal(taken.weights[name].float(), values) for name in given)
    assert {taken.weights[name].dtype for name in list(given)[:3]} == {torch.float32}


def test_torchvisions_resnet18_is_taken_bit_for_bit_but_for_a_new_head(
    tmp_path: Path, caplog: Log
) -> None:
    """Masters and buffers are the file's, half weights the masters' rounding."""
    other = resnet18(num_classes=7)
    other(torch.rand(2, 3, 32, 32))  # It moves the statistics of BatchNorm.
    saved = other.state_dict()
    named = {f"net.{name}": tensor for name, tensor in saved.items()}
    torch.save(named, file := tmp_path / "resnet18.pth")
    how: Any = {"init_from": str(file), "init_from_names": {"net.*": "*"}}
    caplog.set_level("INFO")
    trainer = prepared(resnet18(num_classes=3), nn.CrossEntropyLoss(), "mixed")
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    with pytest.raises(CheckpointError, match=r"shape: fc\.weight \(7, 512\) for \(3, 512\), fc\."):
        take_first_weights(trainer, RunOptions(**how))
    assert differing(trainer.weights(), before) == []
    take_first_weights(trainer, RunOptions(**how, init_from_except=["fc.*"]))
    head = {name: before[name] for name in ("fc.weight", "fc.bias")}
    assert differing(trainer.weights(), {**saved, **head}) == []
    for parameter in trainer.model.parameters():
        master = trainer.optimizer.master_of(parameter)
        assert torch.equal(parameter, master.to(parameter.dtype))
    assert caplog.messages[0].startswith(
        f"weights taken from {file}, except fc.*: 22 parameters are rounded"
    )
    assert caplog.messages[1:] == [
        "init_from: with their first values: fc.weight, fc.bias",
        "init_from: not used: fc.weight, fc.bias",
    ]
