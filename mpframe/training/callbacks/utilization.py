"""How much of the device a run uses: operations of a step, their rate, and tokens per second."""

import logging
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mpframe.core.callback import Batch, Callback
from mpframe.core.ranges import POSITIVE, require
from mpframe.core.step_result import StepResult
from mpframe.core.tree import device_of, tensors_in
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

# Dense products in a 16-bit format with sums in fp32, 10^12 operations a second, by the vendor's
# data sheets. The first name that a device's name contains.
_PEAKS = {
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "A100": 311.9,
    "L40S": 362.0,
    "V100": 125.0,
    "T4": 65.0,
}
_ONLY_FLOAT16 = ("V100", "T4")


class Utilization(Callback):
    """Counts a step's floating-point operations, and writes how fast they are done.

    The first step of each start is counted, forward and backward, by torch's counter: products,
    convolutions and attention, 2 operations for a multiplication with its addition. Later steps are
    taken to be alike. What is recomputed to save memory is counted again. Utilisation is their rate
    over the device's peak (MFU; Chowdhery et al. 2022, PaLM, appendix B, leaves recomputation out).

    Args:
        peak_flops: the device's peak in the format of the products, operations a second, > 0. None:
            known for some GPUs in float16 and bfloat16, else no utilisation is written.
        tokens: write the elements a second of the first tensor of whole numbers in a batch.
        log_every: steps between two points.

    Attributes:
        flops: operations of a step on this rank. None before the first step.
    """

    def __init__(
        self, peak_flops: float | None = None, tokens: bool = False, log_every: int = 10
    ) -> None:
        if peak_flops is not None:
            require("callbacks.utilization.peak_flops", peak_flops, POSITIVE)
        self.flops: int | None = None
        self._peak, self._count_tokens, self._every = peak_flops, tokens, log_every
        self._counting = ExitStack()
        self._counter: Any = None
        self._steps, self._tokens, self._seconds = 0, 0, 0.0  # since the last point
        self._untold: deque[int] = deque()  # tokens of steps whose verdict is not known

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._context = context
        self._seconds = context.throughput.train_seconds
        if self._peak is None:
            self._peak = _peak_of(device_of(trainer.model), trainer.precision.policy)

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        if self.flops is None and self._counter is None:
            self._counting.enter_context(warnings.catch_warnings())
            # The counter has hooks, which a compiler would mention, and are gone after this step.
            warnings.filterwarnings("ignore", "Using `torch.compile")
            self._counter = self._counting.enter_context(FlopCounterMode(display=False))
        self._untold.append(sum(map(_tokens_in, batches)) if self._count_tokens else 0)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        self._end_count()
        self._steps += 1
        self._tokens += self._untold.popleft()
        if trainer.progress.global_step % self._every:
            return
        now = self._context.throughput.train_seconds
        seconds, self._seconds = now - self._seconds, now
        rate = (self.flops or 0) * self._steps / seconds
        values = {"speed/flops_per_second": rate}
        if self._peak is not None:
            values["speed/utilization"] = rate / self._peak
        if self._count_tokens:
            values["speed/tokens_per_second"] = self._tokens * trainer.comm.size / seconds
        self._steps = self._tokens = 0
        self._context.tracker.scalars(trainer.progress.global_step, values)

    def on_step_end(self, trainer: Trainer) -> None:
        """The step may be over before its verdict is known."""
        self._end_count()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        self._counting.close()

    def _end_count(self) -> None:
        if self._counter is not None and self.flops is None:
            self._counting.close()
            self.flops = int(self._counter.get_total_flops())
            log.info("a step takes %.4g floating-point operations", self.flops)


def _tokens_in(batch: Batch) -> int:
    whole = (t for t in tensors_in(batch) if not t.is_floating_point() and t.dtype != torch.bool)
    return next((tensor.numel() for tensor in whole), 0)


def _peak_of(device: torch.device, policy: Any) -> float | None:
    """Return the peak of products in the half format, operations a second, if it is known."""
    if device.type != "cuda" or policy.mode == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    known = next((one for one in _PEAKS if one in name), None)
    if known is None or (known in _ONLY_FLOAT16 and policy.half != "float16"):
        return None
    return _PEAKS[known] * 1e12
