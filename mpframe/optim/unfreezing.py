"""What torch's fused SGD needs before it trains parameters that had no gradient so far."""

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


def fill_momentum(optimizer: Optimizer, masters: list[Tensor]) -> None:
    """Give masters without momentum a buffer of zeros, if others of their group have one.

    Fused SGD takes the buffers of all parameters of a group, or of none. From zeros the first step
    gives momentum * 0 + g = g, which is what SGD starts with. Other optimizers begin by themselves.
    """
    if not isinstance(optimizer, SGD):
        return
    new = set(masters)
    for group in optimizer.param_groups:
        started = any("momentum_buffer" in optimizer.state.get(m, ()) for m in group["params"])
        if group["fused"] and started and not group["dampening"]:
            for master in new.intersection(group["params"]):
                optimizer.state[master].setdefault("momentum_buffer", torch.zeros_like(master))
