"""Where a run computes, and the seed it starts from."""

import random

import numpy as np
import torch

from mpframe.distributed.launch import place
from mpframe.errors import ConfigError, nearest


def seed_everything(seed: int) -> None:
    """Seed every generator that weights, dropout or a user's own code may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def resolve_device(name: str) -> torch.device:
    """The device an option names; `auto` takes CUDA, then MPS, then the CPU.

    Of several ranks each has a CUDA device of its own, that of its number on this machine.

    Raises:
        ConfigError: there is no such device; no other device is taken instead.
    """
    if place().size > 1:
        return _of_this_rank(name)
    if name == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not (kind == "cuda" and index.isdigit())):
        hint = nearest(name, ["auto", "cpu", "cuda", "mps"])
        raise ConfigError(
            f"device={name}: choose auto, cpu, cuda, cuda:N or mps" + f"; {hint}" * bool(hint)
        )
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices; "
            "use device=cpu"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps: this machine has no MPS device; use device=cpu")
    return torch.device(name)


def _of_this_rank(name: str) -> torch.device:
    rank, devices = place().local_rank, torch.cuda.device_count()
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device={name}: each rank takes a device of its own; choose auto, cpu or cuda"
        )
    if name == "cpu" or (name == "auto" and not devices):
        return torch.device("cpu")
    if rank >= devices:
        fewer = f"start torchrun with --nproc-per-node {devices}, or " * bool(devices)
        raise ConfigError(
            f"device={name}: this machine has {devices} CUDA devices and more ranks; {fewer}use "
            "device=cpu"
        )
    return torch.device("cuda", rank)
