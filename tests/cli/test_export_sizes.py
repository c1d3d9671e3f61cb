"""Sizes that vary in an exported graph, by name: run by a process without mpframe, or refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Shown, refused
from in_process import train
from torch import Tensor, nn

from mpframe.checkpoint.export_graph import (
    as_onnx,
    as_pt2,
    convert_weights,
    describe_inputs,
    open_sizes,
    trace_model,
)
from mpframe.cli.commands.export import main
from mpframe.core.errors import ConfigError, UserCodeError

WORDS = {"name": "words", "shape": [None, 5], "dtype": "int64"}
MASK = {"name": "mask", "shape": [None, 5], "dtype": "float32"}
IMAGES = {"name": "images", "shape": [None, 1, 8, 8], "dtype": "float32"}


class Masked(nn.Module):
    """Two inputs of one length, of which one is floating, at most 20 words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(7, 4), nn.Embedding(20, 4)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        hidden = self.table(words) + self.places.weight[: words.shape[1]]
        return hidden * mask[..., None]


class Cut(nn.Module):
    """Takes texts of 5 words only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words).view(-1, 5, 4).mean(1)


class Flat(nn.Module):
    """Takes images of 64 pixels only, which the tracer does not prove."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))


def traced(model: nn.Module, dynamic: Any, *inputs: dict[str, Any]) -> tuple[Any, Any]:
    """A graph, and the description of its inputs."""
    sizes = open_sizes(inputs, dynamic)
    weights = convert_weights(model.state_dict(), "fp32")
    graph = trace_model(model, weights, "fp32", inputs, sizes)
    return graph, describe_inputs(graph, inputs, sizes)


STRANGER = """
import sys, torch
for length in (2, 20):
    words, mask = torch.arange(3 * length).reshape(3, length) % 7, torch.full((3, length), 0.5)
    if sys.argv[1].endswith(".pt2"):
        found = torch.export.load(sys.argv[1]).module()(words=words, mask=mask)
    else:
        import onnxruntime
        session = onnxruntime.InferenceSession(sys.argv[1])
        assert [one.shape for one in session.get_inputs()] == [["batch", "length"]] * 2
        assert session.get_outputs()[0].shape == ["batch", "length", 4]
        (found,) = session.run(None, {"words": words.numpy(), "mask": mask.numpy()})
    torch.save(torch.as_tensor(found), f"{length}.pt")
assert not [name for name in sys.modules if name.partition(".")[0] == "mpframe"]
"""


@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_a_stranger_runs_two_lengths(ending: str, tmp_path: Path) -> None:
    if ending == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
    model, file = Masked(), tmp_path / f"model.{ending}"
    graph, inputs = traced(model, ["length"], WORDS, MASK)
    assert inputs == [one | {"shape": [None, "length"]} for one in (WORDS, MASK)]
    file.write_bytes(as_pt2(graph, "{}") if ending == "pt2" else as_onnx(graph, "{}", inputs))
    words = [sys.executable, "-c", STRANGER, file.name]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=100, env={"OMP_NUM_THREADS": "1"})
    for length in (2, 20):
        words, mask = torch.arange(3 * length).reshape(3, length) % 7, torch.full((3, length), 0.5)
        found = torch.load(tmp_path / f"{length}.pt")
        assert torch.equal(found, model(words, mask).detach())  # a sum of two, and a power of two


def test_a_size_that_the_model_fixes_is_refused_with_torchs_reason() -> None:
    end = (
        "; use format=safetensors, or write its forward so that torch.export takes it with any size"
    )
    for model, dynamic, one, reason in (
        (Cut(), ["length"], WORDS, "You marked L['words'].size()[1] as dynamic but your code "
         "specialized it to be a constant (5)"),
        (Flat(), {"images": {3: "width"}}, IMAGES, "You marked L['images'].size()[3] as dynamic "
         "but your code specialized it to be a constant (8)"),
        (Flat(), ["height", "width"], IMAGES, "AssertionError (Guard failed: "),
    ):  # fmt: skip
        said = refused(UserCodeError, traced, model, dynamic, one)
        names = ",".join(dynamic if isinstance(dynamic, list) else ["width"])
        start = f"dynamic=[{names}]: {type(model).__name__} cannot be traced into a graph: "
        assert said.startswith(start + reason)
        assert said.endswith(end)
    assert traced(Flat(), None, IMAGES)[1] == [IMAGES]  # Without names an image's sizes are fixed.


def test_names_that_no_size_has_are_refused() -> None:
    long = {"name": "long", "shape": [None, 7], "dtype": "int64"}
    for dynamic in (
        *(["lengt"], ["height"], [], 3, {"word": {1: "length"}}, {"words": {2: "length"}}),
        *({"words": {1: "same"}, "long": {1: "same"}}, {"words": 1}, ["length"]),
    ):
        said = refused(ConfigError, open_sizes, [WORDS, long], dynamic)
        assert said == (
            f"dynamic={dynamic}: names no size of words [None, 5], long [None, 7], or several "
            "alike; choose length, height, width, or name them by input and dimension, as in "
            "{words: {1: length}}"
        )
    named = {"words": {1: "a"}, "long": {1: "b"}}
    assert open_sizes([WORDS, long], named) == named
    assert open_sizes([WORDS, LABELS], ["length"]) == {"words": {1: "length"}, "labels": {}}


LABELS = {"name": "labels", "shape": [None], "dtype": "int64"}
SIZED = """
import sys, torch
graph = torch.export.load(sys.argv[1]).module()
for side, other in ((8, 8), (13, 20)):
    assert graph(torch.ones(3, 1, side, other)).shape == (3, 10)
"""


def test_the_command_names_the_sizes_of_images(tmp_path: Path, capsys: Shown) -> None:
    train(tmp_path / "run", "model=cnn", "model.width=4", "trainer.max_steps=1")
    words = [f"checkpoint={tmp_path}/run", f"out={tmp_path}/m.pt2"]
    main([*words, "format=torch_export", "dynamic=[height,width]"])
    sidecar = json.loads((tmp_path / "m.pt2.json").read_text())
    assert sidecar["inputs"][0]["shape"] == [None, 1, "height", "width"]
    subprocess.run([sys.executable, "-c", SIZED, tmp_path / "m.pt2"], check=True, timeout=100)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([words[0], f"out={tmp_path}/x", "dynamic=[length]"])
    assert capsys.readouterr().err.strip() == (
        "mpframe: dynamic=[length]: format=safetensors has no graph; give format=onnx or "
        "torch_export"
    )
