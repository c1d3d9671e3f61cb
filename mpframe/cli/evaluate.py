"""Measure a checkpoint again: the numbers of the run, bit for bit.

Usage: mpframe evaluate checkpoint=PATH [option=value] ...

    mpframe evaluate checkpoint=runs/2026-11-21/05-45-42
    mpframe evaluate checkpoint=runs/mine/checkpoints/step_00000440 weights=trained
    mpframe evaluate checkpoint=runs/mine dataset.root=/elsewhere device=cpu out=numbers.json

Options:
    checkpoint=PATH       a run (its newest checkpoint) or one checkpoint; must be given
    weights=trained|ema   default: as the run was validated
    out=FILE.json         default: evaluation_step_N.json in the run's folder
    option=value          an option of the run to change; GROUP=CHOICE, too
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The options are the run's own. A class that is not mpframe's must be named again, as in
model._target_=my_pkg.Net, or by a file of --config-dir: nothing is called because a stored file
says so.
"""

# The precision, batches, average and evaluation format are those of the run, and on the device and
# with the thread count it had, so is every bit. config/stored.py says how little a stored
# configuration is trusted.

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpframe import build, checkpoint
from mpframe.checkpoint.saved_weights import KINDS, averages_of, steps_tried, weights_of
from mpframe.cli.program import program
from mpframe.config.command_line import refuse_unwritable
from mpframe.config.schema import Config
from mpframe.config.stored import config_of
from mpframe.errors import ConfigError, nearest, printable, take_options
from mpframe.files.durable import write_atomically
from mpframe.tracking.summary import strict_json
from mpframe.training.evaluation import Evaluation
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of

_OPTIONS = ("checkpoint", "out", "weights")


@dataclass(frozen=True)
class Evaluated:
    """An evaluation and what it is of.

    Attributes:
        step: steps the run had tried when the checkpoint was saved.
        weights: `trained` or `ema`.
        precision: the mode evaluated in, e.g. `amp(float16)`.
        device: where.
        batch_size, samples: of the validation data.
    """

    evaluation: Evaluation
    step: int
    weights: str
    precision: str
    device: str
    batch_size: int
    samples: int


def main(arguments: list[str] | None = None) -> None:
    """Evaluate the checkpoint of `checkpoint=...`; print loss and metric and write them as JSON.

    Args:
        arguments: `checkpoint=RUN_OR_CHECKPOINT`, `weights=trained|ema`, `out=FILE.json`, and
            options of the run to change; the command line if None.
    """
    with program():
        _main(sys.argv[1:] if arguments is None else arguments)


def evaluate(path: Path, given: list[str], weights: str | None = None) -> Evaluated:
    """Evaluate a checkpoint.

    Args:
        path: a run's folder (its newest checkpoint) or a checkpoint within it.
        given: `GROUP=CHOICE` and `option=value` words that change the run's options.
        weights: `trained` or `ema`; None: as the run was validated.

    Raises:
        MpframeError: anything that is missing, damaged or does not fit, in one line.
    """
    snapshot, source = checkpoint.read(path), checkpoint.newest(path)
    state, config = snapshot.state, config_of(snapshot.config, source / "config.yaml", given)
    trained = weights_of(state, "trained", path)
    kind = weights or ("ema" if config.trainer.ema_decay is not None else "trained")
    build.seed_everything(config.run.seed)
    task = build.build_task(config)
    _, val = build.build_loaders(config, task)
    trainer = build.build_trainer(config, task, 1)
    trainer.load_weights(trained)
    _use(trainer, kind, state, path)
    evaluation = trainer.evaluate(val)
    return _described(config, trainer, evaluation, (steps_tried(state, path), kind, val.size))


def run_folder(path: Path) -> Path:
    """The run's folder a checkpoint lies in; a run's folder itself."""
    return path.parent.parent if path.absolute().parent.name == checkpoint.FOLDER else path


def _main(arguments: list[str]) -> None:
    own, given = take_options(arguments, _OPTIONS)
    if not own.get("checkpoint"):
        raise ConfigError("checkpoint: must be given, e.g. checkpoint=runs/2026-11-21/05-45-42")
    _refuse_flags(given)
    path = Path(own["checkpoint"])
    kind = own.get("weights")
    if kind is not None and kind not in KINDS:
        hint = nearest(kind, KINDS)
        raise ConfigError(f"weights={kind}: choose {' or '.join(KINDS)}" + f"; {hint}" * bool(hint))
    if "out" in own:
        refuse_unwritable("out", Path(own["out"]).parent)
    done = evaluate(path, given, kind)
    out = Path(own.get("out") or run_folder(path) / f"evaluation_step_{done.step:08d}.json")
    _write(out, path, done)
    print(printable(_text(path, done, out)))


def _refuse_flags(given: list[str]) -> None:
    for word in given:
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such option; give option=value")


def _use(trainer: Trainer, kind: str, state: dict[str, Any], path: Path) -> None:
    """Let the trainer validate with the averages, or without."""
    if kind == "trained":
        trainer.ema = None
        return
    averages = averages_of(state, path)
    if trainer.ema is None:
        raise ConfigError("weights=ema: trainer.ema_decay is null; give trainer.ema_decay=0.999")
    trainer.ema.load_by_name(trainer.model, averages)


def _described(
    config: Config, trainer: Trainer, evaluation: Evaluation, facts: tuple[int, str, int]
) -> Evaluated:
    step, kind, samples = facts
    device = device_of(trainer.model)
    precision = trainer.eval_precision or trainer.precision
    return Evaluated(
        evaluation, step, kind, str(precision), str(device), config.data.batch_size, samples
    )


def _write(out: Path, path: Path, done: Evaluated) -> None:
    entries = {
        "checkpoint": str(path),
        "step": done.step,
        "weights": done.weights,
        "val_loss": done.evaluation.loss,
        **{f"val_{name}": value for name, value in done.evaluation.metrics.items()},
        "precision": done.precision,
        "device": done.device,
        "batch_size": done.batch_size,
        "samples": done.samples,
    }
    try:
        write_atomically(out, strict_json(entries))
    except OSError as error:
        raise ConfigError(
            f"out={out}: cannot be written ({error.strerror}); choose another"
        ) from error


def _text(path: Path, done: Evaluated, out: Path) -> str:
    result = done.evaluation
    metrics = "".join(f", val_{name} {value:.6g}" for name, value in result.metrics.items())
    return (
        f"{path}, step {done.step}: val_loss {result.loss:.6g}{metrics} "
        f"({done.samples} samples, {done.precision} on {done.device}, "
        f"weights {done.weights}); written to {out}"
    )
