"""The precision ladder's rungs, and fine-tuning from a backbone that another run has trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import StartRun
from sameness import cut
from torch import Tensor

from mpframe import checkpoint
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.locations import CONF
from mpframe.run.parts import build_task
from mpframe.run.trainer import build_trainer

RUNGS = sorted(path.stem for path in (CONF / "rung").glob("*.yaml"))


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(checkpoint.load(folder)["trainer"]["weights"])


def built(*words: str) -> Any:
    config = check_config(without_hydra(compose_named(list(words))[1]))
    return build_trainer(config, build_task(config), batches=4)


def test_the_command_runs_every_rung() -> None:
    for name in ("ladder", "ladder_digits"):
        _, composed = compose_named([f"experiment={name}"])
        assert composed.hydra.mode.name == "MULTIRUN"
        assert sorted(composed.hydra.sweeper.params.rung.split(",")) == RUNGS
    _, composed = compose_named(["experiment=ladder_digits", "rung=dynamic"])
    scaler = check_config(without_hydra(composed)).loss_scaling
    assert (scaler["init_scale"], scaler["growth_interval"]) == (2.0**24, 500)


@pytest.mark.parametrize(
    ("rung", "conv", "norm", "masters"),
    [
        ("fp32", torch.float32, torch.float32, False),
        ("half", torch.float16, torch.float16, False),
        ("fp32_norms", torch.float16, torch.float32, False),
        ("masters", torch.float16, torch.float32, True),
    ],
)
def test_each_rung_stores_what_it_says(rung: str, conv: Any, norm: Any, masters: bool) -> None:
    trainer = built("experiment=ladder_digits", "model.width=4", f"rung={rung}")
    stored = dict(trainer.model.named_parameters())
    assert stored["layer1.0.conv1.weight"].dtype == conv
    assert stored["layer1.0.bn1.weight"].dtype == norm
    kept = trainer.state_dict()["weights"]["layer1.0.conv1.weight"]  # A master, if there is one.
    assert (conv == torch.float16 and kept.dtype == torch.float32) == masters


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
    model = built(*TUNING).model
    stored = {name: str(parameter.dtype)[6:] for name, parameter in model.named_parameters()}
    assert stored["fc.weight"] == "float32"
    assert stored["layer1.0.conv1.weight"] == stored["conv1.weight"] == "bfloat16"
