"""Measure a checkpoint again, on test or validation data, bit for bit.

Usage: mpframe evaluate checkpoint=PATH [option=value] ...

    mpframe evaluate checkpoint=runs/2026-11-21/05-45-42
    mpframe evaluate checkpoint=runs/mine/checkpoints/step_00000440 weights=trained
    mpframe evaluate checkpoint=runs/mine dataset.root=/elsewhere device=cpu out=numbers.json

Options:
    checkpoint=PATH       a run or one checkpoint; must be given. A run stands for the checkpoint
                          that was tested, and with split=val for its newest one
    split=val|test        default: test, or val if the dataset has no test part
    weights=trained|ema   default: as the run was validated
    out=FILE.json         default: evaluation_SPLIT_step_N.json in the run's folder; with options
                          that are not the run's own they are part of the name
    option=value          an option of the run to change; GROUP=CHOICE, too
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The options are the run's own. A class that is not mpframe's must be named again, as in
model._target_=my_pkg.Net, or by a file of --config-dir: nothing is called because a stored file
says so.
"""

# The precision, batches, average and evaluation format are those of the run, and on the device and
# with the thread count it had, so is every bit. config/stored.py says how little a stored
# configuration is trusted.

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from mpframe import assembly
from mpframe.checkpoint.state import KINDS
from mpframe.cli.program import program, refuse_unknown
from mpframe.cli.restored import Restored, checkpoint_of, restored, run_folder
from mpframe.config.command_line import refuse_unwritable
from mpframe.config.overrides import take_source
from mpframe.config.redaction import secrets_of
from mpframe.config.sweep import name_of
from mpframe.core.errors import ConfigError
from mpframe.core.tree import device_of
from mpframe.data.loading import Loader
from mpframe.files.durable import write_atomically
from mpframe.files.text import printable, take_options
from mpframe.tracking.summary import strict_json
from mpframe.training.evaluation import Evaluation

_OPTIONS = ("checkpoint", "out", "split", "weights")
_SPLITS = ("val", "test")


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, and what was evaluated.

    Attributes:
        split: `val` or `test`.
        step: steps the run had tried when the checkpoint was saved.
        weights: `trained` or `ema`.
        precision: the mode evaluated in, e.g. `amp(float16)`.
        device: where.
        batch_size, samples: of the data measured on.
    """

    evaluation: Evaluation
    split: str
    step: int
    weights: str
    precision: str
    device: str
    batch_size: int
    samples: int


def main(arguments: list[str] | None = None) -> None:
    """Evaluate the checkpoint of `checkpoint=...`; print loss and metric and write them as JSON.

    Args:
        arguments: `checkpoint=RUN_OR_CHECKPOINT`, `split=val|test`, `weights=trained|ema`,
            `out=FILE.json`, and options of the run to change; the command line if None.
    """
    with program():
        _main(sys.argv[1:] if arguments is None else arguments)


def evaluate(
    path: Path, given: list[str], weights: str | None = None, split: str | None = None
) -> Evaluated:
    """Evaluate a checkpoint.

    Args:
        path: a run's folder or a checkpoint within it.
        given: `GROUP=CHOICE` and `option=value` words that change the run's options.
        weights: `trained` or `ema`; None: as the run was validated.
        split: `val` or `test`; None: `test` if the dataset has one.

    Raises:
        MpframeError: anything that is missing, damaged or does not fit, in one line.
    """
    path = checkpoint_of(path, split)
    run = restored(path, given, weights)
    split, loader = _chosen(split, assembly.build_loaders(run.config, run.task))
    evaluation = run.trainer.evaluate(loader)
    return _described(run, evaluation, split, loader)


def _chosen(split: str | None, loaders: assembly.Loaders) -> tuple[str, Loader]:
    if split == "val" or (split is None and loaders.test is None):
        return "val", loaders.val
    if loaders.test is None:
        raise ConfigError("split=test: the dataset has no test part; use split=val")
    return "test", loaders.test


def _main(arguments: list[str]) -> None:
    own, given = take_options(arguments, _OPTIONS)
    if not own.get("checkpoint"):
        raise ConfigError("checkpoint: must be given, e.g. checkpoint=runs/2026-11-21/05-45-42")
    path = Path(own["checkpoint"])
    kind = own.get("weights")
    refuse_unknown("weights", kind, KINDS)
    refuse_unknown("split", own.get("split"), _SPLITS)
    if "out" in own:
        refuse_unwritable("out", Path(own["out"]).parent)
    done = evaluate(path, given, kind, own.get("split"))
    _, changed = take_source(given)
    changed += [f"weights={kind}"] if kind else []
    out = Path(own.get("out") or run_folder(path) / _file_name(done, changed))
    _write(out, path, done)
    print(printable(_text(path, done, out)))


def _file_name(done: Evaluated, changed: list[str]) -> str:
    """Named after the options that are not the run's own, so the run's evaluation stays."""
    how = name_of(changed, [], "", secrets_of([*sys.argv, *changed], os.environ))
    return f"evaluation_{done.split}_step_{done.step:08d}{',' * bool(how)}{how}.json"


def _described(run: Restored, evaluation: Evaluation, split: str, loader: Loader) -> Evaluated:
    device = device_of(run.trainer.model)
    precision = run.trainer.precision
    return Evaluated(
        evaluation,
        split,
        run.step,
        run.weights,
        str(precision),
        str(device),
        loader.batch_size,
        loader.size,
    )


def _write(out: Path, path: Path, done: Evaluated) -> None:
    entries = {
        "checkpoint": str(path),
        "step": done.step,
        "weights": done.weights,
        "split": done.split,
        f"{done.split}_loss": done.evaluation.loss,
        **{f"{done.split}_{name}": value for name, value in done.evaluation.metrics.items()},
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
    result, split = done.evaluation, done.split
    metrics = "".join(f", {split}_{name} {value:.6g}" for name, value in result.metrics.items())
    return (
        f"{path}, step {done.step}: {split}_loss {result.loss:.6g}{metrics} "
        f"({done.samples} samples, {done.precision} on {done.device}, "
        f"weights {done.weights}); written to {out}"
    )
