"""What precision does to your numbers: observed, explained, searched and simulated.

    ranges      how large the numbers of every layer are: ranges, exponents, range_record,
                range_watch (the callback), range_pictures
    noise       what quantisation takes from each operand: product_noise, noise_picture
    autopsy/    why a step failed, found by replaying it
    doctor/     what will go wrong, before training
    search      which modules must stay in fp32
    simulation  what another loss scaler would have done

Begin with exponents.py, then ranges.py. optimizer_numbers.py knows which of an optimizer's numbers
a format loses; remedies.py puts pins and moved ops into words for the command line.

Imports `training` and all below it; `assembly` and the programs in `cli` use it. Nothing of it is
loaded before it is used; hints.py is what every run uses.
"""

from collections.abc import Sequence

from mpframe.training.callback import Callback


def watch_ranges(
    every: int | None, worst: int = 3, layers: Sequence[str] = (), on_error: str = "stop"
) -> Callback:
    """The callback `RangeWatch`, or one that does nothing if `every` is None."""
    if every is None:
        return Callback()
    # With it come histograms and pictures, which other runs do without.
    from mpframe.numerics.range_watch import RangeWatch

    return RangeWatch(every, worst, layers, on_error)
