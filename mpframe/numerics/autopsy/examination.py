"""A failed step, examined: replayed, diagnosed, and reported beside its evidence."""

import logging
from pathlib import Path

from mpframe.files.durable import write_atomically
from mpframe.numerics.autopsy import evidence
from mpframe.numerics.autopsy.diagnosis import Kind, diagnose
from mpframe.numerics.autopsy.evidence import Evidence
from mpframe.numerics.autopsy.report import Report, report_on
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

REPORT = "report.md"


def examine(step: Evidence, trainer: Trainer) -> Report:
    """Replay a step with a trainer that has its weights, and say what is wrong with it."""
    case = step.case(trainer)
    return report_on(diagnose(case), case, step)


def write_report(folder: Path, report: Report) -> Path:
    """Write a report beside its evidence; returns its path."""
    path = folder / REPORT
    write_atomically(path, report.markdown())
    return path


def report_beside_evidence(
    step: Evidence, trainer: Trainer, run: Path, config: str
) -> tuple[Path, str]:
    """Save the evidence of a step, examine it, and log and write the report.

    Args:
        step: the step that failed.
        trainer: still holds the weights that it began with.
        run: the run's folder.
        config: the run's resolved options, YAML.

    Returns:
        The report's path, and the diagnosis, empty if that is no fault.
    """
    folder = evidence.save(run, step, trainer.weights(), config)
    report = examine(step, trainer)
    path = write_report(folder, report)
    log.warning("warning: %s\n%s", step.reason, report.text(path))
    diagnosis = report.title.partition(": ")[2]
    return path, "" if diagnosis == Kind.NO_FAULT.value else diagnosis
