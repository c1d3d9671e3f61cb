"""The optimizer's side of a step."""

from mpframe.optim.ema import Ema
from mpframe.optim.joint_optimizer import JointOptimizer
from mpframe.optim.master_weights import MasterWeights
from mpframe.optim.step_result import StepResult

__all__ = ["Ema", "JointOptimizer", "MasterWeights", "StepResult"]
