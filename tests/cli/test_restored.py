"""What a path on the command line stands for."""

from pathlib import Path

from in_process import train

from mpframe import checkpoint
from mpframe.cli.restored import run_folder


def test_a_run_in_a_folder_named_checkpoints_is_a_run(tmp_path: Path) -> None:
    run = tmp_path / "checkpoints" / "mine"
    train(run, "model=mlp", "trainer.max_steps=1")
    assert run_folder(run) == run
    assert run_folder(checkpoint.newest(run)) == run
