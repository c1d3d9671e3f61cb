"""A folder in the hands of a stranger: transformers, timm or torch, and the run's own outputs."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Patch, Shown, full, refused
from in_process import train
from torch import nn

from mpframe.checkpoint import huggingface
from mpframe.checkpoint.huggingface import write_folder
from mpframe.checkpoint.model_card import format_card
from mpframe.cli.commands.export import main
from mpframe.cli.restored import restore_run
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError
from mpframe.data.images import Normalize

OF_THE_LIBRARIES = ("UserWarning", "DeprecationWarning", "FutureWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in OF_THE_LIBRARIES]
MODELS = """
import torch
def bert(classes, pieces):
    from transformers import BertConfig, BertForSequenceClassification
    sizes = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 32}
    config = BertConfig(vocab_size=pieces, num_labels=classes, num_hidden_layers=1,
                        num_attention_heads=2, **sizes)
    return BertForSequenceClassification(config)
def resnet(classes):
    import timm
    return timm.create_model("test_resnet", num_classes=classes, in_chans=1)
class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = torch.nn.Linear(64, width)
    def forward(self, images):
        return self.head(images.flatten(1))
"""
# What makes a run of each library, and what its model is called with.
RUNS = {
    "transformers": "dataset=text_folder dataset.vocab_size=60 optimizer.lr=0.01 "
    "dataset.max_tokens=32 dataset.batch_size=4 model=own model._target_=tiny_models.bert "
    "+model.classes=5 +model.pieces=60 dtype=fp32",
    "timm": "model=own model._target_=tiny_models.resnet +model.classes=10 dtype=fp32",
    "torch": "model=own model._target_=tiny_models.Net +model.width=10 loss_scaling=Backoff",
}
INPUTS = {
    "transformers": torch.arange(24).reshape(3, 8),
    "timm": torch.linspace(-1, 1, 192).reshape(3, 1, 8, 8),
    "torch": torch.linspace(-1, 1, 192).reshape(3, 1, 8, 8),
}
STRANGER = """
import re, sys, torch
(code,) = re.findall("```python\\n(.*?)```", open("out/README.md").read(), re.S)
names = {}
exec(code, names)
with torch.no_grad():
    found = names["model"].eval()(torch.load("inputs.pt"))
