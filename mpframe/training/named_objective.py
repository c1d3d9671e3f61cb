"""One of a step's objectives, for code that examines a step: doctor, autopsy, search, ranges."""

from dataclasses import dataclass

from torch import Tensor

from mpframe.loss_scaling.interface import LossScaler
from mpframe.objectives import Objective


@dataclass(frozen=True)
class NamedObjective:
    """An objective and what its backward pass needs.

    Attributes:
        name: of the loss; "" for the only one.
        objective: computes it.
        scaler: scales it.
        parameters: receive its gradients; None: all.
    """

    name: str
    objective: Objective
    scaler: LossScaler
    parameters: list[Tensor] | None = None
