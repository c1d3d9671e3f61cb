"""Reports the ranges of a step every so many steps: scalars, histograms, pictures.

Between two reports nothing is attached to the model. Each rank counts its part of the batch, and
rank 0 reports the sum. Scalars show the worst few layers of a report, pictures show all.
"""

import math
import time
from collections.abc import Sequence

from mpframe.core.callback import Batch, Callback
from mpframe.core.step_result import StepResult
from mpframe.lab import product_noise
from mpframe.lab.exponents import HIGHEST, LOWEST, Limits
from mpframe.lab.pictures import draw_layers, draw_noises
from mpframe.lab.product_noise import Noises, ProductProbe
from mpframe.lab.ranges import FOLDER, KINDS, RangeProbe, Ranges
from mpframe.tracking.records import MetricsCsv
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

_LOWEST_IS_WORST = ("headroom_bits", "snr_db")  # For other figures the highest is.
_FRACTIONS = {
    "lost_fraction": "lost",
    "lost_fraction_at_twice_scale": "lost_at_twice_scale",
    "lost_fraction_at_half_scale": "lost_at_half_scale",
    "subnormal_fraction": "subnormal",
    "zero_fraction": "zeros",
}
_EDGES = [float(exponent) for exponent in range(LOWEST, HIGHEST + 2)]
_DRAWN_EVERY = 60.0  # seconds. A picture takes about one.


class RangeWatch(Callback):
    """A report every `every` (>= 1) steps, with scalars for the `worst` layers of each kind."""

    def __init__(self, every: int, worst: int = 3) -> None:
        self._every, self._worst = every, worst
        self._last: Ranges | None = None
        self._drawn = time.monotonic()
        self._probe: RangeProbe | None = None
        self._products: ProductProbe | None = None
        self._noises: Noises = {}

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Open the record of products, without steps that a resumed run takes again."""
        self._context, self._policy = context, trainer.precision.policy
        if self._policy.recipes:
            folder, first = context.folder / FOLDER, trainer.progress.global_step + 1
            folder.mkdir(parents=True, exist_ok=True)
            how = product_noise.COLUMNS, first, product_noise.FILE_NAME
            self._noise_record = MetricsCsv(folder, *how)

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        """Attach to the model if a report is due, but not earlier: others may run the model."""
        self._probe = None
        if (trainer.progress.global_step + 1) % self._every == 0:
            trainer.read_verdicts()  # After this the next step that is reported is this one.
            self._probe = RangeProbe(trainer, self._policy.half_dtype)
            if self._policy.recipes:
                self._products = ProductProbe(trainer.precision)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._probe is not None:
            ranges, self._probe = self._probe.ranges(), None
            if trainer.comm.is_main:
                self._last = ranges
                self._report_ranges(ranges)
        if self._products is not None:
            noises, self._products = self._products.noises(trainer.comm), None
            if trainer.comm.is_main:
                self._report_products(trainer.progress.global_step, noises)

    def on_step_end(self, trainer: Trainer) -> None:
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
        self.draw()

    def draw(self) -> None:
        """Draw the last reports, for the run's folder and TensorBoard. OSError stops the run."""
        last, self._last = self._last, None
        if last is None:
            return
        step, tracker, half = last.step, self._context.tracker, self._policy.half_dtype
        folder = self._context.folder / FOLDER
        if self._noises:
            path = folder / "products.png"
            draw_noises(self._noises, step, path)
            tracker.image("numerics/products/signal_to_noise", path.read_bytes(), step)
        for kind in KINDS:
            path = folder / f"{kind}.png"
            if draw_layers(last, kind, half, path):
                tracker.image(f"numerics/{kind}/layers_by_exponent", path.read_bytes(), step)
        self._drawn = time.monotonic()

    def _report_products(self, step: int, noises: Noises) -> None:
        self._noises = noises
        self._noise_record.add(*product_noise.rows_of(step, noises))
        for name in ("snr_db", "saturated", "lost", "scale_spread"):
            figures = {"/".join(key): getattr(noise, name) for key, noise in noises.items()}
            worst = self._worst_of(f"numerics/products/{name}", figures)
            self._context.tracker.scalars(step, worst)

    def _report_ranges(self, ranges: Ranges) -> None:
        limits, tracker = Limits.of(self._policy.half_dtype), self._context.tracker
        figures = {"updates/rounded_away_fraction": ranges.rounded_away_fraction()}
        for kind in KINDS:
            figures[f"{kind}/headroom_bits"] = ranges.headroom(kind, limits)
            figures[f"{kind}/over_count"] = ranges.field(kind, "over")
            for name, field in _FRACTIONS.items():
                figures[f"{kind}/{name}"] = ranges.fraction(kind, field)
            for layer, counts in zip(ranges.layers, ranges.bins(kind), strict=True):
                if counts.any():
                    tag = f"numerics/{kind}/exponents/{layer}"
                    tracker.histogram(tag, counts.tolist(), _EDGES, ranges.step)
        for name, figure in figures.items():
            by_layer = dict(zip(ranges.layers, figure.tolist(), strict=True))
            tracker.scalars(ranges.step, self._worst_of(f"numerics/{name}", by_layer))

    def _worst_of(self, tag: str, figures: dict[str, float]) -> dict[str, float]:
        known = [name for name, figure in figures.items() if math.isfinite(figure)]
        lowest = tag.endswith(_LOWEST_IS_WORST)
        worst = sorted(known, key=figures.__getitem__, reverse=not lowest)[: self._worst]
        return {f"{tag}/{name}": figures[name] for name in worst}
