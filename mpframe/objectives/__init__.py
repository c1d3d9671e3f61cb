"""Objectives: what turns a model and a batch into a loss.

    objective(model, batch) -> StepOutput(loss, outputs, targets, count)

Begin with step_output.py, which holds the interface. `supervised(loss)` is for batches of inputs
and targets (`cross_entropy` and `mse` are made by it), `model_loss` is for models that return their
own loss. Those of other tasks are in mpframe/workloads. Everything that runs an objective (trainer,
probe, autopsy, doctor) calls `compute`, which checks the result.

An objective is called inside the cast block of the run's precision. The package may import
precision, and it imports nothing that trains.
"""

from mpframe.objectives.compute import compute, count_of, require_objective, samples_in
from mpframe.objectives.losses import cross_entropy, mse
from mpframe.objectives.model_loss import model_loss
from mpframe.objectives.step_output import Objective, StepOutput
from mpframe.objectives.supervised import Supervised, outside_casts, supervised

__all__ = [
    "Objective",
    "StepOutput",
    "Supervised",
    "compute",
    "count_of",
    "cross_entropy",
    "model_loss",
    "mse",
    "outside_casts",
    "require_objective",
    "samples_in",
    "supervised",
]
