"""Do the optimizer's numbers exist in the format of the tensors they meet?

An optimizer adds eps to, and multiplies by lr and the betas, tensors of one format, and what it
computes is rounded to that format. In float16 (smallest number 2^-24) eps = 1e-8 is 0 and Adam
divides by 0; in bfloat16 (8 bits) beta = 0.999 is 1 and an average never forgets. So

    small numbers    lost where round(x) = 0, bad where |round(x) - x| > 1 % of x
    decays           lost where round(x) = 1, bad where 1 - x is off by more than 1 %
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpframe.numerics.doctor.finding import Finding, error, warning
from mpframe.numerics.doctor.patient import Patient
from mpframe.precision import MasterWeights

SMALL = ("eps", "lr", "weight_decay")
DECAYS = ("betas", "momentum", "alpha", "rho")
_BADLY = 0.01
Fate = tuple[Callable[..., Finding], str]


def check_numbers(patient: Patient) -> Iterator[Finding]:
    """eps, learning rate, decays: lost or rounded badly in the optimizer's format."""
    for path, optimizer in patient.optimizers.items():
        form = _format_of(optimizer)
        for name, index, value in _numbers(optimizer):
            fate = _fate(name, value, form)
            if fate is not None:
                make, becomes = fate
                where = f"{_word(form)}, the format {path} works in"
                text = f"{path}.{name}{index}={value:.10g} {becomes} in {where}"
                yield make(text, _mend(patient, path, name, form))


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


def _format_of(optimizer: MasterWeights) -> torch.dtype:
    """The narrowest format of what the optimizer updates."""
    formats = {optimizer.master_of(parameter).dtype for parameter in optimizer.parameters}
    narrowest: torch.dtype = min(formats, key=lambda form: form.itemsize)
    return narrowest


def _word(form: torch.dtype) -> str:
    return str(form).removeprefix("torch.")


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _numbers(optimizer: MasterWeights) -> Iterator[tuple[str, str, float]]:
    """(name, index, value) of every number the optimizer was made with."""
    for name, value in optimizer.optimizer.defaults.items():
        if name in (*SMALL, *DECAYS):
            several = isinstance(value, tuple | list)
            for index, number in enumerate(value if several else [value]):
                if isinstance(number, float):
                    yield name, f"[{index}]" if several else "", number


def _fate(name: str, value: float, form: torch.dtype) -> Fate | None:
    """What the format makes of a number, and how bad that is; None where it holds it."""
    held = float(torch.tensor(value, dtype=torch.float64).to(form))
    matters = (1.0 - held, 1.0 - value) if name in DECAYS else (held, value)
    if matters[0] == 0.0 < matters[1]:
        return error, f"is {held:g}"
    if abs(matters[0] - matters[1]) > _BADLY * abs(matters[1]):
        return warning, f"becomes {held:.6g}"
    return None


def _mend(patient: Patient, path: str, name: str, form: torch.dtype) -> str:
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
