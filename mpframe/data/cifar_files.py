"""Readers of CIFAR-10's two published formats, neither of which runs anything from the file.

Binary: records of 3073 bytes, a label and then 3 x 32 x 32 values, channel by channel.

Python: a pickle of {"labels": [...], "data": uint8 array [N, 3072], ...}. Unpickling runs what the
file says, so the bytes must be those that were published, and only numpy's arrays are rebuilt.
"""

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpframe.errors import DataError
from mpframe.files.plain_file import open_regular

RECORDS = 10_000
"""Images in each of the six published files."""
_PIXELS = 3 * 32 * 32
_LARGEST = 2**26  # bytes; a published file has 31 million
PUBLISHED = {
    "c99cafc152244af753f735de768cd75f",
    "d4bba439e000b95fd0a9bffe97cbabec",
    "54ebc095f3ab1f0389bbae665268c751",
    "634d18415352ddfa80567beed471001a",
    "482c414d41f54cd18b22e5b47cb7c3cb",
    "40351d587109b95175f43aff81a1287e",
}
"""The MD5 digests of data_batch_1 to 5 and test_batch, as torchvision checks them too."""
_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels of a file of binary records.

    Returns:
        Images uint8 [10000, 3, 32, 32] and labels uint8 [10000].

    Raises:
        DataError: unreadable or of the wrong length.
    """
    wanted = RECORDS * (1 + _PIXELS)
    content = _read(path, wanted)
    if len(content) != wanted:
        raise DataError(
            f"{path}: must be {wanted} bytes, {RECORDS} records of {1 + _PIXELS}, "
            f"but has {path.stat().st_size}; get the file again"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(RECORDS, 1 + _PIXELS)
    return records[:, 1:].reshape(RECORDS, 3, 32, 32), records[:, 0].clone()


def read_python(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels of a published file of the Python version.

    Returns:
        Images uint8 [10000, 3, 32, 32] and labels int64 [10000].

    Raises:
        DataError: unreadable, or not one of the published files.
    """
    content = _read(path, _LARGEST)
    # A second file with the digest of a published one is out of reach, unlike two made together.
    if hashlib.md5(content, usedforsecurity=False).hexdigest() not in PUBLISHED:
        raise _refused(path, "its bytes are not the published ones")
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from error
    images = torch.from_numpy(batch["data"])
    return images.view(RECORDS, 3, 32, 32), torch.tensor(batch["labels"])


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that calls nothing except what rebuilds a numpy array."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise pickle.UnpicklingError(f"it names '{module} {name}', which was not called")
        return super().find_class(module, name)


def _read(path: Path, most: int) -> bytes:
    """Return the file's first `most + 1` bytes."""
    try:
        with open_regular(path, "rb", follow=True) as file:
            content: bytes = file.read(most + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return content


def _refused(path: Path, why: str) -> DataError:
    return DataError(
        f"{path}: refused, not a file of CIFAR-10's Python version ({why}); "
        "get cifar-10-python.tar.gz again, or use the binary version"
    )
