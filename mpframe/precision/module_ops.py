"""Which op a module of `torch.nn` runs: what the dtype map and the weights' storage go by.

`nn.Conv2d` runs `conv2d`, `nn.LayerNorm` runs `layer_norm`: nearly always the op is the class's
name in another spelling. The exceptions are listed. A user's subclass of a known module is that
module; a module of its own kind has no op here, and its weights stay fp32 unless it is pinned.
"""

import re
from functools import cache

from torch import nn

from mpframe.precision.spellings import canonical, known_ops

_EXCEPTIONS = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CTCLoss": "ctc_loss",
    "GRUCell": "gru_cell",
    "KLDivLoss": "kl_div",
    "LSTMCell": "lstm_cell",
    "MSELoss": "mse_loss",
    "MultiheadAttention": "scaled_dot_product_attention",
    "NLLLoss": "nll_loss",
    "Softmax2d": "softmax",
    "Softmin": "softmax",
    "SyncBatchNorm": "batch_norm",
    "Upsample": "interpolate",
}
_PADS = re.compile(r"^(Reflection|Replication|Circular|Constant|Zero)Pad")


def op_of(module: nn.Module) -> str | None:
    """The name of the op `module` runs, or None where it is not a layer of torch.nn."""
    if isinstance(module, nn.RNNBase):
        return str(module.mode).lower()  # lstm, gru, rnn_tanh, rnn_relu
    if isinstance(module, nn.RNNCell):
        return f"rnn_{module.nonlinearity}_cell"
    return next((op for cls in type(module).__mro__ if (op := _op_of_class(cls))), None)


@cache
def _op_of_class(cls: type) -> str | None:
    if not cls.__module__.startswith("torch.nn.modules"):
        return None
    name = cls.__name__
    if name in _EXCEPTIONS or _PADS.match(name):
        return _EXCEPTIONS.get(name, "pad")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    spellings = (
        snake,
        name.lower(),
        re.sub(r"_?norm\d?d?$", "_norm", snake),
        re.sub(r"_loss$", "", snake),
    )
    return next((canonical(spelling) for spelling in spellings if spelling in known_ops()), None)
