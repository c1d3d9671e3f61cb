"""The tags of a run and their meanings: one table, for TensorBoard's cards and for the docs.

Words in capitals stand for a name: `metric/NAME/val` is the tag of every metric.

    NAME    a metric, a parameter, or one of several optimizers or losses
    LAYER   a module of the model, by its qualified name
    KIND    the numbers of a layer that are counted: one of `KINDS`

Losses and gradients are unscaled. A tag of a user's own callback needs no line here.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache


@dataclass(frozen=True)
class Meaning:
    """The meaning of a tag: a title, a sentence without a full stop, and a unit, or `none`."""

    title: str
    text: str
    unit: str

    @property
    def markdown(self) -> str:
        """The text that TensorBoard shows beside a chart."""
        return f"**{self.title}** (unit: {self.unit}): {self.text}."


KINDS = {
    "weights": "the weights, as stored",
    "activations": "the layer's outputs, as computed",
    "activation_gradients": "dL/d(output) at the loss scale",
    "gradients": "dL/dw at the loss scale",
    "updates": "what the step added to the master weights",
}

# A tag, its title and its unit, and below them what it shows.
_TABLE = """
loss/train | Training loss | loss
    the mean loss of the step's samples
loss/val | Validation loss | loss
    the mean loss of all validation samples
loss/test | Test loss | loss
    the mean loss of all test samples, once, when the run is finished
optim/lr | Learning rate | none
    the learning rate of the next step, in the first parameter group
grad/norm | Gradient norm | loss / parameter
    the 2-norm of all gradients together, unscaled and before clipping
grad/amax | Largest gradient | loss / parameter
    the largest absolute value of all gradients, unscaled and before clipping; inf or nan if the
    step overflowed
loss_scale/scale | Loss scale | none
    the number that the loss of the step was multiplied by
loss_scale/log2_scale | Loss scale, log2 | octaves
    log2 of the loss scale of the step; one more is twice the scale
loss_scale/skipped_total | Skipped steps | steps
    the steps skipped since the run began, because a gradient was inf or nan
loss_scale/log2_mean | LogMax: mean | octaves
    the mean of log2 of the largest gradient, as LogMax estimates it
loss_scale/log2_std | LogMax: standard deviation | octaves
    the standard deviation of log2 of the largest gradient, as LogMax estimates it
speed/samples_per_second | Speed, lately | samples / s
    training samples over training time, of the steps since the last point
speed/input_fraction | Waiting for batches | fraction
    the share of the training time in which the trainer waited for its next batch, of the steps
    since the last point
speed/flops_per_second | Operations per second | operations / s
    the floating-point operations of a step, forward and backward, over the training time of the
    steps since the last point, on the first rank
speed/utilization | Utilisation | fraction
    these operations over the most that the device can do in the format of its products
speed/tokens_per_second | Tokens per second | tokens / s
    tokens of all ranks over training time, of the steps since the last point
grad/group/NAME | Gradient norm of NAME | loss / parameter
    the 2-norm of the gradients of NAME, unscaled, after clipping
validation/confusion_matrix | Confusion matrix, validation | share of the true class
    a row for each true class, a column for each predicted one
test/confusion_matrix | Confusion matrix, test | share of the true class
    a row for each true class, a column for each predicted one
validation/predictions | Predictions, validation | none
    the first pictures of the validation, with what the model takes them for
test/predictions | Predictions, test | none
    the first pictures of the test, with what the model takes them for
memory/peak_bytes | Memory | bytes
    the most memory in use at once so far: what torch allocated on a CUDA device, elsewhere the
    whole process
text/about | The run | none
    the run in three lines
text/config | Options | none
    every option that the run was given
text/dtype_map | Dtype map | none
    what every module stores and computes in, and why
text/environment | Environment | none
    versions, hardware, commit and command line
text/profile | Profile | none
    the largest costs of a few steps, by module and format
find/lr | Range test | loss
    the training loss over the learning rate, and the rate that it suggests
larc/rate/NAME | Rate of NAME | none
    the learning rate of the parameter NAME, times the factor that LARC gives it
metric/NAME/val | Validation NAME | its own
    the metric NAME over all validation samples
metric/NAME/test | Test NAME | its own
    the metric NAME over all test samples, when the run is finished
numerics/KIND/headroom_bits/LAYER | Headroom of LAYER | bits
    from the largest value up to the largest number of the half format; below 0 it is inf there.
    Counted: KIND
