"""What do products below 16 bits take from each operand of the first batch?

Noise of 10 decibels below the signal is a third of its size. Signal to noise looks at the largest
values alone; where a few of them set the scale, the others become 0, and `lost` tells.
"""

from collections.abc import Iterator

import torch

from mpframe.numerics.doctor.subject import Subject
from mpframe.numerics.hints import Finding, few, note, warning
from mpframe.numerics.product_noise import WITHOUT_WEIGHT, Noise, Noises, ProductProbe
from mpframe.numerics.remedies import pin_words
from mpframe.objectives import compute
from mpframe.precision.policy import NO_PRODUCTS
from mpframe.precision.undisturbed import undisturbed

_LEAST_DB = 10.0
_MANY_LOST = 0.5


def check_products(subject: Subject) -> Iterator[Finding]:
    """Layers whose operands lose most; those that lose too much."""
    recipe = subject.policy.products
    noises = noises_of(subject) if subject.policy.recipes else {}
    bad = [key for key, noise in noises.items() if not _bearable(noise)]
    layers = dict.fromkeys(layer for layer, _ in bad if layer != WITHOUT_WEIGHT)
    if bad:
        said = (f"{' '.join(key)} ({_words(noises[key])})" for key in bad)
        yield warning(
            f"dtype.products={recipe}: takes too much of {few(said)} on the first batch",
            *pin_words(layers, NO_PRODUCTS),
        )
    elif noises:
        worst = sorted(noises, key=lambda key: noises[key].snr_db)
        said = (f"{' '.join(key)} ({_words(noises[key])})" for key in worst[:3])
        yield note(f"dtype.products={recipe}: the noisiest on the first batch are {few(said)}")


def noises_of(subject: Subject) -> Noises:
    """What is counted in a forward and a backward pass of the first batch."""
    trainer = subject.trainer
    model, precision = trainer.model, trainer.precision
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()
    with undisturbed(model), precision.undisturbed():
        probe = ProductProbe(precision)
        try:
            for own in trainer.objectives:
                with precision.cast():
                    loss = compute(own.objective, model, subject.batch).loss
                scaled = loss.float() * subject.first_scale(own.scaler)
                torch.autograd.grad(scaled, weights, allow_unused=True)
        finally:
            noises = probe.noises()
    return noises


def _bearable(noise: Noise) -> bool:
    """Beside inf and nan there is no ratio; an overflow is another check's."""
    return not noise.snr_db < _LEAST_DB and noise.lost <= _MANY_LOST


def _words(noise: Noise) -> str:
    return f"{noise.snr_db:.0f} dB, {noise.lost:.0%} lost"
