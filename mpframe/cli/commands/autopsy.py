"""Say why a step failed: it runs again in several formats, for one verdict.

Usage: mpframe autopsy run=PATH [step=N] [option=value] ...

    mpframe autopsy run=runs/2026-11-21/05-45-42
    mpframe autopsy run=runs/mine step=12 device=cpu

Options:
    run=PATH        required: a run, or the evidence of a step
    step=N          one of several steps whose evidence the run saved (default: the last)
    option=value    an option of the run to change, or GROUP=CHOICE
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The command examines the last step whose evidence the run saved. The report is printed, and written
beside the evidence as Markdown.
"""

from pathlib import Path

from mpframe.checkpoint.folder import MANIFEST
from mpframe.cli.program import command, take_own
from mpframe.cli.restored import rebuilt
from mpframe.config.stored import config_of
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError, first_line
from mpframe.files.text import say
from mpframe.lab.autopsy import evidence
from mpframe.lab.autopsy.report import Report, examine, write_report


@command
def main(arguments: list[str]) -> None:
    options, given = take_own(arguments, ("run", "step"), "run")
    folder = _evidence_in(Path(options["run"]), options.get("step"))
    report = of_evidence(folder, given)
    say(report.text(write_report(folder, report)))


def of_evidence(folder: Path, given: list[str]) -> Report:
    step, weights, config = evidence.load(folder)
    trainer, train = rebuilt(config_of(config, folder / "config.yaml", given))
    trainer.load_weights(weights)
    # What a stranger put into the file is found as it is used.
    wrong = AttributeError, TypeError, ValueError, ArithmeticError, LookupError, RuntimeError
    try:
        return examine(step.like(next(train.epoch(0))), trainer)
    except (UserCodeError, *wrong) as error:
        what = f"{folder}: its step does not run with this model and data ({first_line(error)})"
        raise CheckpointError(f"{what}; give the options and the code of the run") from error


def _evidence_in(path: Path, step: str | None) -> Path:
    """Return the evidence that `run=` and `step=` name. ConfigError: there is none."""
    if (path / MANIFEST).exists():
        return path
    found = {f.name.removeprefix("step_").lstrip("0"): f for f in evidence.all_in(path)}
    if not found:
        raise ConfigError(f"run={path}: holds no evidence of a failed step; {evidence.WITHOUT}")
    if step is None:
        return [*found.values()][-1]
    if step not in found:
        raise ConfigError(f"step={step}: {path} holds the evidence of {', '.join(found)}")
    return found[step]
