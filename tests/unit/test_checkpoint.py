"""Checkpoints: whole or absent, verified, pruned by number."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpframe import checkpoint
from mpframe.errors import CheckpointError

STATE = {"weights": {"a": torch.arange(5.0)}, "steps": 3, "name": "x", "list": [1, None, 2.5]}


def test_a_state_comes_back(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, STATE, keep_last=2)
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["weights"]["a"], STATE["weights"]["a"])  # type: ignore[index]
    assert {k: v for k, v in loaded.items() if k != "weights"} == {
        k: v for k, v in STATE.items() if k != "weights"
    }
    assert checkpoint.load(tmp_path)["steps"] == 3


def test_the_newest_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    for attempts in (9, 10, 99_999_999, 100_000_000):
        checkpoint.save(tmp_path, attempts, STATE, keep_last=2)
    kept = [path.name for path in checkpoint.all_in(tmp_path)]
    assert kept == ["step_99999999", "step_100000000"]


def test_a_failed_write_leaves_the_older_ones_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, STATE, keep_last=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"could not be written \(No space left on device\)"):
        checkpoint.save(tmp_path, 2, STATE, keep_last=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert checkpoint.load(tmp_path)["steps"] == 3


@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_one_flipped_bit_is_seen(tmp_path: Path, where: float) -> None:
    path = checkpoint.save(tmp_path, 1, STATE, keep_last=1)
    content = bytearray((path / "state.pt").read_bytes())
    content[int(len(content) * where)] ^= 4
    (path / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.pt: damaged, its digest differs"):
        checkpoint.load(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, STATE, keep_last=1)
    manifest = (path / "manifest.json").read_text().replace('"format": 1', '"format": 2')
    (path / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="format 2, this version reads 1"):
        checkpoint.load(path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        checkpoint.load(tmp_path)


class Attack:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("attacked"),)


def test_a_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = checkpoint.save(tmp_path, 1, {"state": Attack()}, keep_last=1)
    with pytest.raises(CheckpointError, match=r"state\.pt: holds code, which is never run"):
        checkpoint.load(path)
    assert not Path("attacked").exists()


def test_the_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.normal())]

    draw()
    path = checkpoint.save(tmp_path, 1, {"rng": checkpoint.rng_state()}, keep_last=1)
    expected = [draw() for _ in range(3)]
    checkpoint.restore_rng(checkpoint.load(path)["rng"])
    assert [draw() for _ in range(3)] == expected
