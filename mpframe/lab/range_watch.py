"""Reports the ranges of a step every so many steps: scalars, histograms, pictures.

Between two reports nothing is attached to the model. Each rank counts its part of the batch, and
rank 0 reports the sum. Scalars show the worst few layers of a report, pictures show all.
"""

import logging
import math
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import compress, islice
from pathlib import Path

import numpy as np
import torch

from mpframe.core.callback import Batch, Callback
from mpframe.core.policy import Policy
from mpframe.core.step_result import StepResult
from mpframe.lab import product_noise
from mpframe.lab.exponents import HIGHEST, LOWEST, Limits
from mpframe.lab.pictures import draw_layers, draw_noises, draw_time
from mpframe.lab.product_noise import NoiseRecord, Noises, ProductProbe
from mpframe.lab.ranges import FOLDER, KINDS, Counts, RangeProbe, RangeRecord, Ranges, read_ranges
from mpframe.tracking.tracker import Tracker
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

NOISE_FIGURES = {"snr_db": True, "saturated": False, "lost": False, "scale_spread": False}
"""Those of a `Noise`, and whether the lowest is the worst."""
_EDGES = [float(exponent) for exponent in range(LOWEST, HIGHEST + 2)]
_DRAWN_EVERY = 60.0  # seconds; a picture takes about one


