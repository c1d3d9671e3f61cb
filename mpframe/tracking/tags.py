"""The tags of a run and their meanings: one table, for TensorBoard's cards and for the docs.

Words in capitals stand for a name: `metric/NAME/val` is the tag of every metric.

    NAME    a metric, a parameter, or one of several optimizers or losses
    SPLIT   `validation` or `test`
    LAYER   a module of the model, by its qualified name
    KIND    the numbers of a layer that are counted: one of `KINDS`

Losses and gradients are unscaled. A tag of a user's own callback needs no line here.
"""

import re
from enum import StrEnum
from functools import cache

KINDS = {
    "weights": "the weights, as stored",
    "activations": "the layer's outputs, as computed",
    "activation_gradients": "dL/d(output) at the loss scale",
    "gradients": "dL/dw at the loss scale",
    "updates": "what the step added to the master weights",
}

# A tag, its unit or `none`, and its meaning: a sentence without a full stop.
_TABLE = """
loss/train | loss | the mean loss of the step's samples
loss/val | loss | the mean loss of all validation samples
loss/test | loss | the mean loss of all test samples, once, when the run is finished
optim/lr | none | the learning rate of the next step, in the first parameter group
grad/norm | loss / parameter | the 2-norm of all gradients together, unscaled and before clipping
grad/amax | loss / parameter | the largest absolute value of all gradients, unscaled and before
    clipping; inf or nan if the step overflowed
loss_scale/scale | none | the number that the loss of the step was multiplied by
loss_scale/log2_scale | octaves | log2 of the loss scale of the step; one more is twice the scale
loss_scale/skipped_total | steps | the steps skipped so far, because a gradient was inf or nan
loss_scale/log2_mean | octaves | the mean of log2 of the largest gradient, as LogMax estimates it
loss_scale/log2_std | octaves | the standard deviation of log2 of the largest gradient, by LogMax
speed/samples_per_second | samples / s | training samples over training time, since the last point
speed/input_fraction | fraction | the share of the training time since the last point in which the
    trainer waited for its next batch
speed/flops_per_second | operations / s | the floating-point operations of the steps since the last
    point, forward and backward, over their training time, on the first rank
speed/utilization | fraction | these operations over the most that the device can do in the format
    of its products
speed/tokens_per_second | tokens / s | tokens of all ranks over training time, since the last point
grad/group/NAME | loss / parameter | the 2-norm of the gradients of NAME, unscaled, after clipping
SPLIT/confusion_matrix | share of the true class | a row for each true class, a column for each
    predicted one
SPLIT/predictions | none | the first pictures, with what the model takes them for
memory/peak_bytes | bytes | the most memory in use at once so far: what torch allocated on a CUDA
    device, elsewhere the whole process
text/about | none | the run in three lines
text/config | none | every option that the run was given
text/dtype_map | none | what every module stores and computes in, and why
text/environment | none | versions, hardware, commit and command line
text/profile | none | the largest costs of a few steps, by module and format
find/lr | loss | the training loss over the learning rate, and the rate that it suggests
larc/rate/NAME | none | the learning rate of the parameter NAME, times the factor that LARC gives it
metric/NAME/val | its own | the metric NAME over all validation samples
metric/NAME/test | its own | the metric NAME over all test samples, when the run is finished
numerics/KIND/headroom_bits/LAYER | bits | from the largest value up to the largest number of the
    half format; below 0 it is inf there
numerics/KIND/lost_fraction/LAYER | fraction | the share of all values that are not zero and round
    to zero in the half format
numerics/KIND/lost_fraction_at_twice_scale/LAYER | fraction | the share of all values that would
    round to zero if the scale were twice as large
numerics/KIND/lost_fraction_at_half_scale/LAYER | fraction | the share of all values that would
    round to zero if the scale were half as large
numerics/KIND/subnormal_fraction/LAYER | fraction | the share of all values that are not lost, but
    below the smallest normal number of the half format, and so keep fewer bits
numerics/KIND/zero_fraction/LAYER | fraction | the share of all values that are exactly zero, by a
    ReLU or because they were lost before they could be counted
numerics/KIND/over_count/LAYER | values | how many values are finite and above the largest number of
    the half format
numerics/KIND/rounded_away_fraction/LAYER | fraction | the share of the weights that the step moves
    that a half weight without a master would have kept as they were
numerics/KIND/layers_by_exponent | share of values | a row for each layer, a column for each power
    of two; the colour is the share of the layer's values, the lines are the half format's limits
numerics/KIND/exponents/LAYER | values | how many values have each exponent floor(log2 |x|)
numerics/products/snr_db/LAYER | decibels | of one operand of its products: 10 log10 of the signal
    over the noise that quantising adds
numerics/products/saturated/LAYER | fraction | the share of an operand's values beyond the product
    format's largest number at their scale
numerics/products/lost/LAYER | fraction | the share of an operand's values that are not zero and
    become zero in the product format
numerics/products/scale_spread/LAYER | octaves | from the smallest to the largest scale within an
    operand, 0 if it has at most one
numerics/products/signal_to_noise | decibels | a row for each operand of each layer's products, as
    of the last report
"""


_ROWS = (row.split(" | ") for row in _TABLE.replace("\n    ", " ").strip().split("\n"))
MEANINGS = {tag: (unit, text) for tag, unit, text in _ROWS}


class Tag(StrEnum):
    """Every tag without a name in it."""

    LOSS_TRAIN = "loss/train"
    LOSS_VAL = "loss/val"
    LOSS_TEST = "loss/test"
    LR = "optim/lr"
    GRAD_NORM = "grad/norm"
    GRAD_AMAX = "grad/amax"
    SCALE = "loss_scale/scale"
    LOG2_SCALE = "loss_scale/log2_scale"
    SKIPPED_TOTAL = "loss_scale/skipped_total"
    LOG2_MEAN = "loss_scale/log2_mean"
    LOG2_STD = "loss_scale/log2_std"
    SAMPLES_PER_SECOND = "speed/samples_per_second"
    INPUT_FRACTION = "speed/input_fraction"
    PEAK_BYTES = "memory/peak_bytes"
    FIND_LR = "find/lr"
    TEXT_ABOUT = "text/about"
    TEXT_CONFIG = "text/config"
    TEXT_DTYPE_MAP = "text/dtype_map"
    TEXT_ENVIRONMENT = "text/environment"
    TEXT_PROFILE = "text/profile"

    def of(self, name: str) -> str:
        """Return the tag of one of several optimizers or losses, or of the only one (no name)."""
        return f"{self}/{name}" if name else str(self)


def metric_tag(name: str, split: str = "val") -> str:
    """Return the tag of a metric of the validation or of the test, e.g. `metric/accuracy/val`."""
    return f"metric/{name}/{split}"


def describe_tag(tag: str) -> str | None:
    """Return what TensorBoard says beside a chart, as Markdown, if the table has its tag."""
    for known, (unit, text) in MEANINGS.items():
        if found := _expression(known).fullmatch(tag):
            names = found.groupdict()
            text = text.replace("NAME", f"`{names.get('NAME')}`")
            counted = f" Counted: {KINDS[names['KIND']]}." if "KIND" in names else ""
            return f"{text} (unit: {unit}).{counted}"
    return None


@cache
def _expression(known: str) -> re.Pattern[str]:
    text = f"{known}(/.+)?" if known in list(Tag) else known  # `Tag.of` adds a name.
    for word, names in {"KIND": "|".join(KINDS), "NAME": ".+", "LAYER": ".+"}.items():
        text = text.replace(word, f"(?P<{word}>{names})")
    return re.compile(text.replace("SPLIT", "(validation|test)"))
