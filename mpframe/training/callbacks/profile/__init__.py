"""Where the time of a step goes: `trainer.profile=true`.

    callback.py    records a few steps with torch.profiler, and takes its hooks off again
    modules.py     marks in the trace which module a forward pass is in
    trace.py       reads the trace: for each op its module, its format and its time
    table.py       the largest costs, as text and as Markdown

docs/profile.md says what is attributed to what, and what is not.
"""

from mpframe.training.callbacks.profile.callback import Profile

__all__ = ["Profile"]
