"""The check that all metrics share."""

from torch import Tensor

from mpframe.errors import DataError


def require_same_shape(metric: str, outputs: Tensor, targets: Tensor) -> None:
    """Refuse tensors that would broadcast against each other unnoticed.

    Raises:
        DataError: the shapes differ.
    """
    if outputs.shape != targets.shape:
        raise DataError(
            f"{metric}: predictions of shape {list(outputs.shape)} against targets of shape "
            f"{list(targets.shape)}; give model and dataset the same shape"
        )
