"""Are the optimizer's numbers, and its updates, held by the format it works in?"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from mpframe.numerics.doctor.finding import Finding, error, warning
from mpframe.numerics.doctor.patient import Patient
from mpframe.numerics.optimizer_numbers import misheld_numbers
from mpframe.optim import MasterWeights


def check_numbers(patient: Patient) -> Iterator[Finding]:
    """eps, learning rate, decays: lost or rounded badly in the optimizer's format."""
    for path, optimizer in patient.optimizers.items():
        for number in misheld_numbers(optimizer):
            make = error if number.lost else warning
            fix = _fix(patient, path, number.name, number.form)
            yield make(f"{path}.{number}, the format {path} works in", fix)


def check_masters(patient: Patient) -> Iterator[Finding]:
    """Half weights without masters."""
    masters = patient.trainer.precision.master_weights
    half = [p for own in patient.optimizers.values() for p in own.parameters if _is_half(p)]
    if not masters and half:
        yield warning(
            f"dtype.master_weights=false: updates below half a unit in the last place of the "
            f"{len(half)} {patient.policy.half} weights are lost",
            "dtype.master_weights=true",
        )


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _fix(patient: Patient, path: str, name: str, form: torch.dtype) -> str:
    if form.itemsize == 2 and not patient.trainer.precision.master_weights:
        return "dtype.master_weights=true"
    default = _default_of(patient.optimizers[path], name)
    listed = list(default) if isinstance(default, tuple) else default
    return patient.typed(f"{path}.{name}", str(listed).replace(" ", ""))


def _default_of(optimizer: MasterWeights, name: str) -> Any:
    """What PyTorch's own optimizer of that kind starts with."""
    parameter = inspect.signature(type(optimizer.optimizer)).parameters.get(name)
    known = parameter is not None and parameter.default is not inspect.Parameter.empty
    return parameter.default if known and parameter is not None else 1e-3
