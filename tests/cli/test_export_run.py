"""An export in the hands of a stranger: plain torch, the sidecar, and the run's own accuracy."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkout import ROOT
from fixtures import Patch, Shown
from in_process import train
from safetensors import safe_open
from torch import Tensor

from mpframe import checkpoint
from mpframe.checkpoint import export_graph
from mpframe.cli.commands.export import main
from mpframe.cli.restored import checkpoint_of
from mpframe.data import digits

PAGE = (ROOT / "docs" / "evaluate_export.md").read_text()
ENDINGS = {"safetensors": "safetensors", "state_dict": "pt", "torch_export": "pt2", "onnx": "onnx"}
NEEDED = ("onnx", "onnxscript", "onnxruntime")
MODEL = "model._target_=my_net.Net"
NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.first = torch.nn.Linear(64, width)
        self.second = torch.nn.Linear(width, classes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    def forward(self, images):
        return self.second(torch.tanh(self.first(images.flatten(1))))
"""
STRANGER = """
import ast, json, sys
import numpy, torch
def run(statements):
    exec(compile(ast.Module(statements, []), "the page", "exec"), names)
lines, raw = json.load(open("lines.json")), torch.from_numpy(numpy.load("raw.npy"))
names = {"raw": raw}
exec(lines["prepare"], names)
prepared = names["inputs"]
found = {}
for form in lines["forms"]:
    *loaded, called = ast.parse(lines[form]).body
    run(loaded)
    for how, inputs in {"normalised": prepared, "raw": raw, "one": prepared[:1]}.items():
        names["inputs"] = inputs
        run([called])
        found[f"{form} {how}"] = torch.as_tensor(names["outputs"]).detach().numpy()
assert not [name for name in sys.modules if name.partition(".")[0] == "mpframe"]
numpy.savez("found.npz", **found)
"""


