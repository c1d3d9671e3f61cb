"""Weights of others: every common form is read, and nothing hostile or damaged is."""

import collections
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Patch
from hostile_checkpoints import ATTACKS, repacked, saved
from safetensors.torch import save_file
from torch import Tensor

from mpframe.checkpoint import untrusted
from mpframe.checkpoint.init_from import fit_weights, is_foreign, read_foreign, rename_weights
from mpframe.core.errors import CheckpointError, ConfigError

STATE = {
    "conv.weight": torch.arange(6.0).view(2, 3),
    "norm.running_var": torch.tensor([0.1, 1e-30]),
    "norm.num_batches_tracked": torch.tensor(7),
    "head.weight": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
}


def assert_same(tensors: dict[str, Tensor]) -> None:
    assert tensors.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def save(path: Path, state: Any, **options: Any) -> Path:
    torch.save(state, path, **options)
    return path


def sharded(folder: Path, kind: str = "safetensors") -> Path:
    """A folder with two shards and their index, named as Hugging Face's save_pretrained does it."""
    stem, write = {
        "safetensors": ("model", save_file),
        "bin": ("pytorch_model", torch.save),
    }[kind]
    folder.mkdir(exist_ok=True)
    places = {}
    for number, names in enumerate((list(STATE)[:2], list(STATE)[2:]), 1):
        shard = f"{stem}-{number:05}-of-00002.{kind}"
        write({name: STATE[name] for name in names}, folder / shard)
        places |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))
    return folder


def one_file(folder: Path) -> Path:
    save_file(STATE, folder / "model.safetensors")
    return folder / "model.safetensors"


FORMS: dict[str, Callable[[Path], Path]] = {
    "safetensors": one_file,
    "a state dict": lambda folder: save(folder / "a.pth", collections.OrderedDict(STATE)),
    "in torch's older format": lambda folder: save(
        folder / "a.pth", STATE, _use_new_zipfile_serialization=False
    ),
    "parameters": lambda folder: save(
        folder / "a.pt",
        {k: torch.nn.Parameter(v) if v.is_floating_point() else v for k, v in STATE.items()},
    ),
    "a folder with shards": lambda folder: sharded(folder, "bin"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_bit_for_bit(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path)
    assert is_foreign(path)
    assert_same(read_foreign(path).tensors)


def test_what_is_no_weight_is_named(tmp_path: Path) -> None:
    beside = {"epoch": 3, "optimizer": {}, "model_ema": STATE}
    assert read_foreign(save(tmp_path / "a", {"model": STATE, **beside})).left == (
        *("epoch", "model_ema", "optimizer"),
    )
    assert read_foreign(save(tmp_path / "b", {**STATE, "version": 2})).left == ("version",)


def test_the_cache_of_a_hub_is_read_through_its_links(tmp_path: Path) -> None:
    blobs, version = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    version.mkdir(parents=True)
    for path in sharded(tmp_path / "made").iterdir():
        path.rename(blobs / f"digest of {path.name}")
        (version / path.name).symlink_to(blobs / f"digest of {path.name}")
    assert_same(read_foreign(version).tensors)
    assert_same(read_foreign(version / "model.safetensors.index.json").tensors)


# What is refused


def content(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def long_pickle(folder: Path) -> Path:
    """A file in torch's older format, its state this pickle."""
    state = pickle.PROTO + b"\x02" + (pickle.EMPTY_LIST + pickle.POP) * 2**15 + b"N."
    parts = [pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {}, [])]
    return content(folder / "a", b"".join([*parts[:3], state, parts[3]]))


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "a")
    return folder / "a"


def index_of(**places: str) -> Callable[[Path], Path]:
    """An index that says so of a folder whose only shard holds a."""

    def made(folder: Path) -> Path:
        save_file({"a": torch.zeros(1)}, folder / "s.safetensors")
        text = json.dumps({"weight_map": places})
        return content(folder / "model.safetensors.index.json", text.encode())

    return made


def linked(folder: Path) -> Path:
    (folder / "out").mkdir()
    (folder / "in").mkdir()
    save_file(STATE, folder / "out" / "mine.safetensors")
    (folder / "in" / "model.safetensors").symlink_to(folder / "out" / "mine.safetensors")
    return folder / "in"


def bytes_of(data: bytes) -> Callable[[Path], Path]:
    return lambda folder: content(folder / "a", data)


BOMB = repacked(saved({"a": torch.zeros(2**20)}), zipfile.ZIP_DEFLATED)
HUGE = saved({"a": torch.zeros(1).expand(10**12)})
CODE = "holds code or objects, which are never loaded; save only its state dict"
OUT = "refused, it leads out of its folder"
TORN = "damaged, not a file of weights"
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "code": (bytes_of(ATTACKS["code"]), CODE),
    "code, older": (bytes_of(ATTACKS["code in an old file"]), CODE),
    "a bare pickle": (bytes_of(ATTACKS["a bare pickle"]), f"{TORN} (neither an archive nor tor"),
    "a bomb": (bytes_of(BOMB), "its entries are not stored as torch stores them"),
    "hollow": (bytes_of(HUGE), "a tensor of 1000000000000 values in a file of"),
    "endless, older": (long_pickle, "its pickles have more than 65536 bytes"),
    "nothing of use": (
        bytes_of(saved({"epoch": 1, "net": {"a": 1}})),
        "holds no state dict, but epoch, net; save only the state dict",
    ),
    "a shard elsewhere": (index_of(a="../s.safetensors"), OUT),
    "a link out": (linked, f"{OUT}; put the file itself there"),
    "a missing shard": (index_of(a="t.safetensors"), TORN),
    "a weight that is not there": (
        index_of(a="s.safetensors", b="s.safetensors"),
        "s.safetensors misses b, against the index",
    ),
    "a weight too many": (index_of(b="s.safetensors"), "also holds a, against the index"),
    "a FIFO": (fifo, TORN),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_hostile_or_damaged_is_refused_in_one_line(
    case: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(untrusted, "_LARGEST_PICKLE", 2**16)
    make, text = HOSTILE[case]
    with pytest.raises(CheckpointError) as refused:
        read_foreign(make(tmp_path))
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "attacked").exists()


# Names

OWN = {"encoder.conv.weight", "encoder.conv.bias", "head.weight"}


def numbered(*names: str) -> dict[str, Tensor]:
    return {name: torch.tensor(float(number)) for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        (["backbone.a", "head.b"], {"backbone.*": "encoder.*"}, ["encoder.a", "head.b"]),
        (["a.x.y"], {"a.*.*": "*.b.*"}, ["x.b.y"]),
        (["a.x", "b"], {"a.x": "first", "*": "rest.*"}, ["first", "rest.b"]),
        (["module._orig_mod.a"], {}, ["a"]),
        (["a[0].w+"], {"a[0].w+": "a"}, ["a"]),
    ],
)
def test_patterns_give_new_names(
    given: list[str], names: dict[str, str], expected: list[str]
) -> None:
    own = numbered(*given)
    result = rename_weights(own, names, OWN, "file")
    assert list(result) == expected
    assert [float(v) for v in result.values()] == [float(v) for v in own.values()]