assert not [name for name in sys.modules if name.partition(".")[0] == "mpframe"]
torch.save(getattr(found, "logits", found), "found.pt")
"""


@dataclass
class Exported:
    library: str
    run: Path
    out: Path
    target: str  # the word that names the model again

    @property
    def card(self) -> str:
        return (self.out / "README.md").read_text()

    def read(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())


SLOW = [pytest.param(name, marks=[pytest.mark.slow] * (name != "torch")) for name in RUNS]


@pytest.fixture(scope="module", params=SLOW)
def exported(
    request: Any, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Exported]:
    """A run of two steps, and its folder."""
    if request.param != "torch":
        pytest.importorskip(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tiny_models.py").write_text(MODELS)
    words = [*RUNS[request.param].split(), "trainer.max_steps=2"]
    if request.param == "transformers":
        words.append(f"dataset.root={tiny_data}/text_folder")
    (target,) = (word for word in words if "_target_" in word)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        train(folder / "run", *words)
        main([f"checkpoint={folder}/run", f"out={folder}/out", "format=huggingface", target])
        yield Exported(request.param, folder / "run", folder / "out", target)
        sys.modules.pop("tiny_models", None)


def test_a_stranger_has_the_outputs_of_the_run(exported: Exported) -> None:
    inputs, folder = INPUTS[exported.library], exported.out.parent
    torch.save(inputs, folder / "inputs.pt")
    (folder / "stranger.py").write_text(STRANGER)
    words = [sys.executable, "stranger.py"]
    alone = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run(words, cwd=folder, check=True, timeout=200, env=alone)
    run = restore_run(exported.run, [exported.target, "dtype=fp32"])
    with torch.no_grad():
        ours: Any = run.trainer.model.eval()(inputs)
    assert torch.equal(torch.load(folder / "found.pt"), getattr(ours, "logits", ours))


def test_the_folder_says_what_the_run_knows(exported: Exported) -> None:
    config, card = exported.read("config.json"), exported.card
    names = ["art", "business", "politics", "sport", "tech"]
    if exported.library == "transformers":
        assert [config["id2label"][str(number)] for number in range(5)] == names
        assert config["label2id"]["tech"] == 4
        pieces = restore_run(exported.run, [exported.target]).task.preprocessing["vocab"].split()
        tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(exported.out)
        numbers = [pieces.index(piece) for piece in ("[CLS]", "art", "and", "more", "[SEP]")]
        assert tokenizer("Art AND more")["input_ids"] == numbers
        assert tokenizer.model_max_length == 32
    elif exported.library == "timm":
        assert config["label_names"] == [str(digit) for digit in range(10)]
        how = exported.read("model.safetensors.json")["preprocessing"]
        images = config["pretrained_cfg"]
        assert images["input_size"] == [1, 8, 8]
        pixel = (5 / 255 - images["mean"][0]) / images["std"][0]
        assert pixel == pytest.approx((5 / 16 - how["mean"][0]) / how["std"][0], rel=1e-12)
    else:
        assert config == {"target": "tiny_models.Net", "arguments": {"width": 10}}
        assert "| mode | mixed |\n| half | float16 |\n| ops | default |" in card
        assert "| loss_scaling | Backoff |" in card
        assert "| half_weights | 2 |" in card
    assert "trainer.max_steps=2" not in card  # It was trained in Python, which has no command line.


def test_the_card_has_the_numbers_that_were_measured(exported: Exported) -> None:
    summary = json.loads((exported.run / "summary.json").read_text())
    samples = {"val": 3, "test": 2} if exported.library == "transformers" else {}
    rows = dict(re.findall(r"^\| ((?:val|test)_\w+) \| (.*) \|$", exported.card, re.M))
    counts = {"val": 180, "test": 180} | samples
    assert rows == {
        key: f"{summary[key]} | {counts[key.partition('_')[0]]}"
        for key in ("val_loss", "val_accuracy", "test_loss", "test_accuracy")
    }


FACTS: dict[str, Any] = {
    "schema": 1,
    "model": {"target": "tiny_models.Net", "arguments": {"width": 3}},
    "weights": {"kind": "trained", "dtype": "float32", "saturated": {}},
    "class_names": None,
    "preprocessing": None,
    "precision": None,
    "metrics": {"weights": "trained", "checkpoint": {"val_loss": 0.25}, "run": None},
    "run": {"id": None, "step": 7, "seed": None, "dataset": None, "samples": None, "command": None},
    "versions": {"trained_with": None},
}
ENDED = {"val_loss": 0.125, "test_loss": 0.5, "best_step": 7, "steps": 8, "skipped_steps": 2}


def changed(**facts: Any) -> dict[str, Any]:
    return {key: {**held, **facts[key]} if key in facts else held for key, held in FACTS.items()}


@pytest.mark.parametrize(
    ("run", "step", "kind", "shown"),
    [
        (None, 7, "trained", {"val_loss": "0.25"}),
        ({**ENDED, "tested": "best"}, 7, "trained", {"val_loss": "0.25", "test_loss": "0.5"}),
        ({**ENDED, "tested": "best"}, 10, "trained", {"val_loss": "0.25"}),
        ({**ENDED, "tested": "last"}, 7, "trained", {"val_loss": "0.25"}),
        ({**ENDED, "tested": "last"}, 10, "trained", {"val_loss": "0.25", "test_loss": "0.5"}),
        ({**ENDED, "tested": "best"}, 7, "ema", {}),
    ],
)
def test_no_number_is_of_other_weights(run: Any, step: int, kind: str, shown: Any) -> None:
    """The run's last validation is no checkpoint's, and a test is of the weights it names."""
    facts = changed(metrics={"run": run}, run={"step": step}, weights={"kind": kind})
    card = format_card("mine", "torch", nn.Linear(1, 1), facts)
    assert dict(re.findall(r"^\| (\w+_loss) \| (.*) \| unknown \|$", card, re.M)) == shown
    assert ("The run has measured nothing with these weights." in card) == (not shown)


def test_a_secret_and_the_command_line(
    exported: Exported, monkeypatch: Patch, capsys: Shown
) -> None:
    if exported.library != "torch":
        return
    monkeypatch.setenv("SOME_TOKEN", "mpframe.data.digits")
    words = [f"checkpoint={exported.run}", f"out={exported.out}", exported.target]
    main([*words, "format=huggingface", "overwrite=true"])
    assert capsys.readouterr().out.strip() == (
        f"{exported.out}: 2 tensors in fp32, weights trained, step 2; a torch model, and its "
        "README.md says how to use them"
    )
    assert "| dataset | *** |" in exported.card
    assert "mpframe.data.digits" not in exported.card


def test_a_place_that_is_taken_is_kept(tmp_path: Path) -> None:
    out, model = tmp_path / "out", nn.Linear(2, 1)
    write_folder(out, model, FACTS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("out")
    for taken, overwrite in ((out, False), (tmp_path / "mine", True), (tmp_path / "link", True)):
        said = refused(ConfigError, huggingface.refuse_taken, taken, overwrite)
        assert said == (
            f"out={taken}: {taken} exists; choose another folder, or replace an exported one with "
            "overwrite=true"
        )
    huggingface.refuse_taken(out, True)
    (out / "old").touch()
    write_folder(out, model, FACTS)
    assert sorted(path.name for path in out.iterdir()) == [
        *("README.md", "config.json", "model.safetensors", "model.safetensors.json")
    ]


def test_nothing_is_left_of_a_failure(
    exported: Exported, tmp_path: Path, monkeypatch: Patch, capsys: Shown
) -> None:
    monkeypatch.setattr(huggingface, "put_in_place", full)
    words = [f"checkpoint={exported.run}", f"out={tmp_path}/out", exported.target]
    with pytest.raises(SystemExit):
        main([*words, "format=huggingface"])
    assert capsys.readouterr().err.strip() == (
        f"mpframe: out={tmp_path}/out: cannot be written (No space left on device); choose another"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_images_are_prepared_as_in_the_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "image_size": 8, "patch_size": 4}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_channels": 1, "num_labels": 2}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **heads))
    how = {"preprocessing": Normalize((0.3,), (0.4,)).described(8, 16)}
    write_folder(tmp_path / "out", model, FACTS | how | {"class_names": ["cat", "dog"]})
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    pixels = torch.arange(64, dtype=torch.uint8).reshape(1, 8, 8) % 17
    prepared = processor(pixels, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(prepared[0], (pixels / 16 - 0.3) / 0.4)
    assert model.config.id2label == {0: "cat", 1: "dog"}


@pytest.mark.slow
def test_a_model_that_its_library_builds_otherwise_is_refused(tmp_path: Path) -> None:
    timm, transformers = (pytest.importorskip(name) for name in ("timm", "transformers"))
    start = "format=huggingface: {} loaded from its config.json is another model: "
    model = timm.create_model("test_resnet", num_classes=2)
    model.fc = nn.Linear(96, 3)
    said = refused(UserCodeError, write_folder, tmp_path / "out", model, FACTS)
    assert said.startswith(start.format("ResNet"))
    assert "size mismatch for fc.weight" in said
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=9, **sizes))
    model.extra = nn.Linear(1, 1)
    said = refused(CheckpointError, write_folder, tmp_path / "out", model, FACTS)
    assert said == start.format("BertModel") + "extra.bias, extra.weight; use format=safetensors"
    assert not list(tmp_path.iterdir())
