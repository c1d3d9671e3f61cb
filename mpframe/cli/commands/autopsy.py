"""Say why a step failed: it runs again in several formats, for one verdict.

Usage: mpframe autopsy run=PATH [step=N] [option=value] ...

    mpframe autopsy run=runs/2026-11-21/05-45-42
    mpframe autopsy run=runs/mine step=12 device=cpu
    mpframe autopsy run=runs/mine/checkpoints/step_00000440

Options:
    run=PATH        required: a run, a checkpoint of it, or the evidence of a step
    step=N          one of several steps whose evidence the run saved (default: the last)
    option=value    an option of the run to change, or GROUP=CHOICE
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The command examines the last step whose evidence the run saved. A run without evidence, or a
checkpoint, stands for the step that comes after it. The report is printed and written as Markdown.
"""

from itertools import islice
from pathlib import Path
from typing import Any

from mpframe import checkpoint
from mpframe.checkpoint.folder import refuse_mixed
from mpframe.checkpoint.state import RandomState, extra_state_of, read_steps_tried, weights_of
from mpframe.cli.program import command, take_own
from mpframe.cli.restored import rebuilt
from mpframe.config.stored import config_of
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError, first_line
from mpframe.data.loading import Loader
from mpframe.files.durable import refuse_unwritable, write_atomically
from mpframe.files.text import say
from mpframe.lab.autopsy import evidence
from mpframe.lab.autopsy.evidence import Evidence
from mpframe.lab.autopsy.report import Report, examine, write_report
from mpframe.training.plan import Progress
from mpframe.training.trainer import Trainer

_OF_UPDATES = ("trainer.clip_norm", "trainer.clip_value", "trainer.ema_decay")


@command
def main(arguments: list[str]) -> None:
    options, given = take_own(arguments, ("run", "step"), "run")
    for word in given:
        if word.lstrip("+~").partition("=")[0] in _OF_UPDATES:
            raise ConfigError(f"{word}: has no part in an autopsy, which updates no weight")
    path = Path(options["run"])
    folder = _evidence_in(path, options.get("step"))
    if folder is not None:
        report = of_evidence(folder, given)
        say(report.text(write_report(folder, report)))
        return
    refuse_mixed(path)
    report, steps = of_checkpoint(checkpoint.newest(path), given)
    out = path / f"autopsy_after_step_{steps:08d}.md"
    refuse_unwritable("run", path)
    write_atomically(out, report.markdown())
    say(report.text(out))


def of_evidence(folder: Path, given: list[str]) -> Report:
    step, weights, config = evidence.load(folder)
    trainer, train = rebuilt(config_of(config, folder / "config.yaml", given))
    trainer.load_weights(weights)
    return _examine(step, train, trainer, folder)


def of_checkpoint(path: Path, given: list[str]) -> tuple[Report, int]:
    """Examine the step after a checkpoint, and return the report and the checkpoint's step."""
    snapshot = checkpoint.read(path)
    state, config = snapshot.state, config_of(snapshot.config, path / "config.yaml", given)
    weights = weights_of(state, "trained", path)
    trainer, train = rebuilt(config)
    trainer.extra_state.load_state_dict(extra_state_of(state, path))
    trainer.load_weights(weights)
    steps = read_steps_tried(state, path)
    try:
        trainer.precision.load_state_dict(state["trainer"].get("products", {}))
        step = _next_step(state, steps, trainer, train)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{path}: holds no progress or scale of a run") from None
    return _examine(step, train, trainer, path), steps


def _evidence_in(path: Path, step: str | None) -> Path | None:
    """Return the evidence that `run=` stands for, or None for a checkpoint."""
    if path.absolute().parent.name == evidence.FOLDER:
        return path
    found = {f.name.removeprefix("step_").lstrip("0"): f for f in evidence.all_in(path)}
    if step is None:
        return [*found.values()][-1] if found else None
    if step not in found:
        steps = ", ".join(found) or "no step"
        raise ConfigError(f"step={step}: {path} holds the evidence of {steps}")
    return found[step]


def _examine(step: Evidence, train: Loader, trainer: Trainer, path: Path) -> Report:
    # What a stranger put into the file is found as it is used.
    wrong = AttributeError, TypeError, ValueError, ArithmeticError, LookupError, RuntimeError
    try:
        return examine(step.like(next(train.epoch(0))), trainer)
    except (UserCodeError, *wrong) as error:
        what = f"{path}: its step does not run with this model and data ({first_line(error)})"
        raise CheckpointError(f"{what}; give the options and the code of the run") from error


def _next_step(state: dict[str, Any], steps: int, trainer: Trainer, train: Loader) -> Evidence:
    progress = Progress(**state["trainer"]["progress"])
    epoch, batch = progress.epoch, progress.batch
    window = list(islice(train.epoch(epoch, start=batch), trainer.plan.accumulate))
    scalers = state["trainer"]["scaler"]
    scaled = {o.name: scalers.get(o.name, scalers.get("")) for o in trainer.objectives}
    scales = {n: 1.0 if scaler is None else float(scaler["scale"]) for n, scaler in scaled.items()}
    random = state["rng"]
    return Evidence(
        step=steps + 1,
        reason=f"asked for, after the checkpoint of step {steps}",
        batches=window,
        samples=[train.batch_ids(epoch, batch + n).tolist() for n in range(len(window))],
        epoch=epoch,
        batch=batch,
        scales=scales,
        floors={},
        scaling=next((str(scaler["kind"]) for scaler in scalers.values()), "none"),
        random=RandomState(random["torch"], next(iter(random["cuda"]), random.get("mps"))),
        updates=progress.steps,
        clips=trainer.plan.clip_norm is not None,
    )
