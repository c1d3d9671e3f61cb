"""Tells before training what will go wrong, and which option corrects it.

    subject    a trainer built as for training, its data, and trials on them
    checks     each examines a `Subject` and returns findings; hints.py has the checks of every run

Nothing is written, and each trial is undone. Begin with subject.py.
"""

from mpframe.lab.doctor.checks import CHECKS, examine
from mpframe.lab.doctor.subject import Subject
from mpframe.lab.hints import Finding, Severity

__all__ = ["CHECKS", "Finding", "Severity", "Subject", "examine"]
