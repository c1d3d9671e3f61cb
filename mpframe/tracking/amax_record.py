"""The largest gradient of every step, kept in the run's folder for replays.

`log2_amax.txt` holds one line per step tried: log2 of the largest |unscaled gradient|, `inf` if
the step overflowed, `nan` if a gradient was nan, `-inf` if all were zero. It costs about ten
bytes a step. With it, any loss scaler can be tried on the run afterwards (simulate.py).
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mpframe.core.errors import DataError
from mpframe.files.durable import AppendLog, write_atomically
from mpframe.files.plain_file import open_regular

FILE_NAME = "log2_amax.txt"
_HELD = 256  # steps between two transfers from the device


class AmaxRecord:
    """A run's record that grows. Values wait on the device until many are moved at once.

    `kept` steps of an older record stay, for a resumed run. If the disk is full, `on_error` is
    `stop`, or `warn` to write what waits once there is room.
    """

    def __init__(self, folder: Path, kept: int = 0, on_error: str = "stop") -> None:
        path = folder / FILE_NAME
        self._log = AppendLog(path, on_error)
        self._waiting: list[Tensor] = []
        older = read_lines(path) if kept else []
        write_atomically(path, b"".join(older[:kept]))

    def add(self, amax: Tensor) -> None:
        """Keep one step's amax (0-d). Waits for the device only once in many steps."""
        self._waiting.append(amax.detach())
        if len(self._waiting) >= _HELD:
            self.flush()

    def flush(self) -> None:
        values = torch.stack(self._waiting).double().log2().tolist() if self._waiting else []
        self._waiting.clear()
        self._log.append("".join(f"{value:.9g}\n" for value in values).encode())


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of an older record, whatever they hold, if there is one."""
    try:
        with open_regular(path, "rb") as file:
            return file.readlines()
    except FileNotFoundError:
        return []


def read_amax(path: Path) -> npt.NDArray[np.float64]:
    """Read the amax of every step, [steps] float64, >= 0, inf or nan if the step overflowed.

    `path` is a run's folder, or any file with one log2 value per line.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        with open_regular(file, "rb", follow=True) as opened:
            lines = opened.read().split()
        values = np.asarray([float(line) for line in lines])
    except OSError as error:
        hint = "name a run's folder, or a file with log2(amax) per line"
        raise DataError(f"{file}: {error.strerror}; {hint}") from None
    except ValueError as error:
        raise DataError(f"{file}: {error}; allowed is one number log2(amax) per line") from None
    if values.size == 0:
        raise DataError(f"{file}: no steps recorded; train the run first")
    amax: npt.NDArray[np.float64] = np.exp2(values)
    return amax
