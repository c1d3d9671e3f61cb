"""The precision ladder's rungs, and fine-tuning from a backbone that another run has trained."""

from pathlib import Path

import pytest
import torch
from in_process import StartRun, train
from sameness import cut
from torch import Tensor

from mpframe import checkpoint
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.locations import CONF
from mpframe.run.parts import build_task
from mpframe.run.trainer import build_trainer

RUNGS = sorted(path.stem for path in (CONF / "rung").glob("*.yaml"))
TRAINED = [rung for rung in RUNGS if rung != "dynamic"]  # It is `masters` with another scaler.
LADDER = ["experiment=ladder_digits", "model.width=4", "trainer.max_steps=2", "trainer.log_every=1"]


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(checkpoint.load(folder)["trainer"]["weights"])


@pytest.fixture(scope="module")
def rungs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """The weights after two steps on each rung."""
    folder = tmp_path_factory.mktemp("ladder")
    for rung in TRAINED:
        train(folder / rung, *LADDER, f"rung={rung}")
    return {rung: weights(folder / rung) for rung in TRAINED}


def test_the_command_runs_every_rung() -> None:
    for name in ("ladder", "ladder_digits"):
        _, composed = compose_named([f"experiment={name}"])
        assert composed.hydra.mode.name == "MULTIRUN"
        assert sorted(composed.hydra.sweeper.params.rung.split(",")) == RUNGS
    _, composed = compose_named(["experiment=ladder_digits", "rung=dynamic"])
    scaler = check_config(without_hydra(composed)).loss_scaling
    assert (scaler["init_scale"], scaler["growth_interval"]) == (2.0**24, 500)


def test_norms_stay_at_one_only_if_the_whole_model_is_half(
    rungs: dict[str, dict[str, Tensor]],
) -> None:
    """An update of less than 2^-12 is rounded away from a half weight that is 1."""
    norms = [name for name, own in rungs["fp32"].items() if "bn" in name and "weight" in name]
    still = {
        rung: [name for name in norms if torch.equal(own[name], torch.ones_like(own[name]))]
        for rung, own in rungs.items()
    }
    assert [name for name in norms if name not in still["half"]] in ([], ["bn1.weight"])
    assert [rung for rung in TRAINED if still[rung]] == ["half"]


def test_each_rung_stores_what_it_says(rungs: dict[str, dict[str, Tensor]]) -> None:
    kept = {"layer1.0.conv1.weight": "conv", "layer1.0.bn1.weight": "norm"}
    exact = {
        rung: {what for name, what in kept.items() if not _is_half(own[name])}
        for rung, own in rungs.items()
    }
    both = {"conv", "norm"}
    assert exact == {
        "fp32": both, "half": set(), "fp32_norms": {"norm"}, "masters": both
    }  # fmt: skip


def _is_half(values: Tensor) -> bool:
    """Whether float16 holds the values: what was updated in fp32 has more digits."""
    return torch.equal(values.float(), values.half().float())


TUNING = [
    *("experiment=fine_tuning_digits", "dtype=mixed_bf16", "dataset.batch_size=512"),
    *("trainer.log_every=1", "trainer.checkpoint_every=1", "trainer.keep_last=100"),
]


def test_the_body_waits_for_the_head(start_run: StartRun, tiny_data: Path, tmp_path: Path) -> None:
    """Two steps are an epoch. The head is pinned, and the body goes by the mode."""
    source = tmp_path / "backbone"
    start_run(source, "experiment=fine_tuning_backbone", "trainer.max_steps=1",
              f"dataset.root={tiny_data / 'fashion_mnist'}", "dataset.batch_size=8")  # fmt: skip
    start_run(tmp_path / "run", *TUNING, f"init_from={source}", "trainer.epochs=2")
    before = weights(source)
    first, last = (weights(cut(tmp_path / "run", tmp_path / f"cut{n}", n)) for n in (2, 4))
    trained = [name for name in before if "running" not in name and "tracked" not in name]
    body = [name for name in trained if not name.startswith("fc")]
    assert all(torch.equal(first[name], before[name]) for name in body)
    assert not any(torch.equal(last[name], first[name]) for name in trained)
    config = check_config(without_hydra(compose_named(TUNING)[1]))
    model = build_trainer(config, build_task(config), batches=4).model
    stored = {name: str(parameter.dtype)[6:] for name, parameter in model.named_parameters()}
    assert stored["fc.weight"] == "float32"
    assert stored["layer1.0.conv1.weight"] == stored["conv1.weight"] == "bfloat16"
