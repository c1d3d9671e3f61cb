"""Precision: which op runs, and which weight is stored, in which format.

Begin with precision.py, whose `Precision` is all that a training loop calls: `prepare` stores the
weights and wraps the optimizer, and ops are cast in a `cast` block. Behind it are

    policy.py      the format of every op, from mode, op lists (op_lists.py) and pins (pins.py)
    casting/       the policy applied to each op while it runs
    op_handler.py  the door for ops that run in another way
    storage/       the format of every weight, from the ops that read it
    dtype_map.py   the policy made visible: a row for each layer
    products/      matrix products and convolutions below 16 bits: an OpHandler, imported when a
                   recipe is named

Nothing here knows a loss or a data set.
"""

from mpframe.precision.op_handler import OpHandler
from mpframe.precision.op_lists import OpLists
from mpframe.precision.policy import Policy
from mpframe.precision.precision import Precision

__all__ = ["OpHandler", "OpLists", "Policy", "Precision"]
