"""Tells before training what will go wrong, and which option corrects it.

Each check looks at a `Subject`, a run that is built and has not begun, and yields findings. Nothing
is written, and each trial leaves weights, buffers, optimizer state and random numbers bit for bit
as they were. hints.py has the checks of every run. Beside them there are

weights     does half hold them, and were they trained in bfloat16, which has the range of fp32?
first step  does it overflow or lose its gradients? The autopsy diagnoses it with the run's pins,
            lists and scale, and each fix has been tried on it.
sizes       do half products fill the tiles of a tensor core?
products    how much of each operand do products below 16 bits lose? Signal to noise only sees the
            largest values: if a few of them set the scale, the others become 0.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpframe.config.overrides import pin_words
from mpframe.core.callback import Batch
from mpframe.core.loss_scaling.scaler import LossScaler
from mpframe.files.text import few
from mpframe.lab.autopsy.callback import floors_of
from mpframe.lab.autopsy.diagnosis import Diagnosis, Kind, diagnose
from mpframe.lab.autopsy.replay import Case, Setting, replay
from mpframe.lab.autopsy.report import (
    MODEL,
    remedy_words,
    scaler_goes_there,
    underflow_of,
    value_of,
    where_of,
)
from mpframe.lab.exponents import FIELDS, Limits, count_exponents
from mpframe.lab.hints import ADAPTIVE, HINTS, Finding, PlannedRun, error, note, scaling_of, warning
from mpframe.lab.product_noise import WITHOUT_WEIGHT, Noise, ProductProbe
from mpframe.precision.policy import NO_PRODUCTS
from mpframe.tracking.dtype_map import Row, dtype_map
from mpframe.training.optimizers.multi_optimizer import largest
from mpframe.training.probe import probe_amax, wants_probe


@dataclass
class Subject(PlannedRun):
    """A planned run, and trials on it."""

    options: Mapping[str, Any] = field(default_factory=dict)  # every one by its dotted path

    @cached_property
    def rows(self) -> list[Row]:
        return dtype_map(self.trainer.precision, self.trainer.model)

    def half_weights(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (module, parameter, fp32 values) of each weight stored or computed with in half."""
        weights = self.trainer.weights()
        for row in self.rows:
            if self.half in (row.storage, getattr(torch, row.compute, None)):
                module = self.trainer.model.get_submodule(row.module)
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.is_floating_point():
                        full = f"{row.module}.{name}".lstrip(".")
                        yield row.module, full, weights[full].detach().float()

    @cached_property
    def batch(self) -> Batch:
        return self.trainer.on_device(next(self.loader.epoch(0)))

    @cached_property
    def case(self) -> Case:
        """The first step, as the autopsy replays it."""
        trainer = self.trainer
        return Case(
            model=trainer.model,
            precision=trainer.precision,
            objectives=trainer.objectives,
            batches=[self.batch],
            scales={o.name: self._first_scale(o.scaler) for o in trainer.objectives},
            floors=floors_of(trainer),
            scaling=scaling_of(trainer),
        )

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The autopsy's diagnosis of the first step, its remedies tried on the first batch."""
        return diagnose(self.case)

    @cached_property
    def _amax(self) -> Tensor:
        """The largest gradient of the first batch in fp32, 0-d float32."""
        trainer = self.trainer
        trainer.model.train()
        about = trainer.precision, self.batch
        losses = [loss.objective for loss in trainer.objectives]
        return largest([probe_amax(trainer.model, loss, *about) for loss in losses])

    def _first_scale(self, scaler: LossScaler) -> float:
        """Return the first scale. A scaler that probes takes it from the gradients."""
        tried = copy.deepcopy(scaler)
        if wants_probe(tried):
            tried.start_from(self._amax)
        return float(tried.scale)


_MANY_SUBNORMAL = 0.05
_MANY_WEIGHTS_LOST = 0.01
_TELLING = 64  # values, a quarter of them different: fewer may fit bfloat16 by chance
_TILE = 8  # half values that a tensor core takes at once: 16 bytes


def check_weights(subject: Subject) -> Iterator[Finding]:
    """Weights beyond half, and layers of which half rounds many to 0 or to fewer bits."""
    if subject.half is None:
        return
    half, limits = subject.policy.half, Limits.of(subject.half)
    beyond, small = {}, {}
    for module, name, values in subject.half_weights():
        seen = dict(zip(FIELDS, count_exponents(values, limits).tolist(), strict=False))
        nonzero = max(1.0, seen["count"] - seen["zeros"])
        lost, subnormal = seen["lost"] / nonzero, seen["subnormal"] / nonzero
        if seen["over"]:
            beyond[module] = f"{name} (reaches {seen['amax']:.4g})"
        if lost > _MANY_WEIGHTS_LOST or subnormal > _MANY_SUBNORMAL:
            small[module] = f"{name} ({lost:.1%} become 0, {subnormal:.1%} subnormal)"
    if beyond:
        what = f"weights beyond {limits.largest:g}, the largest {half} number"
        yield error(f"{few(beyond.values())}: {what}", *pin_words(beyond))
    if small:
        yield warning(f"{few(small.values())}: small weights for {half}", *pin_words(small))


