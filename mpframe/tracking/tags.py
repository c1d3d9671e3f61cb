"""The tags of a run and what each means: one table, for TensorBoard's cards and for the docs.

Words in capitals stand for a name: `metric/NAME/val` is the tag of every metric.

    NAME    a metric, a parameter, or one of several optimizers or losses
    LAYER   a module of the model, by its qualified name
    KIND    the numbers of a layer that are counted: one of `KINDS`

Losses and gradients are unscaled: the loss scale is nowhere in them. A tag of a user's own callback
needs no line here.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Self


@dataclass(frozen=True)
class Meaning:
    """What a tag shows.

    Attributes:
        title: a few words, as over a chart.
        text: one sentence without a full stop.
        unit: of its values; `none` of a factor and of a text.
    """

    title: str
    text: str
    unit: str

    @property
    def markdown(self) -> str:
        """As TensorBoard shows it beside a chart."""
        return f"**{self.title}** (unit: {self.unit}): {self.text}."


class Tag(StrEnum):
    """Every tag without a name in it, with its `meaning`."""

    meaning: Meaning

    def __new__(cls, tag: str, title: str, text: str, unit: str) -> Self:
        member = str.__new__(cls, tag)
        member._value_ = tag
        member.meaning = Meaning(title, text, unit)
        return member

    def of(self, name: str) -> str:
        """The tag of one of several optimizers or losses; of the only one (no name) itself."""
        return f"{self}/{name}" if name else str(self)

    LOSS_TRAIN = "loss/train", "Training loss", "the mean loss of the step's samples", "loss"
    LOSS_VAL = "loss/val", "Validation loss", "the mean loss of all validation samples", "loss"
    LOSS_TEST = (
        "loss/test",
        "Test loss",
        "the mean loss of all test samples, once, when the run is finished",
        "loss",
    )
    LR = (
        "optim/lr",
        "Learning rate",
        "the learning rate of the step, in the first parameter group",
        "none",
    )
    GRAD_NORM = (
        "grad/norm",
        "Gradient norm",
        "the 2-norm of all gradients together, unscaled and before clipping",
        "loss / parameter",
    )
    GRAD_AMAX = (
        "grad/amax",
        "Largest gradient",
        "the largest absolute value of all gradients, unscaled and before clipping; inf or nan if "
        "the step overflowed",
        "loss / parameter",
    )
    SCALE = (
        "loss_scale/scale",
        "Loss scale",
        "the number that the loss of the step was multiplied by",
        "none",
    )
    LOG2_SCALE = (
        "loss_scale/log2_scale",
        "Loss scale, log2",
        "log2 of the loss scale of the step; one more is twice the scale",
        "octaves",
    )
    SKIPPED_TOTAL = (
        "loss_scale/skipped_total",
        "Skipped steps",
        "the steps skipped since the run began, because a gradient was inf or nan",
        "steps",
    )
    LOG2_MEAN = (
        "loss_scale/log2_mean",
        "LogMax: mean",
        "the mean of log2 of the largest gradient, as LogMax estimates it",
        "octaves",
    )
    LOG2_STD = (
        "loss_scale/log2_std",
        "LogMax: standard deviation",
        "the standard deviation of log2 of the largest gradient, as LogMax estimates it",
        "octaves",
    )
    SAMPLES_PER_SECOND = (
        "speed/samples_per_second",
        "Speed, lately",
        "training samples over training time, of the steps since the last point",
        "samples / s",
    )
    INPUT_FRACTION = (
        "speed/input_fraction",
        "Waiting for batches",
        "the share of the training time in which the trainer waited for its next batch, of the "
        "steps since the last point",
        "fraction",
    )
    PEAK_BYTES = (
        "memory/peak_bytes",
        "Memory",
        "the most memory in use at once so far: what torch allocated on a CUDA device, elsewhere "
        "the whole process",
        "bytes",
    )
    TEXT_ABOUT = "text/about", "The run", "the run in three lines", "none"
    TEXT_CONFIG = "text/config", "Options", "every option that the run was given", "none"
    TEXT_DTYPE_MAP = (
        "text/dtype_map",
        "Dtype map",
        "what every module stores and computes in, and why",
        "none",
    )
    TEXT_ENVIRONMENT = (
        "text/environment",
        "Environment",
        "versions, hardware, commit and command line",
        "none",
    )
    TEXT_PROFILE = (
        "text/profile",
        "Profile",
        "the largest costs of a few steps, by module and format",
        "none",
    )


KINDS = {
    "weights": "the weights, as stored",
    "activations": "the layer's outputs, as computed",
    "activation_gradients": "dL/d(output) at the loss scale",
    "gradients": "dL/dw at the loss scale",
    "updates": "what the step added to the master weights",
}

_RANGES = "numerics/KIND"
PATTERNS = {
    "larc/rate/NAME": Meaning(
        "Rate of NAME",
        "the learning rate of the parameter NAME, times the factor that LARC gives it",
        "none",
    ),
    "metric/NAME/val": Meaning(
        "Validation NAME", "the metric NAME over all validation samples", "its own"
    ),
    "metric/NAME/test": Meaning(
        "Test NAME", "the metric NAME over all test samples, when the run is finished", "its own"
    ),
    f"{_RANGES}/headroom_bits/LAYER": Meaning(
        "Headroom of LAYER",
        "from the largest value up to the largest number of the half format; below 0 it is inf "
        "there. Counted: KIND",
        "bits",
    ),
    f"{_RANGES}/lost_fraction/LAYER": Meaning(
        "Lost in LAYER",
        "the share of all values that are not zero and round to zero in the half format. "
        "Counted: KIND",
        "fraction",
    ),
    f"{_RANGES}/lost_fraction_at_twice_scale/LAYER": Meaning(
        "Lost in LAYER at twice the scale",
        "the share of all values that would round to zero if the scale were twice as large. "
        "Counted: KIND",
        "fraction",
    ),
    f"{_RANGES}/lost_fraction_at_half_scale/LAYER": Meaning(
        "Lost in LAYER at half the scale",
        "the share of all values that would round to zero if the scale were half as large. "
        "Counted: KIND",
        "fraction",
    ),
    f"{_RANGES}/subnormal_fraction/LAYER": Meaning(
        "Fewer bits in LAYER",
        "the share of all values that are not lost, but below the smallest normal number of the "
        "half format, and so keep fewer bits. Counted: KIND",
        "fraction",
    ),
    f"{_RANGES}/zero_fraction/LAYER": Meaning(
        "Zeros in LAYER",
        "the share of all values that are exactly zero, by a ReLU or because they were lost "
        "before they could be counted. Counted: KIND",
        "fraction",
    ),
    f"{_RANGES}/over_count/LAYER": Meaning(
        "Too large in LAYER",
        "how many values are finite and above the largest number of the half format. Counted: KIND",
        "values",
    ),
    f"{_RANGES}/rounded_away_fraction/LAYER": Meaning(
        "Rounded away in LAYER",
        "the share of the weights that the step moves that a half weight without a master would "
        "have kept as they were. Counted: KIND",
        "fraction",
    ),
    f"{_RANGES}/layers_by_exponent": Meaning(
        "Ranges of all layers",
        "a row for each layer, a column for each power of two; the colour is the share of the "
        "layer's values, the lines are the limits of the half format. Counted: KIND",
        "share of values",
    ),
    f"{_RANGES}/exponents_by_step/LAYER": Meaning(
        "Ranges of LAYER over time",
        "a column for each report, a row for each power of two; the colour is the share of the "
        "layer's values, the lines are the limits of the half format. Counted: KIND",
        "share of values",
    ),
    f"{_RANGES}/exponents/LAYER": Meaning(
        "Exponents of LAYER",
        "how many values have each exponent floor(log2 |x|). Counted: KIND",
        "values",
    ),
}


def metric_tag(name: str, split: str = "val") -> str:
    """The tag of a metric of the validation or of the test, e.g. `metric/accuracy/val`."""
    return f"metric/{name}/{split}"


def meaning_of(tag: str) -> Meaning | None:
    """What a tag means, its names filled in; None if the table does not have it."""
    for known in Tag:
        if tag == known:
            return known.meaning
        if tag.startswith(f"{known}/"):
            name = tag.removeprefix(f"{known}/")
            return replace(known.meaning, title=f"{known.meaning.title} of `{name}`")
    for pattern, meaning in PATTERNS.items():
        if found := _expression(pattern).fullmatch(tag):
            return _filled(meaning, found.groupdict())
    return None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    text = pattern.replace("KIND", f"(?P<KIND>{'|'.join(KINDS)})")
    return re.compile(text.replace("NAME", "(?P<NAME>.+)").replace("LAYER", "(?P<LAYER>.+)"))


def _filled(meaning: Meaning, names: dict[str, str]) -> Meaning:
    title, text = meaning.title, meaning.text
    for word, name in names.items():
        shown = KINDS[name] if word == "KIND" else f"`{name}`"
        title, text = title.replace(word, shown), text.replace(word, shown)
    return replace(meaning, title=title, text=text)
