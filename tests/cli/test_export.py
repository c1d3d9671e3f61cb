"""Export: rounded once, held at the range's end, counted, whole or absent."""

import json
import os
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Log, Patch, Shown, full, refused
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from vocabulary import HALVES, same_bits

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint.export import as_safetensors, refuse_taken, write
from mpframe.checkpoint.export_graph import (
    DTYPES,
    as_onnx,
    as_pt2,
    convert_weights,
    describe_inputs,
    graph_inputs,
    open_sizes,
    trace_model,
    without_labels,
)
from mpframe.checkpoint.state import weights_of
from mpframe.cli.commands.export import main
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError
from mpframe.tracking.summary import Status, Summary

# Ends of the formats, ties, subnormals, and the first values that round beyond the range.
EDGES = torch.tensor([
    0.0, -0.0, 1.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 2.0**-24, 2.0**-25, 2.0**-126,
    65504.0, 65519.0, 65520.0, -65520.0, 1e30, 3.3895e38, 3.4e38, -3.4e38,
])  # fmt: skip


@pytest.mark.parametrize(("form", "beyond"), [("float16", 6), ("bfloat16", 2)])
def test_half_is_one_rounding_of_the_master(form: str, beyond: int) -> None:
    (tensors, saturated), rounded = convert_weights({"w": EDGES}, form), EDGES.to(HALVES[form])
    end = EDGES.sign() * torch.finfo(HALVES[form]).max
    expected = torch.where(rounded.isinf(), end.to(HALVES[form]), rounded)
    assert same_bits([tensors["w"]], [expected])
    assert saturated == {"w": beyond}  # 65519 rounds to 65504.


@pytest.mark.parametrize("form", DTYPES)
def test_a_file_loads_back_each_weight_for_itself(form: str, tmp_path: Path) -> None:
    shared, dtype = torch.arange(12.0).reshape(3, 4), DTYPES[form]
    tied = {"a": shared, "b": shared, "c": shared.t(), "d": shared[:, 1:3]}
    weights = {"half": torch.ones(2).half(), "n": torch.tensor(3), **tied}
    path = tmp_path / "model.safetensors"
    path.write_bytes(as_safetensors(convert_weights(weights, form)[0], {"step": 7}))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "mpframe": '{"step": 7}'}
    loaded = load_file(path)
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert loaded[name].dtype == (dtype if tensor.is_floating_point() else tensor.dtype)
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name


def test_what_cannot_be_exported_is_refused() -> None:
    for weight, text in (
        (torch.tensor([1.0, torch.nan]), "w holds nan or inf; export an older checkpoint"),
        (torch.tensor([1.0, torch.inf]), "w holds nan or inf"),
        (torch.ones(2).double(), "w is torch.float64, which no export format"),
    ):
        assert text in refused(CheckpointError, convert_weights, {"w": weight}, "float16")


# Of an export to a free place: the sidecar, the file, its folder, the sidecar again, its folder.
@pytest.mark.parametrize(
    ("allowed", "replaced"), [*((count, False) for count in range(5)), (0, True), (1, True)]
)
def test_a_failure_leaves_what_was_there(
    allowed: int, replaced: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    def written() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    if replaced:
        write(tmp_path / "x", b"weights", "safetensors", {"schema": 1})
    before, left = written(), iter(range(allowed))
    monkeypatch.setattr(os, "fsync", lambda _: full() if next(left, None) is None else None)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "x", b"others", "safetensors", {"schema": 1})
    assert written() == before


def test_only_what_may_be_replaced_is_replaced_and_links_are_not_followed(tmp_path: Path) -> None:
    out, sidecar = tmp_path / "model.safetensors", tmp_path / "model.safetensors.json"
    (tmp_path / "kept").write_text("mine")
    for taken, target in product((out, sidecar), ("kept", "nowhere")):
        taken.symlink_to(target)
        said = refused(ConfigError, refuse_taken, out, overwrite=False)
        assert said.startswith(f"out={out}: {taken} exists; choose another file")
        refuse_taken(out, overwrite=True)
        write(out, b"weights", "safetensors", {"schema": 1})
        assert not taken.is_symlink()
        out.unlink()
        sidecar.unlink()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "mine")]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    weights = {"a": torch.tensor([1.0, 1e30]), "n": torch.tensor(3)}
    trainer = {"weights": weights, "ema": {"a": torch.tensor([2.0, 3.0])}}
    trainer["progress"] = {"steps": 5, "skipped": 2}
    (tmp_path / "run").mkdir()
    checkpoint.save(tmp_path / "run", Snapshot(7, {"trainer": trainer, "rng": {}}))
    return tmp_path / "run"


