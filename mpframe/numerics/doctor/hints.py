"""Options that are allowed, but probably not intended; these checks compute nothing.

A run reports these lines at its start, and so does the doctor.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from mpframe.errors import nearest
from mpframe.numerics.doctor.finding import Finding, note, warning
from mpframe.numerics.doctor.subject import Subject
from mpframe.optim import MasterWeights
from mpframe.tree import dtype_name

ADAPTIVE = ("Backoff", "LogMax")
# Their updates are about as large as the learning rate, for any gradients.
_STEPS_OF_LR = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
_SAMPLED = 4096  # values of each weight that are looked at instead of all
_SMALL_SCALE = 2.0**-3
_SMALL_NORM = 1e-3


def check_unscaled(subject: Subject) -> Iterator[Finding]:
    """float16 without loss scaling."""
    if subject.half == torch.float16 and not subject.trainer.scalers:
        yield warning(
            "loss_scaling=none with float16: gradients of at most 3e-08 become 0",
            "loss_scaling=Backoff",
        )


def check_needless_scaling(subject: Subject) -> Iterator[Finding]:
    """An adaptive scaler for a format with the range of fp32."""
    kind = subject.scaling
    if kind in ADAPTIVE and subject.half != torch.float16:
        form = "fp32" if subject.half is None else subject.policy.half
        reason = "" if subject.half is None else f", and {form} has the range of fp32"
        yield note(
            f"loss_scaling={kind} with dtype={subject.policy.mode}{reason}: no gradient needs a "
            "scale",
            "loss_scaling=none",
        )


def check_growth(subject: Subject) -> Iterator[Finding]:
    """A scale that grows after every clean step."""
    if subject.options.get("loss_scaling.growth_interval") == 1:
        yield warning(
            "loss_scaling.growth_interval=1: the scale doubles after each clean step, so about "
            "every second step overflows and is skipped",
            "loss_scaling.growth_interval=2000",
        )


def check_static_scale(subject: Subject) -> Iterator[Finding]:
    """A static scale that makes small gradients smaller."""
    scale = subject.options.get("loss_scaling.scale")
    if scale is not None and float(scale) < _SMALL_SCALE:
        yield warning(
            f"loss_scaling.scale={scale:g}: below 1 it makes small gradients smaller; usual are "
            "128 to 65536",
            "loss_scaling.scale=1024",
        )


def check_learning_rate(subject: Subject) -> Iterator[Finding]:
    """A learning rate that the format of the weights cannot add to most of them."""
    for path, optimizer in subject.optimizers.items():
        rate = optimizer.optimizer.defaults.get("lr")
        if not isinstance(optimizer.optimizer, _STEPS_OF_LR) or not isinstance(rate, float):
            continue
        half_unit, form = _half_unit(optimizer)
        if 0.0 < rate < half_unit:
            masters = subject.trainer.precision.master_weights
            word = dtype_name(form)
            yield warning(
                f"{path}.lr={rate:g}: below {half_unit:.2g}, half a unit in the last place of most "
                f"{word} weights, which therefore do not move",
                subject.typed(f"{path}.lr", 1e-3)
                if masters or form == torch.float32
                else "dtype.master_weights=true",
            )


def check_clip_norm(subject: Subject) -> Iterator[Finding]:
    """A norm that makes every gradient tiny."""
    norm = subject.trainer.plan.clip_norm
    if norm is not None and norm < _SMALL_NORM:
        yield warning(
            f"trainer.clip_norm={norm:g}: each step's gradients are cut down to this norm; usual "
            "are 0.1 to 10",
            "trainer.clip_norm=1.0",
        )


def check_average(subject: Subject) -> Iterator[Finding]:
    """An average over more steps than the run has."""
    ema = subject.trainer.ema
    steps = subject.trainer.plan.total_steps(len(subject.loader))
    if ema is not None and steps and 1.0 / (1.0 - ema.decay) > steps:
        fits = f"{max(0.5, 1.0 - 10.0 / steps):.3g}"
        yield warning(
            f"trainer.ema_decay={ema.decay:g}: averages over the last {1 / (1 - ema.decay):.0f} "
            f"steps, and the run has {steps}",
            f"trainer.ema_decay={fits}",
        )


def check_accumulation(subject: Subject) -> Iterator[Finding]:
    """More micro-batches in a step than in an epoch."""
    wanted, batches = subject.trainer.plan.accumulate, len(subject.loader)
    if wanted > batches:
        yield warning(
            f"trainer.accumulate={wanted}: an epoch has {batches} batches, all that a step takes",
            f"trainer.accumulate={batches}",
        )


def check_classes(subject: Subject) -> Iterator[Finding]:
    """More or fewer outputs than the data has classes."""
    outputs, classes = (subject.options.get(f"{part}.classes") for part in ("model", "dataset"))
    if not isinstance(outputs, int) or not isinstance(classes, int) or outputs == classes:
        return
    more = f"{outputs - classes} outputs are never right"
    fewer = f"its labels from {outputs} on have no output"
    yield warning(
        f"model.classes={outputs}: the data set has {classes}, so "
        + (more if outputs > classes else fewer),
        f"model.classes={classes}",
    )


def check_layers(subject: Subject) -> Iterator[Finding]:
    """A pattern of layers to draw that matches none."""
    names = [name for name, _ in subject.trainer.model.named_modules()]
    for pattern in subject.options.get("numerics.layers") or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = nearest(pattern, names)
            yield warning(
                f"numerics.layers: {pattern!r} matches no layer" + f"; {hint}" * bool(hint)
            )


def _half_unit(optimizer: MasterWeights) -> tuple[float, torch.dtype]:
    """Half a unit in the last place of the median weight, and the format it is updated in."""
    updated = [optimizer.master_of(parameter).detach() for parameter in optimizer.parameters]
    if not updated:
        return 0.0, torch.float32
    narrow = min((tensor.dtype for tensor in updated), key=lambda form: form.itemsize)
    sampled = torch.cat([_sample(tensor) for tensor in updated if tensor.dtype == narrow])
    magnitudes = sampled[sampled != 0].abs()
    if not magnitudes.numel():
        return 0.0, narrow
    octave = torch.frexp(magnitudes.median()).exponent - 1
    return torch.finfo(narrow).eps / 2 * 2.0 ** int(octave), narrow


def _sample(tensor: Tensor) -> Tensor:
    values = tensor.flatten()
    return values[:: -(-values.numel() // _SAMPLED) or 1].float()
