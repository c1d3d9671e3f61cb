"""The networks that ship, each chosen by `model=NAME` (conf/model).

Each file is named after its function, which returns a `torch.nn.Module`; the shortest is mlp.py.
A `_target_` may name any other class or function that returns a module. Models are plain PyTorch:
they import torch and errors (checks.py refuses sizes by the option's name), and nothing in them
mentions precision.
"""

from mpframe.models.cnn import cnn
from mpframe.models.mlp import mlp
from mpframe.models.resnet18 import resnet18

__all__ = [
    "cnn",
    "mlp",
    "resnet18",
]
