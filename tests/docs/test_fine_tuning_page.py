"""The commands of docs/fine_tuning.md, in their order and in one folder."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from in_process import train
from pages import ROOT, Page
from safetensors.torch import save_file
from test_docs import Story, is_run
from torchvision.models import resnet18

from mpframe import checkpoint
from mpframe.checkpoint.state import weights_of

PAGE = Page(ROOT / "docs" / "fine_tuning.md")


def test_every_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_data: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_data / "image_folder", "data/pictures")
    torch.save(resnet18().state_dict(), "resnet18.pth")
    train(Path("runs/mine"), "trainer.max_steps=1")
    own = weights_of(checkpoint.load(Path("runs/mine")), "trained", Path())
    save_file({f"net.{name}": tensor for name, tensor in own.items()}, "own.safetensors")
    story, commands = Story(), list(filter(is_run, PAGE.commands()))
    for command in commands:
        story.run(command)
    assert [c.program for c in commands] == ["train", "evaluate", "predict", *["train"] * 4]
    (table,) = Path("runs/tuned").glob("predictions_folder_step_*.csv")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows[:2]] == ["0/0000.jpg", "0/0001.jpg"]
    assert "probability_9" in rows[0]
