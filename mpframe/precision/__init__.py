"""Precision: which op runs, and which weight is stored, in which format.

Begin with precision.py, whose `Precision` is all that a training loop calls: `prepare` stores the
weights and wraps the optimizer, `cast` is the block in which ops are cast. Behind it stand

    policy.py     the format of every op, from mode, op lists (op_lists.py) and pins (pins.py)
    storage/      the format of every weight, from the ops that read it
    dtype_map.py  the policy made visible: a row for each layer
    casting/      the policy applied to each op while it runs
    products/     matrix products and convolutions in formats below 16 bits, by recipes

The package imports torch, `optim` (for the master weights), `tree`, `errors`, and of config the
place of the shipped op lists. Nothing here knows a loss or a data set.
"""

from mpframe.precision.dtype_map import Row, as_table
from mpframe.precision.op_lists import OpLists
from mpframe.precision.policy import Policy
from mpframe.precision.precision import Precision
from mpframe.precision.products.recipe import Recipe

__all__ = ["OpLists", "Policy", "Precision", "Recipe", "Row", "as_table"]
