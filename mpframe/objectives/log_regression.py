"""The objective of a positive number whose logarithm is learned, such as a count or a price.

With y the target, and mean μ and deviation σ of the training targets' logarithms, the model
predicts z = (log y - μ) / σ:

    L = mean (output - z)²            ŷ = exp(μ + σ · output)

An error of the logarithm is a relative error of the number: what counts is the ratio ŷ / y. The
model's outputs have mean 0 and deviation 1, where a half format is finest. All of this is computed
in fp32, outside the casts.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from mpframe.errors import ConfigError, UserCodeError
from mpframe.objectives.step_output import StepOutput
from mpframe.objectives.supervised import outside_casts
from mpframe.tree import to_fp32
from mpframe.user_code import UserCode, described

_TARGET = "target"


class LogRegression:
    """Batches are dicts: `target`, and what the model is called with, by name.

    Args:
        mean: μ, of the natural logarithm of the training targets.
        std: σ, > 0.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(self, mean: float, std: float) -> None:
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise ConfigError(
                f"objective.mean={mean}, objective.std={std}: must be finite, and std > 0"
            )
        self.mean = mean
        self.std = std

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """The loss; for metrics outputs ŷ and targets y, both [N] and in the target's own unit.

        Args:
            model: model(**batch without `target`) -> [N] or [N, 1].
            batch: `target` is [N], > 0.

        Raises:
            UserCodeError: the batch is no such dict, the model raised, or gave another shape.
        """
        if not isinstance(batch, Mapping) or _TARGET not in batch:
            raise UserCodeError(
                f"objective: log_regression takes dicts with a target, and the dataset gave "
                f"{described(batch)}; give it such dicts, or use another objective"
            )
        inputs = {name: value for name, value in batch.items() if name != _TARGET}
        with UserCode("model:", model, batch=batch):
            outputs = model(**inputs)
        with outside_casts():
            targets = to_fp32(batch[_TARGET])
            logs = to_fp32(outputs).flatten()
            if logs.shape != targets.shape:
                raise UserCodeError(
                    f"objective: log_regression takes one output for each target, and the model "
                    f"gave {described(outputs)} for {described(targets)}; let it give [N, 1]"
                )
            loss = nn.functional.mse_loss(logs, (targets.log() - self.mean) / self.std)
            return StepOutput(loss, (self.mean + self.std * logs).exp(), targets)