def test_the_command_says_what_was_held(saved: Path, tmp_path: Path, capsys: Shown) -> None:
    out = tmp_path / "half.safetensors"
    main([f"checkpoint={saved}", f"out={out}", "weights_dtype=float16", "weights=trained"])
    assert capsys.readouterr().out.strip() == (
        f"{out}: 2 tensors in float16, weights trained, step 7; 1 values beyond the range of "
        "float16 are held at its end (a); half.safetensors.json says how to use them, but for "
        "inputs, preprocessing, class_names, which the run did not know"
    )
    assert {n: w.tolist() for n, w in load_file(out).items()} == {"a": [1.0, 65504.0], "n": 3}
    # A run with averages is validated with them, so they are what is exported if nothing is said.
    main([f"checkpoint={saved}", f"out={tmp_path / 'same'}", "--config-dir", str(saved)])
    loaded = {n: w.tolist() for n, w in load_file(tmp_path / "same").items()}
    assert loaded == {"a": [2.0, 3.0], "n": 3}
    sidecar = json.loads((tmp_path / "same.json").read_text())
    assert sidecar["weights"]["kind"] == sidecar["metrics"]["weights"] == "ema"


def test_a_run_means_what_was_tested(saved: Path, tmp_path: Path, capsys: Shown) -> None:
    state = checkpoint.load(saved)
    for step, value in {8: 0.9, 9: 0.5}.items():
        validation = {"metric": "accuracy", "value": value, "higher_is_better": True}
        checkpoint.save(saved, Snapshot(step, state, "", {"validation": validation}))
    main([f"checkpoint={saved}", f"out={tmp_path / 'untested'}"])
    numbers = {"steps": 9, "skipped_steps": 0, "epochs": 1, "seconds": 1.0, "seed": 0}
    texts = dict.fromkeys(("dtype", "loss_scaling", "device", "torch"), "any")
    Summary(status=Status.FINISHED, **numbers, **texts, tested="best").write(saved)
    main([f"checkpoint={saved}", f"out={tmp_path / 'tested'}"])
    main([f"checkpoint={saved}/checkpoints/step_00000009", f"out={tmp_path / 'named'}"])
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r"step (\d+)", line) for line in lines] == [["9"], ["8"], ["9"]]


MISTAKES = {
    "out=x": "checkpoint: must be given, e.g. checkpoint=runs/2026-11-21/05-45-42",
    "checkpoint=RUN": "out: must be given, e.g. out=model.safetensors",
    "checkpoint=RUN out=x weights_dtype=fp16": "weights_dtype=fp16: choose fp32, float16, bfloat16",
    "checkpoint=RUN out=m.onnx": "out=m.onnx: a file of format=safetensors ends in .safetensors; "
        "rename it, or give format=onnx",
    "checkpoint=RUN out=x model.width=3": "model.width=3: no such option; ",
    "checkpoint=RUN out=x format=torch_export":
        "the checkpoint does not say that its model is called with plain tensors",
    "checkpoint=RUN out=x dynamic=[length]": "dynamic=[length]: format=safetensors has no graph; "
        "give format=onnx or torch_export",
    "checkpoint=RUN out=x weights=avg": "weights=avg: choose trained, ema",
    "checkpoint=RUN out=x fromat=fp32": "fromat=fp32: no such option; nearest: format",
    "checkpoint=RUN out=RUN": "out=RUN: RUN is a folder; name a file",
    "checkpoint=RUN/nope out=x": "RUN/nope: no readable checkpoint",
}  # fmt: skip


def test_a_mistake_says_so(saved: Path, here: Path, capsys: Shown) -> None:
    for words, text in MISTAKES.items():
        with pytest.raises(SystemExit) as ended:
            main(words.replace("RUN", str(saved)).split())
        assert ended.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"mpframe: {text.replace('RUN', str(saved))}")
        assert [path.name for path in here.iterdir()] == ["run"]


