"""Measure a checkpoint again, on test or validation data, bit for bit.

Usage: mpframe evaluate checkpoint=PATH [option=value] ...

    mpframe evaluate checkpoint=runs/2026-11-21/05-45-42
    mpframe evaluate checkpoint=runs/mine/checkpoints/step_00000440 weights=trained
    mpframe evaluate checkpoint=runs/mine dataset.root=/elsewhere device=cpu out=numbers.json

Options:
    checkpoint=PATH       required: a run or one checkpoint. A run stands for the checkpoint
                          that was tested, and with split=val for its newest one
    split=val|test        default: test, or val if the dataset has no test part
    weights=trained|ema   default: as the run was validated
    out=FILE.json         default: evaluation_SPLIT_step_N.json in the run's folder, named after
                          the options that are changed
    option=value          an option of the run to change, or GROUP=CHOICE
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The options are the run's own. A class that is not mpframe's must be named again, as in
model._target_=my_pkg.Net, or by a file of --config-dir: nothing is called because a stored file
says so.
"""

# Precision, batches, average and evaluation format are the run's, and so is every bit on the same
# device with the same thread count. config/stored.py tells how a stored configuration is trusted.

import sys
from dataclasses import dataclass
from pathlib import Path

from mpframe.checkpoint.state import KINDS
from mpframe.cli.program import command, take_own, writing
from mpframe.cli.restored import checkpoint_of, restore_run, run_folder
from mpframe.config.overrides import take_source
from mpframe.config.redaction import secrets_of
from mpframe.config.sweep import name_of
from mpframe.core.errors import ConfigError
from mpframe.core.tree import device_of
from mpframe.files.durable import refuse_unwritable, write_atomically
from mpframe.files.text import printable, say
from mpframe.run.parts import build_loaders
from mpframe.tracking.summary import strict_json
from mpframe.training.evaluation import Evaluation

_OPTIONS = ("checkpoint", "out", "split", "weights")
_CHOICES = {"weights": KINDS, "split": ("val", "test")}


@dataclass(frozen=True)
class Evaluated:
    evaluation: Evaluation
    split: str  # `val` or `test`
    step: int  # steps the run had tried when the checkpoint was saved
    weights: str  # `trained` or `ema`
    precision: str  # the mode evaluated in, e.g. `amp(float16)`
    device: str
    batch_size: int
    samples: int


@command
def main(arguments: list[str]) -> None:
    options, given = take_own(arguments, _OPTIONS, "checkpoint", _CHOICES)
    path, kind = Path(options["checkpoint"]), options.get("weights")
    if "out" in options:
        refuse_unwritable("out", Path(options["out"]).parent)
    done = evaluate(path, given, kind, options.get("split"))
    # Named after the options that are not the run's, so the run's evaluation stays.
    changed = take_source(given)[1] + ([f"weights={kind}"] if kind else [])
    how = name_of(changed, [], "", secrets_of([*sys.argv, *changed]))
    name = f"evaluation_{done.split}_step_{done.step:08d}{',' * bool(how)}{how}.json"
    out = Path(options.get("out") or run_folder(path) / name)
    facts = {"checkpoint": str(path), **vars(done)}
    result = facts.pop("evaluation")
    named = {"loss": result.loss, **result.metrics}
    numbers = {f"{done.split}_{name}": value for name, value in named.items()}
    with writing(out):
        write_atomically(out, strict_json(facts | numbers))
    told = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
    said = (
        f"{path}, step {done.step}: {told} ({done.samples} samples, {done.precision} on "
        f"{done.device}, weights {done.weights}); written to {out}"
    )
    say(printable(said))


def evaluate(
    path: Path, given: list[str], weights: str | None = None, split: str | None = None
) -> Evaluated:
    """Evaluate a run's folder or a checkpoint within it, with the options in `given` changed.

    `weights`: `trained` or `ema`, by default as the run was validated. `split`: `val` or `test`, by
    default `test` if the dataset has one.
    """
    run = restore_run(checkpoint_of(path, split), given, weights)
    loaders = build_loaders(run.config, run.task)
    split = split or ("val" if loaders.test is None else "test")
    loader = loaders.val if split == "val" else loaders.test
    if loader is None:
        raise ConfigError("split=test: the dataset has no test part; use split=val")
    evaluation, device = run.trainer.evaluate(loader), str(device_of(run.trainer.model))
    where = (str(run.trainer.precision), device, loader.batch_size, loader.size)
    return Evaluated(evaluation, split, run.step, run.weights, *where)
