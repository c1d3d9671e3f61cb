"""CIFAR-10: 60,000 colour photographs of 32 x 32 in ten classes (Krizhevsky 2009)."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mpframe.data import cifar_files
from mpframe.data.facts import require_facts, require_labels
from mpframe.data.images import ArrayImages, Normalize
from mpframe.data.samples import hold_out
from mpframe.data.task import Task, classification
from mpframe.errors import DataError

Reader = Callable[[Path], tuple[Tensor, Tensor]]

_ONE_IN = 10  # of the training images validates
_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_CLASSES = len(_NAMES)
_BINARY = "cifar-10-batches-bin"
_PYTHON = "cifar-10-batches-py"


def cifar10(
    root: str = "data",
    channels: int = 3,
    image_size: int = 32,
    classes: int = _CLASSES,
    augment: str = "crop_flip",
) -> Task:
    """CIFAR-10: of its 50,000 training images 5,000 validate; its 10,000 test images test.

    The split never changes: 500 images of each class validate.

    Args:
        root: holds cifar-10-batches-bin or cifar-10-batches-py (torchvision's), or is one of them.
        channels: 3.
        image_size: 32, pixels a side.
        classes: 10.
        augment: none, crop or crop_flip; for training only.

    Raises:
        ConfigError: an option is not as above.
        DataError: files are missing, damaged, or hold what CIFAR-10's do not.
    """
    require_facts(
        "CIFAR-10", channels=(channels, 3), image_size=(image_size, 32), classes=(classes, _CLASSES)
    )
    train_files, test_files = _find(root)
    images, targets = _read(train_files)
    train, val = hold_out(targets, one_in=_ONE_IN)
    normalize = Normalize.measured(images[train])
    return classification(
        ArrayImages(images[train], targets[train], normalize, augment),
        ArrayImages(images[val], targets[val], normalize),
        ArrayImages(*_read(test_files), normalize),
        class_names=_NAMES,
        preprocessing=normalize.described(image_size),
    )


def _read(files: list[tuple[Path, Reader]]) -> tuple[Tensor, Tensor]:
    parts = []
    for path, reader in files:
        images, labels = reader(path)
        require_labels(path, labels, len(images), _CLASSES)
        parts.append((images, labels))
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def _find(root: str) -> tuple[list[tuple[Path, Reader]], list[tuple[Path, Reader]]]:
    """The training and the test files, each with its reader."""
    for folder in (Path(root) / _BINARY, Path(root) / _PYTHON, Path(root)):
        for ending, reader in ((".bin", cifar_files.read_binary), ("", cifar_files.read_python)):
            train = [folder / f"data_batch_{part}{ending}" for part in range(1, 6)]
            test = folder / f"test_batch{ending}"
            if all(path.is_file() for path in [*train, test]):
                return [(path, reader) for path in train], [(test, reader)]
    fetch = f"from torchvision.datasets import CIFAR10 as C; C({str(root)!r}, download=True)"
    raise DataError(
        f"dataset.root={root}: no complete CIFAR-10 (data_batch_1 to 5 and test_batch, with .bin "
        f"in {_BINARY}/ or without in {_PYTHON}/); get it with "
        f'python -c "{fetch}"'
    )
