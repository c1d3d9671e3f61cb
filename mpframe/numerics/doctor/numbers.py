"""Does the optimizer's format hold its numbers, and its updates?"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from mpframe.numerics.doctor.subject import Subject
from mpframe.numerics.hints import Finding, error, warning
from mpframe.numerics.optimizer_numbers import rounded_numbers
from mpframe.optim import MasterWeights
from mpframe.tree import HALF


def check_numbers(subject: Subject) -> Iterator[Finding]:
    """eps, learning rate, decays: lost or badly rounded in the optimizer's format."""
    for path, optimizer in subject.optimizers.items():
        for number in rounded_numbers(optimizer):
            make = error if number.lost else warning
            fix = _fix(subject, path, number.name, number.form)
            yield make(f"{path}.{number}, the format {path} works in", fix)


def check_masters(subject: Subject) -> Iterator[Finding]:
    """Half weights without masters."""
    masters = subject.trainer.precision.master_weights
    half = [p for own in subject.optimizers.values() for p in own.parameters if _is_half(p)]
    if not masters and half:
        yield warning(
            f"dtype.master_weights=false: updates below half a unit in the last place of the "
            f"{len(half)} {subject.policy.half} weights are lost",
            "dtype.master_weights=true",
        )


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in HALF


def _fix(subject: Subject, path: str, name: str, form: torch.dtype) -> str:
    if form.itemsize == 2 and not subject.trainer.precision.master_weights:
        return "dtype.master_weights=true"
    default = _default_of(subject.optimizers[path], name)
    listed = list(default) if isinstance(default, tuple) else default
    return subject.typed(f"{path}.{name}", str(listed).replace(" ", ""))


def _default_of(optimizer: MasterWeights, name: str) -> Any:
    """The default of an argument of the optimizer's class."""
    parameter = inspect.signature(type(optimizer.optimizer)).parameters.get(name)
    known = parameter is not None and parameter.default is not inspect.Parameter.empty
    return parameter.default if known and parameter is not None else 1e-3
