"""Checks of the values that a config states about a dataset: its channels, size and classes.

Models read these numbers from the config before any file is opened. A wrong one would build a
network that does not fit the data, so it is refused, with the true number.
"""

from torch import Tensor

from mpframe.core.errors import ConfigError, DataError


def require_facts(dataset: str, **facts: tuple[object, object]) -> None:
    """Compare stated with true values: option name -> (stated, true)."""
    for option, (stated, true) in facts.items():
        if stated != true:
            raise ConfigError(
                f"dataset.{option}={stated}: {dataset} has {true}; set dataset.{option}={true}"
            )


def require_labels(source: object, labels: Tensor, images: int, classes: int) -> None:
    """Check that the file has one label [N] in 0..classes-1 for each image."""
    if len(labels) != images:
        raise DataError(f"{source}: {len(labels)} labels for {images} images; get the files again")
    if images and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"{source}: labels reach from {int(labels.min())} to {int(labels.max())}, "
            f"allowed is 0 to {classes - 1}; get the file again"
        )
