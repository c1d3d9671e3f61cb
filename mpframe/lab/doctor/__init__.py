"""Tells before training what will go wrong, and which option corrects it.

    subject    a trainer built as for training, its data, and trials on them
    checks     each examines a `Subject` and returns findings; hints.py has those of every run

Nothing is written, and each trial is undone. Begin with subject.py.
"""

from collections.abc import Callable, Iterable

from mpframe.lab.doctor.checks import (
    check_dimensions,
    check_emulation,
    check_masters,
    check_norms,
    check_numbers,
    check_overflow,
    check_products,
    check_small_scale,
    check_small_weights,
    check_training_format,
    check_weight_range,
)
from mpframe.lab.doctor.subject import Subject
from mpframe.lab.hints import HINTS, Finding, Severity, findings_of

Check = Callable[[Subject], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    check_numbers,
    check_masters,
    *HINTS,
    check_weight_range,
    check_small_weights,
    check_training_format,
    check_overflow,
    check_small_scale,
    check_norms,
    check_dimensions,
    check_products,
    check_emulation,
)

__all__ = ["CHECKS", "Finding", "Severity", "Subject", "examine"]


def examine(subject: Subject) -> list[Finding]:
    """The findings of all checks, the worst first."""
    return findings_of(CHECKS, subject)
