"""Handwritten digits: 1797 grey images of 8 x 8, inside scikit-learn's wheel; needs no download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpframe.data.datasets.hold_out import hold_out
from mpframe.data.datasets.images.arrays import ArrayImages, Normalize
from mpframe.data.facts import require_facts
from mpframe.data.task import Task, classification
from mpframe.errors import ConfigError, DataError

_TABLE = "datasets/data/digits.csv.gz"  # A row has 64 pixels and the digit.
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
        DataError: scikit-learn is not there.
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
    # scikit-learn's own reader would import all of it, which takes half as long as torch itself.
    package = find_spec("sklearn")
    homes = [] if package is None else package.submodule_search_locations or []
    for file in (Path(home, _TABLE) for home in homes):
        if file.is_file():
            table = torch.from_numpy(np.loadtxt(file, delimiter=","))
            return table[:, :-1].float().view(-1, 1, 8, 8) / _BRIGHTEST, table[:, -1].long()
    raise DataError(
        f"dataset: no scikit-learn with {_TABLE}, which holds the digits; pip install scikit-learn"
    )
