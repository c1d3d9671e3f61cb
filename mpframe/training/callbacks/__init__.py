"""The callbacks that come with mpframe, one file each; docs/own_parts.md says how to add one.

Begin with core/callback.py, the interface, and conf/callbacks/default.yaml, the order.

    curves, records       write numbers to files
    console               shows numbers
    profile               shows where the time of a step goes
    results, throughput   keep the numbers of the summary
    checkpoints           saves the run
    guards                end a run, or warn
    freeze                freezes layers for a while
    step_hooks, larc      change gradients right before a step: a penalty; LARC

The autopsy and the ranges are callbacks as well, and are in lab/. A configuration names each by
`_target_`, and nothing is exported here. This package may import what training may import.
"""

from mpframe.core.callback import Callback


def record_profile(enabled: bool = False) -> Callback:
    """The callback `Profile`, or one that does nothing if it is not enabled."""
    if not enabled:
        return Callback()
    # The profiler and what reads its trace are loaded when they are used.
    from mpframe.training.callbacks.profile import Profile

    return Profile()
