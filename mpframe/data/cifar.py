"""CIFAR-10: 60,000 colour photographs of 32 x 32 in ten classes (Krizhevsky 2009).

Both published formats are read, and neither reader runs anything from the file.
"""

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpframe.core.errors import DataError
from mpframe.data.images import array_task
from mpframe.data.samples import hold_out
from mpframe.data.task import Task, require_facts, require_labels
from mpframe.files.plain_file import open_regular

_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_CLASSES = len(_NAMES)
_BINARY = "cifar-10-batches-bin"
_PYTHON = "cifar-10-batches-py"
_FILES = (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch")


def cifar10(
    root: str = "data",
    channels: int = 3,
    image_size: int = 32,
    classes: int = _CLASSES,
    augment: str = "crop_flip",
) -> Task:
    """Return CIFAR-10: 500 of the 5,000 training images of a class validate, always the same ones.

    `root` holds cifar-10-batches-bin or cifar-10-batches-py (torchvision's), or is one of them. The
    sizes are facts, which are compared. ConfigError: one of them is wrong. DataError: files are
    missing, damaged, or not CIFAR-10's.
    """
    size, count = (image_size, 32), (classes, _CLASSES)
    require_facts("CIFAR-10", channels=(channels, 3), image_size=size, classes=count)
    files = _find(root)
    images, targets = _read(files[:5])
    parts = [(images[part], targets[part]) for part in hold_out(targets, one_in=10)]
    return array_task([*parts, _read(files[5:])], augment, _NAMES)


def _read(files: list[Path]) -> tuple[Tensor, Tensor]:
    parts = [read_binary(path) if path.suffix else read_python(path) for path in files]
    for path, (images, labels) in zip(files, parts, strict=True):
        require_labels(path, labels, len(images), _CLASSES)
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def _find(root: str) -> list[Path]:
    """Return the training files and the test file, of the binary version with a suffix."""
    for folder in (Path(root) / _BINARY, Path(root) / _PYTHON, Path(root)):
        for suffix in (".bin", ""):
            files = [folder / f"{name}{suffix}" for name in _FILES]
            if all(path.is_file() for path in files):
                return files
    fetch = f"from torchvision.datasets import CIFAR10 as C; C({str(root)!r}, download=True)"
    raise DataError(
        f"dataset.root={root}: no complete CIFAR-10 (data_batch_1 to 5 and test_batch, with .bin "
        f'in {_BINARY}/ or without in {_PYTHON}/); get it with python -c "{fetch}"'
    )


RECORDS = 10_000  # images in each of the six published files
_PIXELS = 3 * 32 * 32
_LARGEST = 2**26  # bytes, where a published file has 31 million
# The MD5 digests of data_batch_1 to 5 and test_batch, which torchvision also checks.
PUBLISHED = {
    "c99cafc152244af753f735de768cd75f",
    "d4bba439e000b95fd0a9bffe97cbabec",
    "54ebc095f3ab1f0389bbae665268c751",
    "634d18415352ddfa80567beed471001a",
    "482c414d41f54cd18b22e5b47cb7c3cb",
    "40351d587109b95175f43aff81a1287e",
}
_ARRAY = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Read uint8 images [10000, 3, 32, 32] and labels [10000] from a file of binary records."""
    wanted = RECORDS * (1 + _PIXELS)
    content = _read_bytes(path, wanted)
    if len(content) != wanted:
        raise DataError(
            f"{path}: must be {wanted} bytes, {RECORDS} records of {1 + _PIXELS}, "
            f"but has {path.stat().st_size}; get the file again"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(RECORDS, 1 + _PIXELS)
    return records[:, 1:].reshape(RECORDS, 3, 32, 32), records[:, 0].clone()


def read_python(path: Path) -> tuple[Tensor, Tensor]:
    """Read uint8 images [10000, 3, 32, 32] and int64 labels [10000] from a published file."""
    content = _read_bytes(path, _LARGEST)
    try:
        # A second file with a published one's digest is out of reach, unlike two made together.
        if hashlib.md5(content, usedforsecurity=False).hexdigest() not in PUBLISHED:
            raise pickle.UnpicklingError("its bytes are not the published ones")
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path}: refused, not a file of CIFAR-10's Python version ({error}); "
            "get cifar-10-python.tar.gz again, or use the binary version"
        ) from error
    images = torch.from_numpy(batch["data"])
    return images.view(RECORDS, 3, 32, 32), torch.tensor(batch["labels"])


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that calls nothing except what rebuilds a numpy array."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAY:
            raise pickle.UnpicklingError(f"it names '{module} {name}', which was not called")
        return super().find_class(module, name)


def _read_bytes(path: Path, most: int) -> bytes:
    """Return the file's first `most + 1` bytes."""
    with open_regular(path, "rb", follow=True) as file:
        return bytes(file.read(most + 1))
