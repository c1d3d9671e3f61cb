"""The optimizer's side of a step: from gradients to updated weights.

Begin with master_weights.py: `MasterWeights` wraps a torch optimizer, keeps the fp32 masters of
half weights (masters/), and makes a step that is all or nothing. Around it stand

    gradients.py, accumulation.py   unscaling, clipping, and the sum over micro-batches
    verdict.py                      the one place where the host reads whether a step is skipped
    multi_optimizer.py              several optimizers that make one step
    larc.py                         gradients scaled by the size of their weights
    selection.py, param_group.py    which parameter belongs to which optimizer or group
    schedules.py, ema.py            learning rates over the run, and the average of the weights

The package imports torch, `loss_scaling`, `tree` and `errors`.
"""

from mpframe.optim.ema import Ema
from mpframe.optim.master_weights import MasterWeights
from mpframe.optim.masters.widening import fp32_weights
from mpframe.optim.step_result import StepResult

__all__ = ["Ema", "MasterWeights", "StepResult", "fp32_weights"]
