"""Show what a half format loses of a run's gradients, with loss scaling and without.

Usage: mpframe gradient_picture run=PATH [option=value] ...

    mpframe gradient_picture run=runs/2026-11-21/05-45-42
    mpframe gradient_picture run=runs/mine dtype.half=bfloat16 out=gradients.png

Options:
    run=PATH        a run (its newest checkpoint) or one checkpoint; must be given
    out=FILE.png    default: numerics/gradient_picture.png in the run's folder
    option=value    an option of the run to change; GROUP=CHOICE, too
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train
"""

import sys
from pathlib import Path

import torch

from mpframe import build, checkpoint
from mpframe.checkpoint.saved_weights import steps_tried, weights_of
from mpframe.cli.program import program
from mpframe.cli.restored import run_folder
from mpframe.config.composition.command_line import refuse_unwritable
from mpframe.config.schema import Config
from mpframe.config.stored import config_of
from mpframe.errors import ConfigError, take_options
from mpframe.loss_scaling import Static
from mpframe.numerics.gradient_picture import ScaledGradients, best_scale, draw, scaled_gradients
from mpframe.numerics.ranges import RangeProbe, Ranges
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of

_OPTIONS = ("run", "out")


def main(arguments: list[str] | None = None) -> None:
    """Measure the gradients of `run=...` in fp32; print what half loses, and draw it.

    Args:
        arguments: `run=RUN_OR_CHECKPOINT`, `out=FILE.png`, and options of the run to change; the
            command line if None.
    """
    with program():
        _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: list[str]) -> None:
    own, given = take_options(arguments, _OPTIONS)
    if not own.get("run"):
        raise ConfigError("run: must be given, e.g. run=runs/2026-11-21/05-45-42")
    path = Path(own["run"])
    out = Path(own.get("out") or run_folder(path) / "numerics" / "gradient_picture.png")
    refuse_unwritable("out", out.parent)
    snapshot = checkpoint.read(path)
    state = snapshot.state
    config = config_of(snapshot.config, checkpoint.newest(path) / "config.yaml", given)
    half, step = getattr(torch, config.dtype.half), steps_tried(state, path)
    losses = _losses(config, weights_of(state, "trained", path), _scale_of(state), half)
    draw(losses, half, step, out)
    print("\n".join(own.line() for own in losses))
    print(f"picture: {out}")


def _losses(
    config: Config, weights: dict[str, torch.Tensor], present: float | None, half: torch.dtype
) -> list[ScaledGradients]:
    """What is lost without a scale, at the run's present scale if it has one, and at the best."""
    plain = _measured(config, weights, 1.0, half)
    best = best_scale(plain, half)
    losses = [scaled_gradients("no loss scaling", plain)]
    if present is not None:
        losses.append(scaled_gradients("present scale", _measured(config, weights, present, half)))
    return [*losses, scaled_gradients("best scale", _measured(config, weights, best, half))]


def _measured(
    config: Config, weights: dict[str, torch.Tensor], scale: float, half: torch.dtype
) -> Ranges:
    """The ranges of one step in fp32, from the same weights, batch and random numbers each time."""
    build.seed_everything(config.run.seed)
    task = build.build_task(config)
    train = build.build_loaders(config, task).train
    trainer = build.build_trainer(build.in_fp32(config), task, 1)
    trainer.load_weights(weights)
    trainer = _scaled(trainer, scale)
    probe = RangeProbe(trainer, half)
    trainer.train_step(next(iter(train.epoch(0))))
    return probe.ranges()


def _scaled(trainer: Trainer, scale: float) -> Trainer:
    """The same trainer with a fixed loss scale."""
    scaler = Static(scale).to(device_of(trainer.model))
    parts = trainer.model, trainer.optimizer, trainer.objective, trainer.precision
    return type(trainer)(*parts, scaler=scaler)


def _scale_of(state: dict[str, object]) -> float | None:
    """The loss scale in a checkpoint; if several losses have one each, the largest."""
    trainer = state.get("trainer")
    scalers = trainer.get("scaler") if isinstance(trainer, dict) else None
    scales = [float(own["scale"]) for own in (scalers or {}).values()]
    return max(scales, default=None)
