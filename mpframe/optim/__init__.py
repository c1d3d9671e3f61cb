"""The optimizer's side of a step."""

from mpframe.optim.ema import Ema
from mpframe.optim.master_weights import MasterWeights
from mpframe.optim.multi_optimizer import MultiOptimizer
from mpframe.optim.step_result import StepResult

__all__ = ["Ema", "MasterWeights", "MultiOptimizer", "StepResult"]
