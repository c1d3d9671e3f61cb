"""How the loss scale is chosen: `Static`, `Backoff` or `LogMax`.

A half-precision gradient below 2^-24 (float16) is lost to zero and one above 65504 becomes inf.
Multiplying the loss by a scale s multiplies every gradient by s, so the backward pass can be moved
to where the format has room. The optimizer divides by s again, in fp32.

    Static    s never changes
    Backoff   s grows after clean steps and shrinks on overflow: trial and error
    LogMax    s follows from what the gradients were: a model of their largest magnitude

Each is a small state machine on the device. Begin with scaler.py: yours derives from `Scaler`.
"""

from mpframe.core.loss_scaling.backoff import Backoff
from mpframe.core.loss_scaling.logmax import LogMax
from mpframe.core.loss_scaling.scaler import NoScaling, Scaler, Static

none = NoScaling
__all__ = ["Backoff", "LogMax", "NoScaling", "Scaler", "Static", "none"]