FORMS = [form for form in ENDINGS if form != "onnx" or all(map(find_spec, NEEDED))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of a user's own model, made once."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "my_net.py").write_text(NET)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "my_net", raising=False)  # A page has one, too.
        options = ["model=own", MODEL, "+model.width=24", "+model.classes=10", "trainer.epochs=2"]
        train(folder / "run", *options, "dtype=fp32")
        yield folder / "run"
        sys.modules.pop("my_net", None)


def exported(run: Path, folder: Path, form: str, *words: str) -> tuple[Path, dict[str, Any]]:
    """The file and its sidecar."""
    out = folder / f"model.{ENDINGS[form]}"
    named = any(word.startswith("model._target_=") for word in words)
    trust = [MODEL] if form in ("onnx", "torch_export") and not named else []
    main([f"checkpoint={run}", f"out={out}", f"format={form}", *trust, *words])
    return out, json.loads(out.with_name(f"{out.name}.json").read_text())


@pytest.fixture(scope="module")
def files(run: Path) -> Path:
    """The folder with the run exported in each format that can be."""
    for form in FORMS:
        exported(run, run.parent, form)
    return run.parent


@pytest.fixture(scope="module")
def found(files: Path) -> dict[str, Tensor]:
    """What a stranger computes, in a process of its own that never imports mpframe."""
    test: Any = digits().test
    np.save(files / "raw.npy", (test.images * 16).numpy())  # exact: the raw values 0 to 16
    # The lines of the documentation that are marked by a name.
    lines = dict(re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```", PAGE, re.S))
    (files / "lines.json").write_text(json.dumps({**lines, "forms": FORMS}))
    (files / "stranger.py").write_text(STRANGER)
    subprocess.run([sys.executable, "stranger.py"], cwd=files, check=True, timeout=300)
    with np.load(files / "found.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def error_bound(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """How far fp32 logits of the two layers may lie from the exact ones, [N, 10] in fp64.

    Of n roundings in a row each is off by u = 2^-24 of at most the sum of all |terms|
    (Higham 2002, 3.1). There are 3 of an input below 4, 64 products and a bias, 24 and a bias, and
    tanh, which enlarges no error: 8 u, more than the 4 units that libraries promise. Twice their
    number covers what is of second order.
    """
    w = {name: tensor.double().abs() for name, tensor in weights.items()}
    first = (inputs.double().abs().flatten(1) + 4) @ w["first.weight"].T + w["first.bias"]
    second = (first + 1) @ w["second.weight"].T + w["second.bias"]
    return 2 * (3 + 64 + 1 + 24 + 1 + 8) * 2.0**-24 * second


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_stranger_gets_the_runs_numbers(form: str, run: Path, found: dict[str, Tensor]) -> None:
    evaluated = json.loads((run / "summary.json").read_text())["test_accuracy"]
    test: Any = digits().test
    inputs = test.normalize(test.images)
    weights = checkpoint.load(checkpoint_of(run))["trainer"]["weights"]
    w = {name: tensor.double() for name, tensor in weights.items()}
    hidden = (inputs.double().flatten(1) @ w["first.weight"].T + w["first.bias"]).tanh()
    exact = hidden @ w["second.weight"].T + w["second.bias"]
    logits = found[f"{form} normalised"]
    assert logits.dtype == torch.float32
    assert ((logits.double() - exact).abs() <= error_bound(weights, inputs)).all()
    assert torch.equal(logits.argmax(1), exact.argmax(1))

    right = [found[f"{form} {how}"].argmax(1) == test.targets for how in ("normalised", "raw")]
    normalised, raw = (float(own.double().mean()) for own in right)
    assert (normalised == evaluated > 0.5, raw < evaluated - 0.02) == (True, True)
    # Another batch size sums in another order, within the same bound of the exact values.
    bound = error_bound(weights, inputs[:1])
    assert ((found[f"{form} one"].double() - exact[:1]).abs() <= bound).all()


def embedded(form: str, path: Path) -> Any:
    """What the file itself says."""
    said = {export_graph.KEY: ""}
    if form == "safetensors":
        with safe_open(path, framework="pt") as file:
            said = file.metadata()
    elif form == "torch_export":
        torch.export.load(path, extra_files=said)
    else:
        found = pytest.importorskip("onnx").load(path).metadata_props
        said = {one.key: one.value for one in found}
    return json.loads(said[export_graph.KEY])


@pytest.mark.parametrize("form", FORMS)
def test_the_file_holds_the_words_of_its_sidecar(form: str, files: Path) -> None:
    path = files / f"model.{ENDINGS[form]}"
    sidecar = json.loads(path.with_name(f"{path.name}.json").read_text())
    facts = [sidecar["file"][key] for key in ("name", "format", "bytes")]
    assert facts == [path.name, form, path.stat().st_size]
    del sidecar["file"]
    if form != "state_dict":
        assert embedded(form, path) == sidecar
    # A stack trace would name the folders of the machine that exported.
    assert str(files).encode() not in path.read_bytes()


def test_the_sidecar_says_what_a_stranger_needs(files: Path, run: Path) -> None:
    sidecar = json.loads((files / "model.pt2.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    task = digits()
    assert set(sidecar) == set(re.findall(r"^\| `(\w+)` \| (?!param|the s)", KEYS, re.M))
    says = {
        "schema": 1, "model": {"target": "my_net.Net", "arguments": {"width": 24, "classes": 10}},
        "inputs": [{"name": "images", "shape": [None, 1, 8, 8], "dtype": "float32"}],
        "preprocessing": task.preprocessing, "class_names": task.class_names,
        "weights": {"kind": "trained", "dtype": "float32", "saturated": {}},
        "computes_in": "float32",
    }  # fmt: skip
    assert sidecar.items() >= says.items()
    assert sidecar["precision"]["mode"] == "fp32"
    origin = {"dataset": "mpframe.data.digits", "step": summary["best_step"], "seed": 0}
    origin["id"] = checkpoint.read(run).facts["run"]
    assert sidecar["run"].items() >= origin.items()
    metrics, versions = sidecar["metrics"], sidecar["versions"]
    assert metrics["weights"] == "trained"
    assert metrics["checkpoint"]["val_accuracy"] == summary["best"]
    assert set(metrics["checkpoint"]) == {"val_loss", "val_accuracy"}
    for key in ("val_loss", "val_accuracy", "best", "best_step", "test_accuracy", "tested"):
        assert metrics["run"][key] == summary[key]
    assert versions["trained_with"] == versions["exported_with"]
    assert set(versions["trained_with"]) == {"torch", "torchvision", "mpframe"}
    weights_only = json.loads((files / "model.safetensors.json").read_text())
    assert weights_only["computes_in"] is None
    assert {key for key in sidecar if sidecar[key] != weights_only[key]} == {"file", "computes_in"}


KEYS = PAGE[PAGE.index("### The sidecar") : PAGE.index("### Use it without")]


def test_a_half_graph_takes_half_and_computes_in_it(run: Path, tmp_path: Path) -> None:
    out, sidecar = exported(run, tmp_path, "torch_export", "weights_dtype=float16")
    assert sidecar["computes_in"] == sidecar["weights"]["dtype"] == "float16"
    assert sidecar["inputs"][0]["dtype"] == "float16"
    outputs = torch.export.load(out).module()(torch.ones(3, 1, 8, 8, dtype=torch.float16))
    assert (outputs.dtype, outputs.shape) == (torch.float16, (3, 10))


def test_a_secret_is_in_no_export(run: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "my_net.Net")  # stands in the stored options
    for form in ("safetensors", "torch_export"):
        out, sidecar = exported(run, tmp_path, form)
        assert sidecar["model"]["target"] == embedded(form, out)["model"]["target"] == "***"


def test_an_unfit_model_and_a_missing_library_say_so(
    run: Path, tmp_path: Path, monkeypatch: Patch, capsys: Shown
) -> None:
    monkeypatch.setattr(export_graph, "find_spec", lambda name: name != "onnxscript" or None)
    for form, word, line in (
        ("torch_export", "model.width=12", "model: its weights are not those of Net: Error(s) in"),
        ("onnx", "weights=trained", "format=onnx: onnxscript is not installed; get it with pip "),
    ):
        with pytest.raises(SystemExit):
            exported(run, tmp_path, form, word)
        assert capsys.readouterr().err.startswith(f"mpframe: {line}")
    assert not list(tmp_path.glob("m*"))
