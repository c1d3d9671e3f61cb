"""A run traces its first batch: which weights are half, the same in every command."""

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, Patch
from in_process import StartRun, composed, texts
from planted import Foreign

from mpframe.config.command_line import check_config
from mpframe.core.errors import RunInterrupted, UserCodeError
from mpframe.core.precision import Precision
from mpframe.run.parts import build_task, seed_everything
from mpframe.run.trainer import build_trainer
from mpframe.tracking.tags import Tag
from mpframe.training.trainer import Trainer
from mpframe.workloads.gan import discriminator_objective, generator_objective

FOREIGN = ["model._target_=planted.Foreign", "dtype=mixed"]


def built(*overrides: str) -> Trainer:
    config = check_config(composed(*overrides))
    seed_everything(0)
    task = build_task(config)
    seed_everything(0)
    return build_trainer(config, task, 4)


def half_weights(trainer: Trainer) -> list[str]:
    return [name for name, p in trainer.model.named_parameters() if p.dtype == torch.float16]


def test_weights_of_foreign_layers_are_half_and_the_run_is_as_it_would_be() -> None:
    """Initial values, buffers and the numbers drawn next are those of a mode without a trace."""
    traced = built(*FOREIGN)
    assert half_weights(traced) == ["first.weight", "first.bias", "head.weight", "head.bias"]
    number = torch.rand(())
    weights = built(*FOREIGN, "dtype.mode=amp").weights()
    assert torch.equal(torch.rand(()), number)
    for name, value in traced.weights().items():
        assert torch.equal(value, weights[name]), name


def test_every_loss_is_traced(monkeypatch: Patch) -> None:
    """A generator's loss may call other layers than the discriminator's."""
    traced: list[Any] = []
    monkeypatch.setattr(Precision, "trace", lambda _, model, example: traced.append(example))
    built("experiment=digits_gan")
    assert [own.func for own in traced] == [discriminator_objective, generator_objective]


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_lazy_layers_get_their_shapes_from_the_first_batch(mode: str) -> None:
    trainer = built("model._target_=planted.lazy", f"dtype.mode={mode}")
    assert trainer.model[1].weight.shape == (10, 64)
    assert half_weights(trainer) == ["1.weight", "1.bias"] * (mode == "mixed")


def test_the_map_says_what_stays_fp32(start_run: StartRun, tmp_path: Path, caplog: Log) -> None:
    caplog.set_level(logging.INFO)
    start_run(tmp_path, *FOREIGN, "trainer.max_steps=1")
    text = """\
idle     Product      float32  -             no op of torch.nn: fp32 weights, never called
head     Product      float16  float16       addmm in ops.allow
float32: 31.7 % of 3,530 weights
  29.9 %: no op of torch.nn, never called: idle; half with ops.modules['idle']=half
  1.81 %: batch_norm is in no list: norm"""
    assert any(message.endswith(text) for message in caplog.messages)
    assert text in texts(tmp_path, Tag.TEXT_DTYPE_MAP)[0][1]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_first_batch_that_fails_is_left_to_the_first_step(
    error: type[BaseException], start_run: StartRun, tmp_path: Path, caplog: Log, monkeypatch: Patch
) -> None:
    """There a guard knows the batch; here the weights go by their classes, and that is said."""

    def fails(*_: Any) -> None:
        raise error("this model takes no images")

    monkeypatch.setattr(Foreign, "forward", fails)
    assert half_weights(built(*FOREIGN)) == []
    assert caplog.messages == [
        "warning: the first batch could not be traced (this model takes no images): weights of "
        "classes that are not torch.nn's stay fp32"
    ]
    if error is ValueError:
        with pytest.raises(UserCodeError, match="takes no images"):
            start_run(tmp_path, *FOREIGN)


def test_a_signal_ends_the_trace(monkeypatch: Patch) -> None:
    def interrupted(*_: Any) -> None:
        raise RunInterrupted(signal.SIGTERM)

    monkeypatch.setattr(Foreign, "forward", interrupted)
    with pytest.raises(RunInterrupted):
        built(*FOREIGN)
