"""Which op a module of `torch.nn` runs. The dtype map and the storage of weights use this.

`nn.Conv2d` runs `conv2d`, `nn.KLDivLoss` runs `kl_div`: the op is nearly always the class's name
in another spelling. The exceptions are listed. A user's subclass of a known module counts as that
module. A module of any other class has no op here, and its weights stay fp32 unless it is pinned.
"""

import re
from functools import cache

from torch import nn

from mpframe.precision.spellings import canonical, known_ops

_EXCEPTIONS = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "MultiheadAttention": "scaled_dot_product_attention",
    "ReLU6": "hardtanh",
    "Softmin": "softmax",
    "Upsample": "interpolate",
}
_PAD = re.compile(r"(Reflection|Replication|Circular|Constant|Zero)Pad\dd")


def op_of(module: nn.Module) -> str | None:
    """The name of the op `module` runs, or None if it is not a layer of torch.nn."""
    if isinstance(module, nn.RNNBase):
        return str(module.mode).lower()  # lstm, gru, rnn_tanh, rnn_relu
    if isinstance(module, nn.RNNCell):
        return f"rnn_{module.nonlinearity}_cell"
    return next((op for cls in type(module).__mro__ if (op := _op_of_class(cls))), None)


@cache
def _op_of_class(cls: type) -> str | None:
    if not cls.__module__.startswith("torch.nn.modules"):
        return None
    if _PAD.fullmatch(cls.__name__):
        return "pad"
    name = cls.__name__.lower().strip("_")
    spellings = (name, name.removesuffix("loss"), re.sub(r"\dd$", "", name))
    found = (_ops_by_letters().get(spelling) for spelling in spellings)
    return _EXCEPTIONS.get(cls.__name__) or next((op for op in found if op), None)


@cache
def _ops_by_letters() -> dict[str, str]:
    """Ops by their names without underscores, as class names have none."""
    public = (op for op in known_ops() if not op.startswith("_"))
    return {op.replace("_", ""): canonical(op) for op in public}
