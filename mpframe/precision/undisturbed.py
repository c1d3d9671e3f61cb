"""Runs a model to learn about it, and then restores all that a forward pass changes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.jit import ScriptModule


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The block runs `model`; afterwards its buffers and the random generators are as before.

    A module may fill, replace or add buffers in the block: the old ones come back. (A ScriptModule
    cannot.)
    """
    modules = [module for module in model.modules() if not isinstance(module, ScriptModule)]
    homes = [(module._buffers, dict(module._buffers)) for module in modules]
    buffers = list(model.buffers())
    kept = [buffer.clone() for buffer in buffers]
    try:
        with _same_random_numbers():
            yield
    finally:
        for home, before in homes:
            home.clear()
            home.update(before)
        with torch.no_grad():
            for buffer, values in zip(buffers, kept, strict=True):
                if not torch.equal(buffer, values):  # An expanded buffer cannot be written.
                    buffer.copy_(values)


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
