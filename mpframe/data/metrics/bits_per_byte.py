"""Bits per byte of text, which compares language models whatever their tokens are."""

import math

from torch import Tensor

from mpframe.data.metrics.nats import Nats


class BitsPerByte(Nats):
    """The bits that the model needs for a byte of text:  mean loss / (ln 2 · bytes per token).

    Args:
        bytes_per_token: the mean over the text; 1 if tokens are bytes.
    """

    name = "bits_per_byte"

    def __init__(self, bytes_per_token: float = 1.0) -> None:
        super().__init__()
        self._bytes = bytes_per_token

    def compute(self) -> Tensor:
        """The bits so far, 0-d float64; nan before the first update."""
        return super().compute() / (math.log(2) * self._bytes)
