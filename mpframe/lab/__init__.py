"""The effects of precision on your numbers: observed, explained, searched and simulated.

    exponents      magnitudes counted by exponent, and how many of them half loses
    ranges         how large the numbers of every layer are in a step
    product_noise  the loss of each operand of products below 16 bits
    range_watch    the callback that reports both during a run; pictures draws them
    autopsy/       why a step failed, found by replaying it
    doctor         what will go wrong, before training
    report/        runs compared, on one page
    hints          options that are allowed, but probably not intended, which each run reports
    search         which modules must stay in fp32
    find/          a learning rate and a batch size, measured before training
    validation     pictures of classes confused, and of samples with their predictions
    simulation     what another loss scaler would have done

Begin with exponents.py.

Imports `training` and all below it, and is used by `run` and `cli`. Each part is loaded when it is
used. Every run uses hints.py.
"""

from mpframe.core.callback import Callback
from mpframe.core.ranges import require_whole


def watch_ranges(every: int | None, worst: int = 3) -> Callback:
    """Make the callback `RangeWatch`, or one that does nothing if `every` (>= 1) is None."""
    if every is None:
        return Callback()
    require_whole("callbacks.ranges.every", every)
    # With it come histograms and pictures, which other runs do without.
    from mpframe.lab.range_watch import RangeWatch

    return RangeWatch(every, worst)
