"""Which op a module of `torch.nn` runs: what the dtype map and the weights' storage go by.

`nn.Conv2d` runs `conv2d`, `nn.LayerNorm` runs `layer_norm`: nearly always the op is the class's
name in another spelling. The exceptions are listed. A user's subclass of a known module is that
module; a module of its own kind has no op here, and its weights stay fp32 unless it is pinned.
"""

import re
from functools import cache

from torch import nn

from mpframe.precision.spellings import known_ops

_EXCEPTIONS = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CTCLoss": "ctc_loss",
    "GRU": "gru",
    "GRUCell": "gru_cell",
    "KLDivLoss": "kl_div",
    "LSTM": "lstm",
    "LSTMCell": "lstm_cell",
    "LeakyReLU": "leaky_relu",
    "LogSigmoid": "log_sigmoid",
    "MSELoss": "mse_loss",
    "MultiheadAttention": "scaled_dot_product_attention",
    "NLLLoss": "nll_loss",
    "RNN": "rnn_tanh",
    "RNNCell": "rnn_tanh_cell",
    "SyncBatchNorm": "batch_norm",
    "Upsample": "interpolate",
    "UpsamplingBilinear2d": "interpolate",
    "UpsamplingNearest2d": "interpolate",
}


def op_of(module: nn.Module) -> str | None:
    """The name of the op `module` runs, or None where it is not a layer of torch.nn."""
    return next((op for cls in type(module).__mro__ if (op := _op_of_class(cls))), None)


@cache
def _op_of_class(cls: type) -> str | None:
    if not cls.__module__.startswith("torch.nn.modules"):
        return None
    name = cls.__name__
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    spellings = (
        snake,
        name.lower(),
        re.sub(r"_?norm\d?d?$", "_norm", snake),
        re.sub(r"_loss$", "", snake),
    )
    return _EXCEPTIONS.get(name) or next((s for s in spellings if s in known_ops()), None)
