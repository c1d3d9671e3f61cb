"""The root of the mean squared relative error, summed on the device."""

from torch import Tensor

from mpframe.data.metrics.rmse import RMSE


class RMSPE(RMSE):
    """The root of the mean squared relative error:  sqrt(1/n Σ ((output - target) / target)²).

    It has no unit; 0.1 is an error of ten percent. Outputs and targets are in the target's own
    unit, not its logarithm. A target that is 0 makes the metric inf or nan.
    """

    name = "rmspe"

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) / targets
