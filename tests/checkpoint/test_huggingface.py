"""A folder in the hands of a stranger: transformers, timm or torch, and the run's own outputs."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from fixtures import Patch, Shown, full, refused
from in_process import train
from pages import Page
from torch import nn

from mpframe.checkpoint import huggingface
from mpframe.checkpoint.huggingface import format_card, write_folder
from mpframe.cli.commands.export import main
from mpframe.cli.restored import restore_run
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError

OF_THE_LIBRARIES = ("UserWarning", "DeprecationWarning", "FutureWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in OF_THE_LIBRARIES]
PAGE = Page(ROOT / "docs" / "evaluate_export.md")
NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = torch.nn.Linear(64, width)
    def forward(self, images):
        return self.head(images.flatten(1))
"""
TARGET = "model._target_=tiny_net.Net"
# What changes the page's run of each library, or makes a run. The folder that is exported.
RUNS = {
    "transformers": ("model.config.hidden_size=16 dataset.vocab_size=60 dataset.batch_size=4 "
                     "dtype=fp32", "my-bert"),
    "timm": ("dtype=fp32", "my-resnet"),
    "torch": (f"model=own {TARGET} +model.width=10", "my-net"),
}  # fmt: skip
INPUTS = dict.fromkeys(RUNS, torch.linspace(-1, 1, 192).reshape(3, 1, 8, 8))
INPUTS["transformers"] = torch.arange(24).reshape(3, 8)
STRANGER = """
import re, sys, torch
(code,) = re.findall("```python\\n(.*?)```", open(sys.argv[1] + "/README.md").read(), re.S)
exec(code)
with torch.no_grad():
    found = model.eval()(torch.load("inputs.pt"))
assert not [name for name in sys.modules if name.partition(".")[0] == "mpframe"]
torch.save(getattr(found, "logits", found), "found.pt")
"""


class Exported:
    """A run of two steps, exported, in the current folder and by the page's commands."""

    def __init__(self, library: str, texts: Path) -> None:
        (words, name), self.library = RUNS[library], library
        self.run, self.out = Path("run").absolute(), Path(name).absolute()
        export = ["", f"out={name}", "format=huggingface", *[TARGET] * (library == "torch")]
        commands = [one.arguments for one in PAGE.commands()]
        if library != "torch":
            ((number, export),) = ((n, c) for n, c in enumerate(commands) if f"out={name}" in c)
            *trained, _ = commands[number - 1]  # The last word is the run's folder.
            words = f"{' '.join(trained)} {words}".replace("data/texts", str(texts))
        train(self.run, *words.split(), "trainer.max_steps=2")
        self.words = [f"checkpoint={self.run}", *export[1:]]
        main(self.words)
        self.trust = [word for word in export if "_target_" in word]
        self.card = (self.out / "README.md").read_text()
        self.config = json.loads((self.out / "config.json").read_text())

    @property
    def facts(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "model.safetensors.json").read_text()))


def of(*libraries: str) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name != "torch")) for name in libraries]


