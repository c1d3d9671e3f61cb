"""A generator against a discriminator: the objectives of the two parts of one model.

D(x) is the logit that x is real, z is noise and G(z) is a made image (Goodfellow et al. 2014, the
non-saturating form for G; softplus(a) = log(1 + e^a)):

    L_D = mean softplus(-D(x)) + mean softplus(D(G(z)))
    L_G = mean softplus(-D(G(z)))

The logits are converted to fp32, and the losses are computed in fp32, outside the casts.
"""

from typing import Any

from torch.nn.functional import softplus

from mpframe.objectives.step_output import StepOutput
from mpframe.objectives.supervised import outside_casts
from mpframe.tree import to_fp32


def discriminator_objective(model: Any, batch: Any) -> StepOutput:
    """L_D; `outputs` are the logits [N, 1] of real and of made images.

    Args:
        model: gives these logits for images; those of made ones have no gradient to the generator.
        batch: its first element is the images [N, ...].
    """
    logits = model(batch[0])
    with outside_casts():
        real, fake = to_fp32(logits)
        loss = softplus(-real).mean() + softplus(fake).mean()
    return StepOutput(loss, outputs=(real, fake), targets=batch[1])


def generator_objective(model: Any, batch: Any) -> StepOutput:
    """L_G; `outputs` are the logits [N, 1] of made images.

    Args:
        model: has the modules `generator` and `discriminator`, and `noise(images)`.
        batch: its first element is the images [N, ...]; as many are made.
    """
    logits = model.discriminator(model.generator(model.noise(batch[0])))
    with outside_casts():
        fake = to_fp32(logits)
        loss = softplus(-fake).mean()
    return StepOutput(loss, outputs=fake, targets=batch[1])
