"""Handwritten digits: 1797 grey images of 8 x 8, inside scikit-learn's wheel; needs no download."""

import torch
from torch import Tensor

from mpframe.data.datasets.hold_out import hold_out
from mpframe.data.datasets.images.arrays import ArrayImages, Normalize
from mpframe.data.facts import require_facts
from mpframe.data.task import Task, classification
from mpframe.errors import ConfigError

_BRIGHTEST = 16.0


def digits(
    root: str | None = None,
    channels: int = 1,
    image_size: int = 8,
    classes: int = 10,
    augment: str = "none",
) -> Task:
    """The digits: 1437 to train on, 180 to validate, 180 to test; the split never changes.

    Args:
        root: must be None, nothing is read from a data folder.
        channels: 1.
        image_size: 8, pixels a side.
        classes: 10.
        augment: none, crop or crop_flip; for training only.

    Raises:
        ConfigError: an option is not as above.
    """
    if root is not None:
        raise ConfigError(
            f"dataset.root={root}: the digits come with scikit-learn and are read from no folder; "
            "use dataset.root=null"
        )
    require_facts(
        "digits", channels=(channels, 1), image_size=(image_size, 8), classes=(classes, 10)
    )
    images, targets = _load()
    train, val, test = hold_out(targets, one_in=5, parts=2)
    normalize = Normalize.measured(images[train])
    return classification(
        ArrayImages(images[train], targets[train], normalize, augment),
        ArrayImages(images[val], targets[val], normalize),
        ArrayImages(images[test], targets[test], normalize),
        class_names=[str(digit) for digit in range(10)],
        preprocessing=normalize.described(image_size, _BRIGHTEST),
    )


def _load() -> tuple[Tensor, Tensor]:
    # Imported late: it takes about a second, which runs on other datasets should not pay.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float() / _BRIGHTEST
    return images.unsqueeze(1), torch.from_numpy(bunch.target)