def check_training_format(subject: Subject) -> Iterator[Finding]:
    """float16 weights of which all values are bfloat16 numbers, and too many for chance."""
    weights = subject.half_weights() if subject.half == torch.float16 else ()
    # Every format has powers of two and whole numbers up to 2^8, so a few of them prove nothing.
    born = [
        name
        for _, name, values in weights
        if values.numel() >= _TELLING
        and torch.equal(values, values.bfloat16().float())
        and torch.unique(values).numel() >= _TELLING // 4
    ]
    if born:
        why = "all values are bfloat16 numbers; weights trained in bfloat16 may make activations"
        beyond = "beyond 65504, the largest float16 number"
        yield warning(f"{few(born)}: {why} {beyond}", "dtype.half=bfloat16")


def check_first_step(subject: Subject) -> Iterator[Finding]:
    """A forward and backward pass that is not finite, loses many gradients, or has none."""
    case, diagnosis = subject.case, subject.diagnosis
    culprit, scale = diagnosis.culprit, max(case.scales.values())
    if diagnosis.kind is Kind.NOT_FINITE_IN_FP32:
        where = "" if culprit is None else f" (first {where_of(culprit)})"
        yield error(f"model, dataset: the first batch is not finite in fp32 either{where}; {MODEL}")
    elif diagnosis.kind is Kind.BEYOND_FORMAT:
        assert culprit is not None  # A step that is finite in fp32 and not in half has one.
        beyond = f"{where_of(culprit)} on the first batch: {value_of(culprit)}"
        yield error(beyond, *remedy_words(diagnosis, case))
    elif diagnosis.kind is Kind.SCALE_TOO_HIGH:
        reached = scaler_goes_there(diagnosis, case)
        way = "skipped steps lead there" if reached else "the scaler does not go there"
        what = f"{scale:g}: the first batch overflows above {scale * 2.0**diagnosis.octaves:g}"
        make = note if reached else error
        yield make(f"loss scale {what}, and {way}", *remedy_words(diagnosis, case))
    elif not _has_gradients(diagnosis):
        yield warning(
            "model, dataset: all gradients of the first batch are 0, in fp32 too, and nothing is "
            "learnt from it; look at the loss"
        )
    elif diagnosis.kind is Kind.UNDERFLOW and case.scaling in ("static", *ADAPTIVE):
        what = f"{scale:g}: too low for the first batch, {underflow_of(diagnosis, case)}"
        yield warning(f"loss scale {what}", *remedy_words(diagnosis, case))


def _has_gradients(diagnosis: Diagnosis) -> bool:
    """Return whether any weight's gradient in fp32 is not 0."""
    in_fp32 = (one.trace.gradients for one in diagnosis.replays[0].passes)
    return any(
        count.nonzero for found in in_fp32 for key, count in found.items() if key[1] == "weight"
    )


def check_dimensions(subject: Subject) -> Iterator[Finding]:
    """Dimensions of half products, set by an option, that tensor cores pad."""
    half, options = subject.policy.half, subject.options
    products = [row.module for row in subject.rows if row.compute == half]
    modules = map(subject.trainer.model.get_submodule, products)
    weights = (p for module in modules for p in module.parameters(recurse=False) if p.ndim >= 2)
    sizes = {size for weight in weights for size in weight.shape[:2]}
    sizes -= {options.get("dataset.classes"), options.get("dataset.channels")}
    padded = {
        path: value
        for path, value in options.items()
        if type(value) is int and value % _TILE
        if (path.startswith("model.") and value in sizes) or path == "dataset.batch_size"
    }
    if padded and products:
        yield note(
            f"{few(f'{path}={value}' for path, value in padded.items())}: not a multiple of "
            f"{_TILE}; tensor cores compute {half} products in tiles of it",
            *(f"{path}={-(-value // _TILE) * _TILE}" for path, value in padded.items()),
        )


_LEAST_DB = 10.0
_MANY_OF_OPERAND_LOST = 0.5


def check_products(subject: Subject) -> Iterator[Finding]:
    """Layers whose operands lose too much, or else the ones that lose most."""
    if not subject.policy.recipes:
        return
    recipe, probe = subject.policy.products, ProductProbe(subject.trainer.precision)
    replay(subject.case, Setting())
    noises = probe.noises()
    bad = [key for key, noise in noises.items() if not _bearable(noise)]
    layers = dict.fromkeys(layer for layer, _ in bad if layer != WITHOUT_WEIGHT)
    worst = bad or sorted(noises, key=lambda key: noises[key].snr_db)[:3]
    said = few(f"{' '.join(key)} ({_words(noises[key])})" for key in worst)
    if bad:
        what = f"dtype.products={recipe}: takes too much of {said} on the first batch"
        yield warning(what, *pin_words(layers, NO_PRODUCTS))
    elif noises:
        yield note(f"dtype.products={recipe}: the noisiest on the first batch are {said}")


def _bearable(noise: Noise) -> bool:
    # Beside inf and nan there is no ratio. Another check reports the overflow.
    return not noise.snr_db < _LEAST_DB and noise.lost <= _MANY_OF_OPERAND_LOST


def _words(noise: Noise) -> str:
    return f"{noise.snr_db:.0f} dB, {noise.lost:.0%} lost"


CHECKS: tuple[Callable[[Subject], Iterable[Finding]], ...] = (
    *HINTS,
    check_weights,
    check_training_format,
    check_first_step,
    check_dimensions,
    check_products,
)
"""The doctor's checks, with those that every run makes."""
