"""Networks to name in a config; any other module with a `_target_` works as well."""

from mpframe.models.cnn import cnn
from mpframe.models.gan import gan
from mpframe.models.mlp import mlp
from mpframe.models.resnet18 import resnet18

__all__ = ["cnn", "gan", "mlp", "resnet18"]