def test_a_state_that_is_no_runs_is_refused() -> None:
    own: Any = {"weights": {"a": torch.ones(2)}, "ema": None}
    rows: list[tuple[Any, str, str]] = [
        ([], "trained", "holds no weights of a run"),
        ({"trainer": {"weights": {3: torch.ones(1)}}}, "trained", "holds no weights of a run"),
        ({"trainer": own}, "ema", "holds no averages, trainer.ema_decay was off"),
        ({"trainer": own | {"ema": {"b": torch.ones(2)}}}, "ema", "do not belong to its weights"),
        ({"trainer": own | {"ema": [torch.ones(2)]}}, "ema", "holds no ema of a run"),
    ]
    for state, kind, text in rows:
        assert text in refused(CheckpointError, weights_of, state, kind, Path("x"))


IMAGE = {"name": "images", "shape": [None, 1, 8, 8], "dtype": "float32"}
WORDS = {"name": "words", "shape": [None, 5], "dtype": "int64"}
MASK = {"name": "mask", "shape": [None, 5], "dtype": "float32"}
LABELS = {"name": "labels", "shape": [None], "dtype": "int64"}


def test_inputs_that_no_graph_can_take_are_refused() -> None:
    changes: list[tuple[str, list[Any]]] = [
        *(("name", ["images[0]", 3]), ("dtype", ["load", 3])),
        ("shape", [None, [None, -1], [None, 2.5], [2**20, 2**20]]),
    ]
    changed = [[IMAGE | {key: value}] for key, values in changes for value in values]
    wrong: list[Any] = [None, [], "images", {"images": IMAGE}, ["images"], [{"name": "images"}]]
    for inputs in [*wrong, *changed]:
        said = refused(CheckpointError, graph_inputs, {"inputs": inputs}, "fp32")
        assert "does not say that its model is called with pl" in said
    taken = graph_inputs({"inputs": [IMAGE, WORDS]}, "bfloat16")
    assert taken == [IMAGE | {"dtype": "bfloat16"}, WORDS]


