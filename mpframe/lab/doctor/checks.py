"""The doctor's checks: each looks at a `Subject` and yields findings.

weights    does half hold them? float16 holds magnitudes from 2^-24 to 65504, with all of its
           bits from 2^-14 on. bfloat16 has the range of fp32.
scaling    does the first step overflow or lose its gradients, and at which scale does it not? The
           autopsy diagnoses the step with the run's own pins, lists and scale, and each fix has
           been tried on it.
ops        norms that run where they should not
products   how much of each operand of the first batch products below 16 bits lose. Noise of 10
           decibels below the signal is a third of its size. Signal to noise only sees the
           largest values: if a few of them set the scale, the others become 0, and `lost`
           counts them.
compute    half that a CPU computes slowly
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from mpframe.config.overrides import deny_words, pin_words
from mpframe.files.text import few
from mpframe.lab.autopsy.diagnosis import Diagnosis, Kind
from mpframe.lab.autopsy.remedy import CEILING, remedy_words, scaler_goes_there
from mpframe.lab.autopsy.report import MODEL, underflow_of, value_of, where_of
from mpframe.lab.doctor.subject import Subject
from mpframe.lab.hints import (
    ADAPTIVE,
    HINTS,
    Finding,
    error,
    findings_of,
    note,
    warning,
)
from mpframe.lab.product_noise import WITHOUT_WEIGHT, Noise
from mpframe.precision.policy import NO_PRODUCTS, has_native_half
from mpframe.precision.storage import op_of

_MANY_SUBNORMAL = 0.05
_MANY_WEIGHTS_LOST = 0.01


def check_weight_range(subject: Subject) -> Iterator[Finding]:
    if subject.half is None:
        return
    limit = torch.finfo(subject.half).max
    beyond = {
        module: (name, float(values.abs().max()))
        for module, name, values in subject.half_weights()
        if values.numel() and bool((values.abs() > limit).any())
    }
    if beyond:
        name, largest = next(iter(beyond.values()))
        yield error(
            f"{few(n for n, _ in beyond.values())}: weights beyond {limit:g}, the largest "
            f"{subject.policy.half} number ({name} reaches {largest:.4g})",
            *pin_words(beyond),
        )


def check_small_weights(subject: Subject) -> Iterator[Finding]:
    small = {
        module: (name, lost, subnormal)
        for module, name, values in subject.half_weights()
        for lost, subnormal in [_small(values, subject.half)]
        if lost > _MANY_WEIGHTS_LOST or subnormal > _MANY_SUBNORMAL
    }
    if small:
        name, lost, subnormal = max(small.values(), key=lambda entry: entry[1:])
        yield warning(
            f"{few(n for n, *_ in small.values())}: small weights; in {subject.policy.half} "
            f"{lost:.1%} of {name} become 0 and {subnormal:.1%} subnormal",
            *pin_words(small),
        )


def _small(values: Tensor, half: torch.dtype | None) -> tuple[float, float]:
    """Return the shares of the values other than 0 that are 0, and that are subnormal, in half."""
    assert half is not None
    magnitudes = values[values != 0].abs()
    if magnitudes.numel() == 0:
        return 0.0, 0.0
    lost = magnitudes.to(half) == 0
    subnormal = (magnitudes < torch.finfo(half).smallest_normal) & ~lost
    return float(lost.float().mean()), float(subnormal.float().mean())


def check_first_step(subject: Subject) -> Iterator[Finding]:
    """A forward and backward pass that is not finite, loses many gradients, or has none."""
    diagnosis = subject.diagnosis
    if diagnosis.kind is Kind.NOT_FINITE_IN_FP32:
        where = "" if diagnosis.culprit is None else f" (first {where_of(diagnosis.culprit)})"
        yield error(f"model, dataset: the first batch is not finite in fp32 either{where}; {MODEL}")
    elif diagnosis.kind is Kind.BEYOND_FORMAT:
        culprit = diagnosis.culprit
        assert culprit is not None  # A step that is finite in fp32 and not in half has one.
        beyond = f"{where_of(culprit)} on the first batch: {value_of(culprit)}"
        yield error(beyond, *remedy_words(diagnosis, subject.case))
    elif diagnosis.kind is Kind.SCALE_TOO_HIGH:
        yield _too_high(subject, diagnosis)
    elif not _has_gradients(diagnosis):
        yield warning(
            "model, dataset: all gradients of the first batch are 0, in fp32 too, and nothing is "
            "learnt from it; look at the loss"
        )
    elif diagnosis.kind is Kind.UNDERFLOW and subject.scaling in ("static", *ADAPTIVE):
        yield _too_low(subject, diagnosis)


def _has_gradients(diagnosis: Diagnosis) -> bool:
    """Return whether any weight's gradient in fp32 is not 0."""
    in_fp32 = (one.trace.gradients for one in diagnosis.replays[0].passes)
    return any(
        count.nonzero for found in in_fp32 for key, count in found.items() if key[1] == "weight"
    )


