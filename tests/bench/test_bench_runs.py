"""The benchmark's whole runs: the same training by everybody, each in a process of its own."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bench.groups import programs
from bench.whole import one_run, ours, trainers
from bench.whole.loaders import cut, dataloaders
from bench.whole.workloads import WORKLOADS, Workload
from fixtures import Patch
from in_process import differing, scalars

from mpframe.config.command_line import compose_named, without_hydra
from mpframe.run.run import train

TINY: dict[str, dict[str, int]] = {
    "digits_mlp": {"epochs": 2},
    "fashion_cnn": {"batch_size": 1000, "max_steps": 2, "width": 2},
    "resnet18": {"count": 13, "batch_size": 4, "width": 2},
    "tiny_bert": {"count": 21, "batch_size": 4, "width": 4},
}


def made(name: str) -> Workload:
    if name == "tiny_bert":
        pytest.importorskip("transformers")
    work = WORKLOADS[name](**TINY[name])
    if name == "fashion_cnn" and not Path(work.data.keywords["root"]).is_dir():
        pytest.skip("Fashion-MNIST is not here")
    return work


@pytest.mark.parametrize("name", WORKLOADS)
def test_by_hand_and_by_mpframe_it_is_the_same_training(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    work, ended = made(name), Mock(side_effect=ours.LoopClock.teardown)
    monkeypatch.setattr(ours.LoopClock, "teardown", lambda *given: ended(*given))
    torch.manual_seed(0)
    before = work.model().state_dict()
    by_hand = trainers.by_hand(work, tmp_path / "hand")
    train(without_hydra(compose_named(ours.options(work))[1]), tmp_path / "ours")
    weights = ended.call_args.args[1].weights()
    assert differing(by_hand.model.state_dict(), weights) == []
    assert differing(weights, before)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [name for name in trainers.TRAINERS if name != trainers.BY_HAND])
def test_all_others_train_the_same_weights(name: str, tmp_path: Path) -> None:
    package, trainer = trainers.TRAINERS[name]
    pytest.importorskip(package)
    by_hand = trainers.by_hand(made("digits_mlp"), tmp_path / "hand").model.state_dict()
    other = tmp_path / "other"
    other.mkdir()
    done = trainer(made("digits_mlp"), other)
    assert min(done.time.seconds, done.time.cpu_seconds) > 0
    assert differing(done.model.state_dict(), by_hand) == []
    logged = {tag for file in other.rglob("events.out.tfevents.*") for tag in scalars(file)}
    assert {"loss/train", "grad/norm", "loss/val", "metric/accuracy/val"} <= logged


def test_batches_cut_from_tensors_are_those_of_the_dataloader() -> None:
    work = made("resnet18")  # 13 samples in batches of 4
    assert len(list(cut(work)[0])) == 3
    for _ in range(2):  # Another order in the second epoch.
        ready, cut_out = ([[*own] for own in loaders] for loaders in (dataloaders(work), cut(work)))
        assert differing(ready, cut_out) == []


def test_a_table_of_runs(monkeypatch: Patch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def fake(words: list[str], folder: Path, name: str) -> str:
        asked.append(json.loads(words[-1]))
        seconds = 2.0 if asked[-1]["trainer"] == one_run.OURS else 4.0
        return "epoch 1 ...\n" + json.dumps({"seconds": seconds, "cpu_seconds": 1.0}) + "\n"

    monkeypatch.setattr(programs, "run_python", fake)
    (table,) = programs.run_tables(2, tmp_path, {"digits_mlp": {"epochs": 3}}, [trainers.BY_HAND])
    assert table.times == {"mpframe": [2.0] * 2, "by hand": [4.0] * 2}
    ratios = {claim.text: claim.ratio.median for claim in table.claims}
    assert ratios == {"mpframe / by hand": 0.5, "mpframe / by hand, CPU time": 1.0}
    assert len({given["folder"] for given in asked}) == 4
    assert {given["sizes"]["epochs"] for given in asked} == {3}


def test_a_run_in_a_process_of_its_own(tmp_path: Path) -> None:
    run = programs.Runs("digits_mlp", {"epochs": 1}, one_run.OURS, tmp_path)
    assert 0 < run() < run.whole[0]
