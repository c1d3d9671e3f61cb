"""The benchmark's whole runs: the same training by everybody, each in a process of its own."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.groups import programs
from bench.whole import one_run, ours, trainers
from bench.whole.loaders import cut, dataloaders
from bench.whole.workloads import WORKLOADS, Workload
from fixtures import Patch
from in_process import scalars
from torch import Tensor

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
    ended: list[Any] = []
    write = ours.LoopClock.teardown

    def kept(clock: ours.LoopClock, trainer: Any, error: BaseException | None) -> None:
        ended.append(trainer)
        write(clock, trainer, error)

    monkeypatch.setattr(ours.LoopClock, "teardown", kept)
    work = made(name)
    torch.manual_seed(0)
    before = work.model().state_dict()
    by_hand = trainers.by_hand(work, tmp_path / "hand")
    train(without_hydra(compose_named(ours.options(work))[1]), tmp_path / "ours")
    weights: dict[str, Tensor] = ended[0].weights()
    for key, value in by_hand.model.state_dict().items():
        assert torch.equal(value, weights[key]), key
    assert not all(torch.equal(value, before[key]) for key, value in weights.items())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [name for name in trainers.TRAINERS if name != trainers.BY_HAND])
def test_all_others_train_the_same_weights(name: str, tmp_path: Path) -> None:
    package, trainer = trainers.TRAINERS[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    by_hand = trainers.by_hand(made("digits_mlp"), tmp_path / "hand").model.state_dict()
    other = tmp_path / "other"
    other.mkdir()
    done = trainer(made("digits_mlp"), other)
    assert min(done.time.seconds, done.time.cpu_seconds) > 0
    for key, value in done.model.state_dict().items():
        assert torch.equal(value, by_hand[key]), key
    logged = {tag for file in other.rglob("events.out.tfevents.*") for tag in scalars(file)}
    assert {"loss/train", "grad/norm", "loss/val", "metric/accuracy/val"} <= logged


def test_batches_cut_from_tensors_are_those_of_the_dataloader() -> None:
    work = made("resnet18")  # 13 samples in batches of 4
    assert len(list(cut(work)[0])) == 3
    for _ in range(2):  # Another order in the second epoch.
        for ready, cut_out in zip(dataloaders(work), cut(work), strict=True):
            for one, two in zip(ready, cut_out, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_table_of_runs(monkeypatch: Patch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def fake(words: list[str], folder: Path, name: str) -> str:
        asked.append(json.loads(words[-1]))
        seconds = 2.0 if asked[-1]["trainer"] == one_run.OURS else 4.0
        return "epoch 1 ...\n" + json.dumps({"seconds": seconds, "cpu_seconds": 1.0}) + "\n"

    monkeypatch.setattr(programs, "run_python", fake)
    (table,) = programs.run_tables(2, tmp_path, {"digits_mlp": {"epochs": 3}}, [trainers.BY_HAND])
    assert table.times == {"mpframe": [2.0] * 2, "by hand": [4.0] * 2}
    texts = ["mpframe / by hand", "mpframe / by hand, CPU time"]
    ratios = [(claim.text, claim.ratio.median) for claim in table.claims]
    assert ratios == list(zip(texts, [0.5, 1.0], strict=True))
    assert len({given["folder"] for given in asked}) == 4
    assert {given["sizes"]["epochs"] for given in asked} == {3}


def test_a_run_in_a_process_of_its_own(tmp_path: Path) -> None:
    run = programs.Runs("digits_mlp", {"epochs": 1}, one_run.OURS, tmp_path)
    assert 0 < run() < run.whole[0]