def _too_high(subject: Subject, diagnosis: Diagnosis) -> Finding:
    case, words = subject.case, remedy_words(diagnosis, subject.case)
    first = next(iter(case.scales.values()))
    if scaler_goes_there(diagnosis, case):
        return note(
            f"loss_scaling.init_scale={first:g}: the first batch overflows, and steps are skipped "
            f"until the scale is down to about {first * 2.0**diagnosis.octaves:g}",
            *words,
        )
    option = "scale" if case.scaling == "static" else "min_scale"
    lowest = max(case.floors.values(), default=first)
    what = f"loss_scaling.{option}={lowest:g}: too large, the first batch overflows at it"
    return error(what, *words)


def _too_low(subject: Subject, diagnosis: Diagnosis) -> Finding:
    case = subject.case
    option = "scale" if case.scaling == "static" else "init_scale"
    ceiling = float(subject.options.get("loss_scaling.max_scale", CEILING))
    return warning(
        f"loss_scaling.{option}={max(case.scales.values()):g}: too small on the first batch; "
        f"{underflow_of(diagnosis, case)}",
        *remedy_words(diagnosis, case, ceiling),
    )


_KINDS_OF_NORM = ("batch", "group", "instance", "layer", "local_response", "rms")
NORMS = tuple(f"{kind}_norm" for kind in _KINDS_OF_NORM)


def check_norms(subject: Subject) -> Iterator[Finding]:
    if subject.half is None or subject.policy.ops.empty:  # Without lists a hint says so.
        return
    model, half = subject.trainer.model, subject.policy.half
    ops = {row.module: op_of(model.get_submodule(row.module)) for row in subject.rows}
    stored = [row.module for row in subject.rows if row.storage == subject.half]
    norms = {module: op for module in stored if (op := ops[module]) in NORMS}
    pins = [module for module in norms if subject.policy.format_pin_of(module)]
    listed = sorted({str(op) for module, op in norms.items() if module not in pins})
    if norms:
        yield warning(
            f"{few(norms)}: norms stored and computed in {half}; their sums lose small terms",
            *(*deny_words(listed), *pin_words(pins)),
        )


_LEAST_DB = 10.0
_MANY_OF_OPERAND_LOST = 0.5


def check_products(subject: Subject) -> Iterator[Finding]:
    """Layers whose operands lose too much, or else the ones that lose most."""
    recipe = subject.policy.products
    noises = subject.noises() if subject.policy.recipes else {}
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


def check_compute(subject: Subject) -> Iterator[Finding]:
    """Half on a CPU, in kernels that are much slower than fp32's."""
    half, device = subject.policy.half, subject.device
    emulated = subject.half is None or device.type != "cpu" or subject.policy.emulates(device)
    if not emulated and not has_native_half(half):
        why = "and PyTorch's kernels for them are many times slower than fp32's"
        what = f"dtype.compute=native: this cpu has no {half} products, {why}"
        yield warning(what, "dtype.compute=auto")


CHECKS: tuple[Callable[[Subject], Iterable[Finding]], ...] = (
    *HINTS,
    check_weight_range,
    check_small_weights,
    check_first_step,
    check_norms,
    check_products,
    check_compute,
)
"""The doctor's checks, with those that every run makes."""


def examine(subject: Subject) -> list[Finding]:
    return findings_of(CHECKS, subject)
