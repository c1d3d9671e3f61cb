"""Finds out whether an optimizer takes sparse gradients, before it moves anything.

Most optimizers refuse them in the middle of a step, when some parameters have moved already. So the
first sparse gradient of each parameter is tried on a stand-in of one row of zeros.
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpframe.errors import ConfigError


def refuse_untaken(optimizer: Optimizer, masters: Iterable[Tensor]) -> None:
    """Raise ConfigError if the optimizer does not take sparse gradients of these masters."""
    for master in masters:
        try:
            _try(optimizer, master)
        except Exception as error:  # Any other error comes again in the step itself.
            if not isinstance(error, RuntimeError) or "sparse" not in str(error).lower():
                continue
            raise ConfigError(
                f"optimizer={type(optimizer).__name__}: the parameter of shape "
                f"{tuple(master.shape)} has a sparse gradient: {str(error).splitlines()[0]}; use "
                "optimizer._target_=torch.optim.SGD, Adagrad or SparseAdam, or sparse=False in "
                "the embedding"
            ) from None


def _try(optimizer: Optimizer, master: Tensor) -> None:
    stand_in = torch.zeros_like(master if master.is_sparse else master[:1])
    stand_in.grad = stand_in.clone() if master.is_sparse else stand_in.to_sparse(1)
    group = next(g for g in optimizer.param_groups if any(p is master for p in g["params"]))
    options = {name: value for name, value in group.items() if name != "params"}
    state = {name: _row(value, master) for name, value in optimizer.state.get(master, {}).items()}
    trial: Any = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    vars(trial).update({name: {} for name in vars(optimizer) if name.endswith("_hooks")})
    trial.param_groups = [{**copy.deepcopy(options), "params": [stand_in]}]
    trial.state = defaultdict(dict, {stand_in: state})
    with warnings.catch_warnings(action="ignore"):  # The step itself will warn.
        # A schedule replaces the `step` of the object, by a function that moves the original.
        type(optimizer).step(trial)


def _row(value: Any, master: Tensor) -> Any:
    """Return a copy of a value of the state; only the first row of a tensor like the parameter."""
    like = isinstance(value, Tensor) and value.shape == master.shape and not value.is_sparse
    return value[:1].clone() if like else copy.deepcopy(value)