numerics/KIND/lost_fraction/LAYER | Lost in LAYER | fraction
    the share of all values that are not zero and round to zero in the half format. Counted: KIND
numerics/KIND/lost_fraction_at_twice_scale/LAYER | Lost in LAYER at twice the scale | fraction
    the share of all values that would round to zero if the scale were twice as large. Counted:
    KIND
numerics/KIND/lost_fraction_at_half_scale/LAYER | Lost in LAYER at half the scale | fraction
    the share of all values that would round to zero if the scale were half as large. Counted:
    KIND
numerics/KIND/subnormal_fraction/LAYER | Fewer bits in LAYER | fraction
    the share of all values that are not lost, but below the smallest normal number of the half
    format, and so keep fewer bits. Counted: KIND
numerics/KIND/zero_fraction/LAYER | Zeros in LAYER | fraction
    the share of all values that are exactly zero, by a ReLU or because they were lost before they
    could be counted. Counted: KIND
numerics/KIND/over_count/LAYER | Too large in LAYER | values
    how many values are finite and above the largest number of the half format. Counted: KIND
numerics/KIND/rounded_away_fraction/LAYER | Rounded away in LAYER | fraction
    the share of the weights that the step moves that a half weight without a master would have
    kept as they were. Counted: KIND
numerics/KIND/layers_by_exponent | Ranges of all layers | share of values
    a row for each layer, a column for each power of two; the colour is the share of the layer's
    values, the lines are the limits of the half format. Counted: KIND
numerics/KIND/exponents/LAYER | Exponents of LAYER | values
    how many values have each exponent floor(log2 |x|). Counted: KIND
numerics/products/snr_db/LAYER | Signal to noise of LAYER | decibels
    of one operand of its products: 10 log10 of the signal over the noise that quantising adds
numerics/products/saturated/LAYER | Saturated in LAYER | fraction
    the share of an operand's values beyond the product format's largest number at their scale
numerics/products/lost/LAYER | Quantised away in LAYER | fraction
    the share of an operand's values that are not zero and become zero in the product format
numerics/products/scale_spread/LAYER | Spread of scales in LAYER | octaves
    from the smallest to the largest scale within an operand, 0 if it has at most one
numerics/products/signal_to_noise | Signal to noise of all layers | decibels
    a row for each operand of each layer's products, as of the last report
"""


def _meanings() -> dict[str, Meaning]:
    meanings = {}
    for entry in re.split(r"\n(?=\S)", _TABLE.strip()):
        head, *text = entry.split("\n")
        tag, title, unit = head.split(" | ")
        meanings[tag] = Meaning(title, " ".join(map(str.strip, text)), unit)
    return meanings


_MEANINGS = _meanings()


class Tag(StrEnum):
    """Every tag without a name in it, with its `meaning`."""

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

    @property
    def meaning(self) -> Meaning:
        return _MEANINGS[self]

    def of(self, name: str) -> str:
        """Return the tag of one of several optimizers or losses, or of the only one (no name)."""
        return f"{self}/{name}" if name else str(self)


PATTERNS = {tag: meaning for tag, meaning in _MEANINGS.items() if tag not in list(Tag)}


def metric_tag(name: str, split: str = "val") -> str:
    """Return the tag of a metric of the validation or of the test, e.g. `metric/accuracy/val`."""
    return f"metric/{name}/{split}"


def meaning_of(tag: str) -> Meaning | None:
    """Return what a tag means, its names filled in, if the table has it."""
    for known in Tag:
        if tag == known:
            return known.meaning
        if tag.startswith(f"{known}/"):
            name = tag.removeprefix(f"{known}/")
            return replace(known.meaning, title=f"{known.meaning.title} of `{name}`")
    for pattern, meaning in PATTERNS.items():
        if found := _expression(pattern).fullmatch(tag):
            return _fill(meaning, found.groupdict())
    return None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    text = pattern.replace("KIND", f"(?P<KIND>{'|'.join(KINDS)})")
    return re.compile(text.replace("NAME", "(?P<NAME>.+)").replace("LAYER", "(?P<LAYER>.+)"))


def _fill(meaning: Meaning, names: dict[str, str]) -> Meaning:
    title, text = meaning.title, meaning.text
    for word, name in names.items():
        shown = KINDS[name] if word == "KIND" else f"`{name}`"
        title, text = title.replace(word, shown), text.replace(word, shown)
    return replace(meaning, title=title, text=text)
