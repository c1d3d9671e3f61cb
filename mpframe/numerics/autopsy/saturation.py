"""An operand of a product below 16 bits that its scale is too small for: most of it is cut off.

The step is finite then, and no loss scale helps. It comes of scales that do not follow the values,
as those of `fp8_delayed` if values grow at once.
"""

from dataclasses import dataclass

from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.replay import Setting, replay
from mpframe.numerics.product_noise import Noise, ProductProbe

_LEAST_SIGNAL = 10.0  # decibels: the noise has a tenth of the signal's energy


@dataclass(frozen=True)
class Saturation:
    """What was cut off.

    Attributes:
        layer: its name.
        operand: product and operand, as `forward.x`.
        noise: what was counted.
    """

    layer: str
    operand: str
    noise: Noise


def saturation_in(case: Case) -> Saturation | None:
    """The operand that keeps the least of its signal, if values beyond the range are to blame."""
    if not case.precision.policy.recipes:
        return None
    probe = ProductProbe(case.precision)
    try:
        replay(case, Setting())
    finally:
        noises = probe.noises()
    found = [
        Saturation(*key, noise)
        for key, noise in noises.items()
        if noise.saturated > 0 and noise.snr_db < _LEAST_SIGNAL
    ]
    return min(found, key=lambda own: own.noise.snr_db, default=None)
