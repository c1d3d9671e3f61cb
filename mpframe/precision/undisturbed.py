"""Runs a model to learn about it, then restores all that a forward pass changes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.precision.module_state import State


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context manager that runs `model` and then restores its parameters, its buffers, the plain
    attributes of its modules and the random generators."""
    with State.of(model), _same_parameters(model), _same_random_numbers():
        yield


@contextmanager
def _same_parameters(model: nn.Module) -> Iterator[None]:
    """Put back parameters that the block writes, as a layer does that takes its first values from
    its first batch. They stay where they are in memory, by which their readers are known."""
    kept = [(p, p.data, p.detach().clone()) for p in model.parameters() if not is_lazy(p)]
    try:
        yield
    finally:
        for parameter, data, values in kept:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            if not torch.equal(data, values):
                data.copy_(values)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """The block may draw random numbers; those drawn after it are the same as without it."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
