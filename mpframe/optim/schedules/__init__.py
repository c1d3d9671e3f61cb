"""Learning-rate schedules, sized to the planned number of steps.

Each is a function that makes a schedule of torch's for an optimizer, and has a file in
conf/scheduler/. It is stepped once after every optimizer step that was not skipped. Any other
class of torch, timm or Hugging Face does as well: torch's `ReduceLROnPlateau` is stepped once after
every validation, with the metric if that has a direction, else with the loss. `PlannedSchedule`
holds all others, and lets a resumed run follow the schedule of its own plan.

    cycles.py       constant, warmup_cosine, onecycle
    decays.py       poly, exponential, transformer, piecewise_constant
    interface.py    what a run asks of a schedule
"""

from mpframe.optim.schedules.cycles import constant, onecycle, warmup_cosine
from mpframe.optim.schedules.decays import (
    exponential,
    piecewise_constant,
    poly,
    transformer,
)
from mpframe.optim.schedules.interface import PlannedSchedule, Schedule

__all__ = [
    "PlannedSchedule",
    "Schedule",
    "constant",
    "exponential",
    "onecycle",
    "piecewise_constant",
    "poly",
    "transformer",
    "warmup_cosine",
]