def test_a_prefix_of_the_models_own_stays() -> None:
    assert list(rename_weights(numbered("module.a"), {}, {"module.a"}, "file")) == ["module.a"]


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (
            {"bakbone.*": "*"},
            ConfigError,
            "init_from_names=bakbone.*: matches no weight of file that an earlier pattern leaves; "
            "nearest: backbone.a",
        ),
        (
            {"backbone.a": "*"},
            ConfigError,
            "init_from_names={backbone.a: *}: each * on the right stands for one on the left, "
            "which has fewer",
        ),
        (
            {"backbone.a": "head.b"},
            CheckpointError,
            "init_from=file: two of its weights would be head.b by init_from_names; let each "
            "pattern give different names",
        ),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(
    names: dict[str, str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as refused:
        rename_weights(numbered("backbone.a", "head.b"), names, OWN, "file")
    assert str(refused.value) == text


# What fits


def test_the_pattern_that_would_do_is_named() -> None:
    own = {name: torch.zeros(()) for name in sorted(OWN)}
    given = numbered("backbone.conv.weight", "backbone.conv.bias", "head.weight")
    with pytest.raises(CheckpointError) as refused:
        fit_weights(given, own, [], "file")
    assert "name its weights as the model does: init_from_names={backbone.*:encoder.*}, or" in str(
        refused.value
    )
    names = {"backbone.*": "encoder.*"}
    assert fit_weights(rename_weights(given, names, OWN, "file"), own, [], "file").kept == []


def test_another_kind_is_refused() -> None:
    own = {"a": torch.zeros(2), "n": torch.tensor(0)}
    given = {"a": torch.zeros(2, dtype=torch.int8), "n": torch.tensor(0.0)}
    with pytest.raises(CheckpointError) as refused:
        fit_weights(given, own, [], "file")
    assert "of another kind: a int8 for floating, n floating for int64" in str(refused.value)
    with pytest.raises(CheckpointError, match="a sparse_coo for floating"):
        fit_weights({**own, "a": torch.zeros(2).to_sparse()}, own, [], "file")


def test_a_tied_name_takes_the_weight_that_was_saved() -> None:
    table = torch.zeros(3)
    own = {"embed.weight": table, "head.weight": table.detach(), "other": torch.zeros(3)}
    given = {"embed.weight": torch.ones(3), "other": torch.zeros(3)}
    taken = fit_weights(given, own, [], "file")
    assert taken.weights["head.weight"] is given["embed.weight"]
    assert (taken.kept, taken.unused) == ([], [])


def test_two_values_for_a_tied_weight_are_refused() -> None:
    table = torch.zeros(3)
    own = {"embed.weight": table, "head.weight": table.detach()}
    given = {"embed.weight": torch.ones(3), "head.weight": torch.zeros(3)}
    with pytest.raises(CheckpointError) as refused:
        fit_weights(given, own, [], "file")
    assert "tied, and of different values: embed.weight and head.weight" in str(refused.value)
    assert fit_weights(given, own, ["head.*"], "file").kept == ["head.weight"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_fewer_bits_are_widened_exactly(dtype: torch.dtype) -> None:
    given = {"a": torch.tensor([1.75, -448.0]).to(dtype)}
    taken = fit_weights(given, {"a": torch.zeros(2)}, [], "file")
    assert torch.equal(taken.weights["a"], torch.tensor([1.75, -448.0]))
    (said,) = taken.remarks()
    assert said.startswith(f"1 tensors are {str(dtype)[6:]}, and were widened exactly")


def test_what_was_left_out_or_widened_is_told() -> None:
    own = {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)}
    given = {"a": torch.ones(1).half(), "b": torch.ones(1).double(), "old": torch.ones(1)}
    assert fit_weights(given, own, ["c", "old"], "file").remarks() == [
        "with their first values: c",
        "not used: old",
        "1 tensors are float16, and were widened exactly: masters start from half values",
        "1 tensors are float64, and are rounded where fp32 is kept",
    ]
