"""Half weights that go back to fp32, because code other than an optimizer's step writes them.

Half would lose the small changes of momentum teachers and moving averages. So these are stored in
fp32:

    a frozen weight that is written    as soon as its model's optimizer notices it
    a deep copy of a model             at once, with the values of the masters
    a weight that turns half           before each step, if a forward pass has set its `.data`

and while there are blocks that cast, torch's AveragedModel averages the masters.
"""

import logging
from collections.abc import Callable, Collection, Container, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mpframe.core.optim.masters import exact_value, master_behind, sync_from_weights, widen
from mpframe.core.tree import HALF

log = logging.getLogger(__name__)

Frozen = MutableMapping[Tensor, None]  # the half weights of a model that were prepared frozen
_COMPARED_STEPS = 4  # First steps that compare values on an accelerator, so that the host waits.
_NAMES: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
_FROZEN: MutableMapping[Tensor, Frozen] = WeakTensorKeyDictionary()  # by any weight of the model


def watch(model: nn.Module, *, widens: bool) -> None:
    """Remember a prepared model's weights, which may go back to fp32 if `widens`."""
    _NAMES.update({weight: name for name, weight in model.named_parameters()})
    if widens:
        weights = list(model.parameters())
        frozen = next((_FROZEN[w] for w in weights if w in _FROZEN), WeakTensorKeyDictionary())
        half = [w for w in weights if not w.requires_grad and master_behind(w) is not None]
        frozen.update(dict.fromkeys(half))
        _FROZEN.update(dict.fromkeys(weights, frozen))
        for module in model.modules():
            vars(module)["_fp32_in_copies"] = _CopyHook(module)


def frozen_beside(weights: Iterable[Tensor]) -> list[Frozen]:
    """Return the frozen weights of each model that has one of `weights` and may widen them."""
    return list({id(frozen): frozen for frozen in map(_FROZEN.get, weights) if frozen}.values())


@torch.no_grad()
def widen_written(frozen: Frozen, steps: int) -> None:
    """Store in fp32 the frozen weights that were written since the last step, and log which.

    If `steps`, the number of steps so far, is 0, the values were only loaded, and stay half.
    """
    names = []
    for weight in list(frozen):
        master = master_behind(weight)
        if master is None or weight.requires_grad:
            continue
        changed = sync_from_weights([(weight, master)], look=steps < _COMPARED_STEPS)
        if steps and any(changed):
            widen(weight)
            names.append(_NAMES[weight])
    if names:
        log.warning(
            "%s: frozen, and written outside of the step: stored in float32 from now on",
            ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3),
        )


def widen_turned(weight: Tensor) -> None:
    """Store in fp32 a weight that has turned half since its optimizer was wrapped."""
    if master_behind(weight) is None:
        name = _NAMES.get(weight, f"a weight of shape {tuple(weight.shape)}")
        log.warning("optimizer: %s turned half outside of cast(), and was rounded once", name)
    widen(weight)


def _find_frozen(model: nn.Module) -> dict[str, Tensor]:
    return {n: w for n, w in model.named_parameters() if w in _FROZEN.get(w, ())}


def list_widened(model: nn.Module) -> list[str]:
    """Return the names of the frozen weights that are stored in fp32 since they were written."""
    return [name for name, weight in _find_frozen(model).items() if weight.dtype not in HALF]


def widen_named(model: nn.Module, names: Collection[str]) -> None:
    """Store in fp32 the weights that `list_widened` returned when a checkpoint was made."""
    for name, weight in _find_frozen(model).items():
        if name in names and weight.dtype in HALF:
            widen(weight)


@contextmanager
def fp32_weights(model: nn.Module, but: Container[nn.Parameter] = ()) -> Iterator[None]:
    """Context manager that puts fp32 values in place of all half weights except `but`."""
    half = {p: p.data for p in model.parameters() if p.dtype in HALF and p not in but}
    try:
        for parameter in half:
            exact = exact_value(parameter)
            parameter.data = parameter.detach().float() if exact is None else exact
        yield
    finally:
        for parameter, weight in half.items():
            parameter.data = weight


class _CopyHook:
    """An attribute of a module that, when copied, gives the copied weights their fp32 values."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CopyHook":
        module = self._module()
        if module is None or id(module) not in memo:  # Only its dict is copied, not the module.
            return self
        for weight in module.parameters(recurse=False):
            copied = memo.get(id(weight), weight)
            # If its optimizer was copied first, the copy has a master already.
            if master_behind(weight) is not None and master_behind(copied) is None:
                copied.data = exact_value(weight)
        return _CopyHook(memo[id(module)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CopyHook)  # All are equal: it is no state of the module.

    def __reduce__(self) -> Any:
        return type(None), ()  # A pickled model is loaded without mpframe.


def update_from_masters(update: Callable[..., None], averaged: nn.Module, model: nn.Module) -> None:
    """Run torch's `AveragedModel.update_parameters` on masters, or for half averages on weights."""
    pairs = zip(averaged.parameters(), model.parameters(), strict=False)
    with fp32_weights(model, {weight for average, weight in pairs if average.dtype in HALF}):
        update(averaged, model)