@pytest.fixture(scope="module", params=of(*RUNS))
def exported(
    request: Any, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Exported]:
    if request.param != "torch":
        pytest.importorskip(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tiny_net.py").write_text(NET)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield Exported(request.param, tiny_data / "text_folder")
        sys.modules.pop("tiny_net", None)


@pytest.mark.slow
def test_a_stranger_has_the_outputs_of_the_run(exported: Exported) -> None:
    torch.save(INPUTS[exported.library], "inputs.pt")
    words = [sys.executable, "-c", STRANGER, exported.out.name]
    alone = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run(words, check=True, timeout=200, env=alone)
    run = restore_run(exported.run, [*exported.trust, "dtype=fp32"])
    with torch.no_grad():
        ours: Any = run.trainer.model.eval()(INPUTS[exported.library])
    assert torch.equal(torch.load("found.pt"), getattr(ours, "logits", ours))


def test_the_folder_has_what_the_run_knows(exported: Exported) -> None:
    config, card = exported.config, exported.card
    if exported.library == "transformers":
        names = ["art", "business", "politics", "sport", "tech"]
        assert config["id2label"] == {str(number): name for number, name in enumerate(names)}
        assert config["label2id"]["tech"] == 4
        pieces = (exported.run / "vocab.txt").read_text().split()
        tokenizer = sys.modules["transformers"].AutoTokenizer.from_pretrained(exported.out)
        numbers = [pieces.index(piece) for piece in ("[CLS]", "art", "and", "more", "[SEP]")]
        assert tokenizer("Art AND more")["input_ids"] == numbers
        assert tokenizer.model_max_length == 64
    elif exported.library == "timm":
        assert config["label_names"] == [str(digit) for digit in range(10)]
        images, how = config["pretrained_cfg"], exported.facts["preprocessing"]
        assert (images["input_size"], images["crop_pct"]) == ([1, 8, 8], 1.0)
        pixel = (5 / 255 - images["mean"][0]) / images["std"][0]
        assert pixel == pytest.approx((5 / 16 - how["mean"][0]) / how["std"][0], rel=1e-12)
    else:
        assert config == {"target": "tiny_net.Net", "arguments": {"width": 10}}
        assert "| mode | mixed |\n| half | float16 |\n| ops | default |" in card
        assert "| half_weights | 2 |" in card
        assert "| loss_scaling | Backoff |" in card


def test_the_card_has_the_numbers_that_were_measured(exported: Exported) -> None:
    summary = json.loads((exported.run / "summary.json").read_text())
    val, test = (3, 2) if exported.library == "transformers" else (180, 180)
    rows = dict(re.findall(r"^\| ((?:val|test)_\w+) \| (.*) \|$", exported.card, re.M))
    keys = {"val_loss": val, "val_accuracy": val, "test_loss": test, "test_accuracy": test}
    assert rows == {key: f"{summary[key]} | {count}" for key, count in keys.items()}


def test_no_number_is_of_other_weights_and_nothing_unknown_on_the_card(exported: Exported) -> None:
    numbers = {"val_loss": 0.125, "test_loss": 0.5, "best_step": 7, "steps": 8, "skipped_steps": 2}
    both = {"val_loss": "0.25", "test_loss": "0.5"}
    for tested, step, kind, shown in (
        *(("best", 7, "trained", both), ("best", 10, "trained", {"val_loss": "0.25"})),
        *(("last", 10, "trained", both), ("last", 7, "trained", {"val_loss": "0.25"})),
        ("best", 7, "ema", {}),
    ):
        facts, run = exported.facts, {**numbers, "tested": tested}
        facts["metrics"] = {"weights": "trained", "checkpoint": {"val_loss": 0.25}, "run": run}
        facts["weights"]["kind"], facts["run"]["step"], facts["run"]["samples"] = kind, step, None
        card = format_card("mine", "torch", nn.Linear(1, 1), facts)
        assert dict(re.findall(r"^\| (\w+_loss) \| (.*) \| unknown \|$", card, re.M)) == shown
        assert ("The run has measured nothing with these weights." in card) == (not shown)
    facts |= {"class_names": None, "preprocessing": None}
    facts["weights"]["saturated"] = []
    card = format_card("mine", "torch", nn.Linear(1, 1), facts)
    assert re.findall("^## (.*)$", card, re.M) == ["Metrics", "Precision", "Training"]
    assert not re.search(r"^\| \w+ \|  \|$", card, re.M)
    assert "| dtype | float32 |" in card


def test_no_secret_is_on_the_card_and_only_an_export_is_replaced(
    exported: Exported, monkeypatch: Patch, capsys: Shown, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(exported.out)
    places = {exported.out: False, tmp_path / "mine": True, tmp_path / "link": True}
    for taken, flag in places.items():
        assert refused(ConfigError, huggingface.refuse_taken, taken, flag) == (
            f"out={taken}: {taken} exists; choose another folder, or replace an exported one with "
            "overwrite=true"
        )
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "put_in_place", full)
        with pytest.raises(SystemExit):
            main([*exported.words, f"out={tmp_path}/out"])
    said = f"mpframe: out={tmp_path}/out: cannot be written (No space left on device); choose"
    assert capsys.readouterr().err.startswith(said)
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "link"}
    dataset = re.findall(r"\| dataset \| (.*) \|", exported.card)[0]
    monkeypatch.setenv("SOME_TOKEN", dataset)
    main([*exported.words, "overwrite=true"])
    assert f"a {exported.library} model, and its README.md says" in capsys.readouterr().out
    assert dataset not in (exported.out / "README.md").read_text()


@pytest.mark.parametrize("exported", of("transformers", "timm"), indirect=True)
def test_a_model_that_its_library_builds_otherwise(exported: Exported, tmp_path: Path) -> None:
    run: Any = restore_run(exported.run, exported.trust)
    model, error, reason = run.trainer.model, CheckpointError, "extra.bias, extra.weight"
    if exported.library == "timm":
        model.fc, error = nn.Linear(96, 3), UserCodeError
        reason = "RuntimeError (Error(s) in loading state_dict for ResNet: size mismatch for fc."
    else:
        model.extra = nn.Linear(1, 1)
    said = refused(error, write_folder, tmp_path / "out", model.float(), exported.facts)
    start = f"{type(model).__name__} loaded from its config.json is another model: {reason}"
    assert said.startswith(f"format=huggingface: {start}")
    assert said.endswith("; use format=safetensors")
    assert not list(tmp_path.iterdir())
