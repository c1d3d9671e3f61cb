"""Fashion-MNIST: 70,000 grey images of clothes, 28 x 28, in ten classes (Xiao et al. 2017).

Recompressed copies work too: only the content counts, which the reader of idx files checks.
"""

from pathlib import Path

from torch import Tensor

from mpframe.data.datasets.hold_out import hold_out
from mpframe.data.datasets.images.arrays import ArrayImages, Normalize
from mpframe.data.datasets.images.idx import read_idx
from mpframe.data.facts import require_facts, require_labels
from mpframe.data.task import Task, classification
from mpframe.errors import DataError

_FOLDERS = (".", "FashionMNIST/raw", "usr/share/datasets/fashion-mnist")
_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_CLASSES = len(_NAMES)
_SIDE = 28
_ONE_IN = 12  # of the training images validates


def fashion_mnist(
    root: str = "data",
    channels: int = 1,
    image_size: int = _SIDE,
    classes: int = _CLASSES,
    augment: str = "none",
) -> Task:
    """Fashion-MNIST: of its 60,000 training images 5,000 validate; its 10,000 test images test.

    The split never changes: 500 images of each class validate.

    Args:
        root: holds the four idx files, plain or .gz: directly, in torchvision's
            FashionMNIST/raw, or in usr/share/datasets/fashion-mnist of an unpacked Debian package.
        channels: 1.
        image_size: 28, pixels a side.
        classes: 10.
        augment: none, crop or crop_flip; for training only.

    Raises:
        ConfigError: an option is not as above.
        DataError: files are missing or damaged.
    """
    require_facts(
        "Fashion-MNIST",
        channels=(channels, 1),
        image_size=(image_size, _SIDE),
        classes=(classes, _CLASSES),
    )
    images, targets = _read(root, "train")
    train, val = hold_out(targets, one_in=_ONE_IN)
    normalize = Normalize.measured(images[train])
    return classification(
        ArrayImages(images[train], targets[train], normalize, augment),
        ArrayImages(images[val], targets[val], normalize),
        ArrayImages(*_read(root, "t10k"), normalize),
        class_names=_NAMES,
        preprocessing=normalize.described(image_size),
    )


def _read(root: str, split: str) -> tuple[Tensor, Tensor]:
    images = read_idx(_find(root, f"{split}-images-idx3-ubyte"), (_SIDE, _SIDE))
    path = _find(root, f"{split}-labels-idx1-ubyte")
    labels = read_idx(path, ())
    require_labels(path, labels, len(images), _CLASSES)
    return images.unsqueeze(1), labels


def _find(root: str, name: str) -> Path:
    folders = [Path(root) / folder for folder in _FOLDERS]
    for folder in folders:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    looked = ", ".join(map(str, folders))
    fetch = f"from torchvision.datasets import FashionMNIST as F; F({str(root)!r}, download=True)"
    raise DataError(
        f"dataset.root={root}: Fashion-MNIST's {name}[.gz] is in none of {looked}; get it with "
        f'python -c "{fetch}", or on Debian with apt-get install dataset-fashion-mnist and '
        "dataset.root=/usr/share/datasets/fashion-mnist"
    )
