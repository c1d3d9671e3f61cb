"""The callbacks that come with mpframe, one file each; docs/own_parts.md says how to add one.

Begin with core/callback.py, the interface, and conf/callbacks/default.yaml, the order.

    records               writes numbers to files
    console               shows numbers
    profile               shows where the time of a step goes
    checkpoints           saves the run
    guards                end a run, skip a step whose loss jumps, or warn
    freeze                freezes layers for a while
    step_hooks            at the gradients right before a step: a penalty, LARC, their norms
    ema, schedules        algorithms: an average of the weights, learning rates

The autopsy and the ranges are in lab/. A configuration names each by `_target_`.
"""

from mpframe.core.callback import Callback


def record_profile(enabled: bool = False) -> Callback:
    """Make the callback `Profile`, or one that does nothing if it is not enabled."""
    if not enabled:
        return Callback()
    from mpframe.training.callbacks.profile import Profile  # It loads the profiler.

    return Profile()
