"""The weights that a run begins with, from another run or from another program.

    foreign_weights.py    reads the files of others: safetensors, shards, state dicts
    renaming.py           gives them the model's names
    fitting.py            takes what fits; all else is refused, unless it is named

run/first_weights.py does these in turn.
"""

from mpframe.checkpoint.init_from.fitting import Fitted, fitted
from mpframe.checkpoint.init_from.foreign_weights import ForeignWeights, is_foreign, read_foreign
from mpframe.checkpoint.init_from.renaming import renamed

__all__ = ["Fitted", "ForeignWeights", "fitted", "is_foreign", "read_foreign", "renamed"]