class RangeWatch(Callback):
    """Reports every so many steps.

    Args:
        every: steps between two reports, >= 1.
        worst: layers of each kind that scalars are written for.
        layers: patterns of the layers drawn over time; empty: the one nearest to overflow.
        on_error: `stop` if the disk is full, or `warn` and write and draw once there is room.
    """

    _folder: Path
    _tracker: Tracker
    _policy: Policy
    _half: torch.dtype
    _limits: Limits
    _record: RangeRecord
    _noise_record: NoiseRecord

    def __init__(
        self, every: int, worst: int = 3, layers: Sequence[str] = (), on_error: str = "stop"
    ) -> None:
        self._every, self._worst = every, worst
        self._chosen, self._on_error = layers, on_error
        self._last: Ranges | None = None
        self._drawn = time.monotonic()
        self._probe: RangeProbe | None = None
        self._products: ProductProbe | None = None
        self._noises: Noises = {}

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Open the record; reports of steps that a resumed run takes again are cut off."""
        self._folder, self._tracker = context.folder, context.tracker
        self._policy = trainer.precision.policy
        self._half = self._policy.half_dtype
        self._limits = Limits.of(self._half)
        kept = trainer.progress.global_step
        self._record = RangeRecord(context.folder, kept, self._on_error)
        if self._policy.recipes:
            path = context.folder / FOLDER / product_noise.FILE_NAME
            self._noise_record = NoiseRecord(path, kept, self._on_error)

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        """Attach to the model if a report is due; not earlier, because others may run the model."""
        self._probe = None
        if (trainer.progress.global_step + 1) % self._every == 0:
            trainer.read_verdicts()  # After this the next step that is reported is this one.
            self._probe = RangeProbe(trainer, self._half)
            if self._policy.recipes:
                self._products = ProductProbe(trainer.precision)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Report the step if it is due."""
        if self._probe is not None:
            ranges, self._probe = self._probe.ranges(), None
            if trainer.comm.is_main:
                self._last = ranges
                self._record.add(ranges)
                self._tracker.scalars(ranges.step, self._scalars(ranges))
        if self._products is not None:
            noises, self._products = self._products.noises(trainer.comm), None
            if trainer.comm.is_main:
                self._report_products(trainer.progress.global_step, noises)

    def on_step_end(self, trainer: Trainer) -> None:
        """Report before the trainer moves on."""
        if self._probe is not None:
            trainer.read_verdicts()

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Draw if the last pictures are older than a minute."""
        if time.monotonic() - self._drawn > _DRAWN_EVERY:
            self.draw()

    def on_train_end(self, trainer: Trainer) -> None:
        """Draw before the last checkpoint, which holds what was logged at the last step."""
        self.draw()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Draw if the training ended in another way."""
        self.draw()

    def draw(self) -> None:
        """Draw what has been reported into the run's folder, and into TensorBoard.

        Raises:
            OSError: a picture cannot be written, and that stops the run.
        """
        if self._last is None or self._record.pending:
            return
        try:
            self._draw(self._last)
        except OSError as error:
            if self._on_error != "warn":
                raise
            log.warning("warning: %s cannot be written (%s)", error.filename, error.strerror)
        else:
            self._last, self._drawn = None, time.monotonic()

    def _report_products(self, step: int, noises: Noises) -> None:
        self._noises = noises
        self._noise_record.add(step, noises)
        for name, lowest_is_worst in NOISE_FIGURES.items():
            figures = {key: getattr(noise, name) for key, noise in noises.items()}
            known = [key for key, figure in figures.items() if math.isfinite(figure)]
            worst = sorted(known, key=figures.__getitem__, reverse=not lowest_is_worst)
            tags = {f"numerics/products/{name}/{'/'.join(k)}": figures[k] for k in worst}
            self._tracker.scalars(step, dict(islice(tags.items(), self._worst)))

    def _draw(self, last: Ranges) -> None:
        step, folder = last.step, self._folder / FOLDER
        if self._noises:
            path = folder / "products.png"
            draw_noises(self._noises, step, path)
            self._tracker.image("numerics/products/signal_to_noise", path.read_bytes(), step)
        reports = read_ranges(self._folder)
        for kind in KINDS:
            path = folder / f"{kind}.png"
            if not draw_layers(last, kind, self._half, path):
                continue
            self._tracker.image(f"numerics/{kind}/layers_by_exponent", path.read_bytes(), step)
            for layer, counts in zip(last.layers, last.bins(kind), strict=True):
                if counts.any():
                    tag = f"numerics/{kind}/exponents/{layer}"
                    self._tracker.histogram(tag, counts.tolist(), _EDGES, step)
            for layer in self._followed(last, kind):
                path = folder / f"{kind}_over_time_{layer}.png"
                draw_time(reports, kind, layer, self._half, path)
                tag = f"numerics/{kind}/exponents_by_step/{layer}"
                self._tracker.image(tag, path.read_bytes(), step)

    def _scalars(self, ranges: Ranges) -> dict[str, float]:
        """Return the worst layers of each kind, in bits and fractions."""
        values: dict[str, float] = {}
        for kind in KINDS:
            figures = {
                "headroom_bits": (ranges.headroom(kind, self._limits), -1),
                "lost_fraction": (ranges.fraction(kind, "lost"), 1),
                "lost_fraction_at_twice_scale": (ranges.fraction(kind, "lost_at_twice_scale"), 1),
                "lost_fraction_at_half_scale": (ranges.fraction(kind, "lost_at_half_scale"), 1),
                "subnormal_fraction": (ranges.fraction(kind, "subnormal"), 1),
                "zero_fraction": (ranges.fraction(kind, "zeros"), 1),
                "over_count": (ranges.field(kind, "over"), 1),
            }
            for name, (figure, sign) in figures.items():
                values |= self._of_worst(f"numerics/{kind}/{name}", ranges, figure * sign, sign)
        away = ranges.rounded_away_fraction()
        return values | self._of_worst("numerics/updates/rounded_away_fraction", ranges, away, 1)

    def _of_worst(self, tag: str, ranges: Ranges, badness: Counts, sign: int) -> dict[str, float]:
        known = np.flatnonzero(~np.isnan(badness))
        worst = known[np.argsort(-badness[known], kind="stable")][: self._worst]
        return {f"{tag}/{ranges.layers[index]}": float(badness[index]) * sign for index in worst}

    def _followed(self, last: Ranges, kind: str) -> list[str]:
        """Return the layers drawn over time."""
        has = last.field(kind, "count") > 0
        names = list(compress(last.layers, has))
        if self._chosen:
            return [n for n in names if any(fnmatchcase(n, pattern) for pattern in self._chosen)]
        headroom = last.headroom(kind, self._limits)[has]
        known = np.where(np.isnan(headroom), np.inf, headroom)
        return [names[int(known.argmin())]] if names else []
