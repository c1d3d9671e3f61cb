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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpframe import assembly, checkpoint
from mpframe.checkpoint.state import steps_tried, weights_of
from mpframe.cli.program import program
from mpframe.cli.restored import run_folder
from mpframe.config.command_line import refuse_unwritable
from mpframe.config.schema import Config
from mpframe.config.stored import config_of
from mpframe.errors import ConfigError, take_options
from mpframe.loss_scaling import Static
from mpframe.numerics.gradient_picture import ScaledGradients, best_scale, draw, scaled_gradients
from mpframe.numerics.product_limits import OperandLimits, gradient_limits
from mpframe.numerics.product_noise import ProductProbe
from mpframe.numerics.ranges import RangeProbe, Ranges
from mpframe.precision.policy import NO_PRODUCTS
from mpframe.training.loader import Loader
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of

_OPTIONS = ("run", "out")
Weights = dict[str, torch.Tensor]


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
    losses = _losses(config, state, weights_of(state, "trained", path), half)
    recipe = config.dtype.products
    draw(losses, half, step, out, "" if recipe == NO_PRODUCTS else recipe)
    limits = [line for own in losses for line in own.product_lines()]
    print("\n".join([*(own.line() for own in losses), *limits]))
    if recipe != NO_PRODUCTS and not limits:
        why = "quantised nowhere, or after a Hadamard transform, or not finite"
        print(f"no limits of {recipe}: gradients are {why}")
    print(f"picture: {out}")


def _losses(
    config: Config, state: dict[str, Any], weights: Weights, half: torch.dtype
) -> list[ScaledGradients]:
    """What is lost without a scale, at the run's present scale if it has one, and at the best."""
    present = _scale_of(state)
    plain = _measured(config, weights, 1.0, half)
    best = best_scale(plain, half)
    limits = _product_limits(config, state, weights, present or 1.0)
    if present is None:
        losses = [scaled_gradients("no loss scaling", plain, limits)]
    else:
        scaled = _measured(config, weights, present, half)
        losses = [
            scaled_gradients("no loss scaling", plain),
            scaled_gradients("present scale", scaled, limits),
        ]
    return [*losses, scaled_gradients("best scale", _measured(config, weights, best, half))]


def _measured(config: Config, weights: Weights, scale: float, half: torch.dtype) -> Ranges:
    """The ranges of one step in fp32, from the same weights, batch and random numbers each time."""
    trainer, train = _prepared(assembly.in_fp32(config), weights, scale)
    probe = RangeProbe(trainer, half)
    trainer.train_step(next(iter(train.epoch(0))))
    return probe.ranges()


def _product_limits(
    config: Config, state: dict[str, Any], weights: Weights, scale: float
) -> Mapping[str, OperandLimits]:
    """What the run's products hold of the gradients of the same step, in the run's own precision.

    Delayed scales go on with the checkpoint's histories. Nothing is there without a recipe.
    """
    if not assembly.build_precision(config).policy.recipes:
        return {}
    trainer, train = _prepared(config, weights, scale)
    trainer.precision.load_state_dict(state["trainer"].get("products", {}))
    probe = ProductProbe(trainer.precision)
    trainer.train_step(next(iter(train.epoch(0))))
    return gradient_limits(probe.noises(), trainer.precision.policy)


def _prepared(config: Config, weights: Weights, scale: float) -> tuple[Trainer, Loader]:
    """A fresh trainer with a fixed loss scale, and the training samples."""
    assembly.seed_everything(config.run.seed)
    task = assembly.build_task(config)
    train = assembly.build_loaders(config, task).train
    trainer = assembly.build_trainer(config, task, 1)
    trainer.load_weights(weights)
    return _scaled(trainer, scale), train


def _scaled(trainer: Trainer, scale: float) -> Trainer:
    """The same trainer with a fixed loss scale."""
    scaler = Static(scale).to(device_of(trainer.model))
    parts = trainer.model, trainer.optimizer, trainer.objective, trainer.precision
    return type(trainer)(*parts, scaler=scaler)


def _scale_of(state: dict[str, Any]) -> float | None:
    """The loss scale in a checkpoint; if several losses have one each, the largest."""
    trainer = state.get("trainer")
    scalers = trainer.get("scaler") if isinstance(trainer, dict) else None
    scales = [float(own["scale"]) for own in (scalers or {}).values()]
    return max(scales, default=None)
