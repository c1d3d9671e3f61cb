"""The objective of detectors that return a dict of losses in training, as torchvision's do."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.errors import UserCodeError
from mpframe.objectives.step_output import StepOutput
from mpframe.objectives.supervised import outside_casts
from mpframe.precision.undisturbed import undisturbed
from mpframe.tree import to_fp32
from mpframe.user_code import UserCode, described, name_of


def detection(model: nn.Module, batch: Any) -> StepOutput:
    """The sum of the losses of `model(images, targets)`; metrics get the boxes that it finds.

    In an evaluation such a model returns boxes and no losses. It is called twice then: for its
    boxes, and once as in training for its losses, with its norm and dropout layers as they are in
    an evaluation and with fixed random numbers.

    Args:
        model: in training model(images, targets) is a dict of losses, means over the images. In an
            evaluation model(images) is a list with a dict of `boxes`, `scores` and `labels` for
            each image.
        batch: a list of images [C, H, W], and a list of dicts with `boxes` and `labels`.

    Raises:
        UserCodeError: the batch is no such pair, the model raised, or gave no losses in training.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserCodeError(
            "objective: detection takes batches of (images, targets), and the dataset gave "
            f"{described(batch)}; let its collate make such pairs"
        )
    images, targets = batch
    if model.training:
        return StepOutput(_summed(model, images, targets), count=len(images))
    with UserCode("model:", model, images=images):
        found = to_fp32(model(images))
    with undisturbed(model), _giving_losses(model):
        torch.manual_seed(0)
        loss = _summed(model, images, targets)
    return StepOutput(loss, found, targets, count=len(images))


def _summed(model: nn.Module, images: Any, targets: Any) -> Tensor:
    with UserCode("model:", model, images=images, targets=targets):
        losses = model(images, targets)
    if not isinstance(losses, Mapping) or not losses:
        raise UserCodeError(
            f"model: {name_of(model)} gave {described(losses)} in training; the objective "
            "detection takes a dict of losses"
        )
    with outside_casts():
        return torch.stack([to_fp32(loss) for loss in losses.values()]).sum()


@contextmanager
def _giving_losses(model: nn.Module) -> Iterator[None]:
    """Within the block all of an evaluated model is in training but its norms and dropout."""
    fixed = nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd
    changed = [own for own in model.modules() if not own.training and not isinstance(own, fixed)]
    for own in changed:
        own.training = True
    try:
        yield
    finally:
        for own in changed:
            own.training = False
