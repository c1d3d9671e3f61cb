"""Networks to name in a config: `model=cnn`, `mlp`, `resnet18`, `gan`.

Each module is named after its function, which returns a `torch.nn.Module`; the shortest one to read
is mlp.py. Any other class or function that returns a module works too, by its `_target_`. Models
are plain PyTorch: they import torch and errors (checks.py refuses sizes by the option's name), and
nothing in them mentions precision.
"""

from mpframe.models.cnn import cnn
from mpframe.models.gan import gan
from mpframe.models.mlp import mlp
from mpframe.models.resnet18 import resnet18

__all__ = ["cnn", "gan", "mlp", "resnet18"]
