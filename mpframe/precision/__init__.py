"""Precision: which op runs, and which weight is stored, in which format."""

from mpframe.precision.dtype_map import Row, as_table
from mpframe.precision.op_lists import OpLists
from mpframe.precision.policy import Policy
from mpframe.precision.precision import Precision

__all__ = ["OpLists", "Policy", "Precision", "Row", "as_table"]
