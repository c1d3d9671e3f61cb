"""Precision: which op runs, and which weight is stored, in which format."""

from mpframe.precision.dtype_map import Row, as_table
from mpframe.precision.joint_optimizer import JointOptimizer
from mpframe.precision.master_weights import MasterWeights
from mpframe.precision.op_lists import OpLists
from mpframe.precision.policy import Policy
from mpframe.precision.precision import Precision

__all__ = ["JointOptimizer", "MasterWeights", "OpLists", "Policy", "Precision", "Row", "as_table"]