class Tagger(nn.Module):
    """As Hugging Face's models: several inputs by name, and labels that it can do without."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head((self.table(words) * mask[..., None]).mean(1))
        return {"logits": logits} if labels is None else {"loss": logits.sum(), "logits": logits}


def test_a_graph_of_several_inputs_is_called_by_their_names(tmp_path: Path) -> None:
    strict: Any = SimpleNamespace(forward=lambda images, labels: images)
    assert without_labels([IMAGE, LABELS], strict) == [IMAGE, LABELS]
    model = Tagger().eval()
    inputs = without_labels(graph_inputs({"inputs": [WORDS, MASK, LABELS]}, "fp32"), model)
    assert inputs == [WORDS, MASK]
    (tmp_path / "x.pt2").write_bytes(as_pt2(traced(model, *inputs), "{}"))
    loaded = torch.export.load(tmp_path / "x.pt2").module()
    given = {"words": torch.arange(15).reshape(3, 5) % 7, "mask": torch.rand(3, 5)}
    assert torch.equal(loaded(**given)["logits"], model(**given)["logits"])


@dataclass
class Tagged:
    """As ModelOutput: what a process that has torch alone does not know."""

    logits: Tensor
    states: Any = None
    cache: Any = object()  # noqa: RUF009 - one for all, in the place of any class.


class Counted(nn.Module):
    """Reads a text of at most 9 words; if `fixed` is given, of exactly so many."""

    def __init__(self, fixed: int = 0, nested: bool = False) -> None:
        super().__init__()
        self.fixed, self.nested = fixed, nested
        self.table, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Any:
        hidden = self.table(words) + self.places.weight[: words.shape[1]]
        if self.fixed:
            hidden = hidden.view(-1, self.fixed, 4)
        states = (Tagged(hidden), [hidden]) if self.nested else hidden
        return Tagged(self.head(hidden.mean(1)), states)


class Columns(nn.Module):
    def forward(self, words: Tensor) -> Tensor:
        return words[:, 0] + words[:, 4]


def traced(model: nn.Module, *inputs: Any, dynamic: Any = None) -> Any:
    given = [*inputs] or [WORDS]
    return trace_model(model, given, open_sizes(given, dynamic))


def test_the_outputs_of_a_text_of_any_length_are_named(tmp_path: Path) -> None:
    """Those within others as well, and of types that torch does not know."""
    graph = traced(Counted(nested=True))
    assert describe_inputs(graph, [WORDS], open_sizes([WORDS])) == [WORDS | {"shape": [None, None]}]
    (tmp_path / "x.pt2").write_bytes(as_pt2(graph, "{}"))
    loaded = torch.export.load(tmp_path / "x.pt2").module()
    for length in (2, 9):
        found = loaded(torch.zeros(3, length, dtype=torch.int64))
        assert (list(found), found["logits"].shape) == (["logits", "states"], (3, 3))
        (first, (second,)), shape = found["states"], (3, length, 4)
        assert (type(first), first["logits"].shape, second.shape) == (dict, shape, shape)


FIXES = "warning: the graph takes words of size 5 in dimension 1 only, because the model's code "


def test_a_length_that_the_model_fixes_is_warned_of(caplog: Log) -> None:
    """Columns that are read by number are no length."""
    for model, warnings in ((Columns(), []), (Counted(fixed=5), [f"{FIXES}fixes it"])):
        assert describe_inputs(traced(model), [WORDS], open_sizes([WORDS])) == [WORDS]
        ours = [one for one in caplog.records if one.name.startswith("mpframe")]  # torch logs, too
        assert [one.getMessage() for one in ours] == warnings


@pytest.mark.slow
def test_in_onnx_two_lengths_of_one_name_are_taken() -> None:
    """Without the name, the mask, a floating input, would fix the length of both."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    onnxruntime, model, sizes = pytest.importorskip("onnxruntime"), Tagger(), ["length"]
    graph = traced(model, WORDS, MASK, dynamic=sizes)
    inputs = describe_inputs(graph, [WORDS, MASK], open_sizes([WORDS, MASK], sizes))
    assert inputs == [one | {"shape": [None, "length"]} for one in (WORDS, MASK)]
    session = onnxruntime.InferenceSession(as_onnx(graph, "{}", inputs))
    assert [one.shape for one in session.get_inputs()] == [["batch", "length"]] * 2
    for length in (2, 9):
        words, mask = torch.arange(3 * length).reshape(3, length) % 7, torch.full((3, length), 0.5)
        (found,) = session.run(None, {"words": words.numpy(), "mask": mask.numpy()})
        # Sums of 9 and 4 terms, of at most 16 in all: their order moves them by 2^-16 at most.
        wanted = model(words, mask)["logits"]
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=2**-16)


class Flat(nn.Linear):
    """Takes images of 64 pixels only, which the tracer does not prove."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1))


FLAT = Flat(64, 3)


@pytest.mark.parametrize(
    ("model", "one", "dynamic", "names", "reason"),
    [
        (Counted(fixed=5), WORDS, ["length"], "length",
         "UserError (Constraints violated (L['words'].size()[1])!"),
        (FLAT, IMAGE, {"images": {3: "columns"}}, "columns",
         "UserError (Constraints violated (L['images'].size()[3])!"),
        (FLAT, IMAGE, ["height", "width"], "height,width", "AssertionError (Guard failed: "),
    ],
)  # fmt: skip
def test_a_size_that_the_model_fixes(
    model: nn.Module, one: Any, dynamic: Any, names: str, reason: str
) -> None:
    said = refused(UserCodeError, traced, model, one, dynamic=dynamic)
    start = f"dynamic=[{names}]: {type(model).__name__} cannot be traced into a graph: {reason}"
    assert said.startswith(start)
    assert said.endswith(
        "; use format=safetensors, or write its forward so that torch.export takes it with any size"
    )


def test_names_that_no_size_has_are_refused() -> None:
    long = {"name": "long", "shape": [None, 7], "dtype": "int64"}
    for dynamic in (
        *(["lengt"], ["height"], [], 3, {"word": {1: "length"}}, {"words": {2: "length"}}),
        *({"words": {1: "same"}, "long": {1: "same"}}, {"words": 1}, ["length"], "length"),
    ):
        assert refused(ConfigError, open_sizes, [WORDS, long], dynamic) == (
            f"dynamic={dynamic}: names no size of words [None, 5], long [None, 7], or several "
            "alike; choose length, height, width, or name them by input and dimension, as in "
            "{words: {1: length}}"
        )
    assert open_sizes([WORDS, LABELS], ["length"]) == {"words": {1: "length"}, "labels": {}}
