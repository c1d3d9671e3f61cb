"""The outcome of a run: `summary.json`, written once at the end and on any stop.

The file is strict JSON. JSON has no nan and no inf, and a loss of nan must not look like no loss,
so these are the strings "nan", "inf" and "-inf", and null means "not known".
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

from mpframe.core.errors import MpframeError
from mpframe.files.durable import write_atomically
from mpframe.files.plain_file import read_regular

FILE_NAME = "summary.json"
_LARGEST = 2**20  # bytes


class Status(StrEnum):
    """Why a run stopped."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"
    PRUNED = "pruned"  # by a search, because others were better at this point
    FAILED = "failed"


@dataclass(kw_only=True)
class Summary:
    """The outcome of a run. None: the run never measured it."""

    status: Status
    steps: int  # optimizer steps that moved the weights
    skipped_steps: int  # Their gradients were not finite. They are not among `steps`.
    epochs: int  # whole passes over the training data
    train_loss: float | None = None  # unscaled mean loss of the last logged step
    val_loss: float | None = None  # mean loss of the last validation
    monitor: str | None = None  # what shows progress: the name of a metric, or `loss`
    metric: str | None = None  # the monitored metric, e.g. `accuracy`, or else the first one
    val_metric: float | None = None  # its value at the last validation, `val_<metric>` in the file
    best: float | None = None  # the monitored metric's best value, None if it has no direction
    best_step: int | None = None  # `global_step` of its validation, skipped steps counted
    other_metrics: dict[str, float] = field(default_factory=dict)  # `val_<name>` in the file
    test_loss: float | None = None  # mean loss of the test samples, measured once at the end
    test_metrics: dict[str, float] = field(default_factory=dict)  # `test_<name>` in the file
    tested: str | None = None  # whose weights: `best`, of the best kept checkpoint, or `last`
    seconds: float  # wall time of the run, validation and test included, over all its starts
    samples: int | None = None  # training samples in the steps tried, over all starts
    train_seconds: float | None = None  # what these took, without validating and saving
    samples_per_second: float | None = None  # `samples` over `train_seconds`
    median_step_seconds: float | None = None  # over the steps tried
    peak_memory_bytes: int | None = None  # the most memory in use at once
    dtype: str  # `fp32`, `mixed` or `amp`
    half: str | None = None  # its 16-bit format, None for `fp32`
    loss_scaling: str  # name of the scaling
    final_scale: float | dict[str, float] | None = None  # the last scale, or one for each loss
    seed: int
    device: str
    torch: str
    reason: str | None = None  # if not finished, mostly skipped, or ended by a callback

    @property
    def monitored(self) -> float | None:
        """The monitored value at the last validation."""
        return self.val_loss if self.monitor == "loss" else self.val_metric

    @property
    def searched(self) -> float | None:
        """The monitored value of the weights that were tested, for a search."""
        return self.best if self.tested == "best" else self.monitored

    @property
    def test_metric(self) -> float | None:
        return self.test_metrics.get(self.metric or "")

    def write(self, folder: Path) -> None:
        """Write `summary.json` into `folder`. After a crash it is the old or the new one, whole."""
        entries = asdict(self)
        name, value = entries.pop("metric"), entries.pop("val_metric")
        measured = ({} if name is None else {name: value}) | entries.pop("other_metrics")
        for prefix, metrics in (("val_", measured), ("test_", entries.pop("test_metrics"))):
            entries |= {f"{prefix}{name}": value for name, value in metrics.items()}
        write_atomically(folder / FILE_NAME, strict_json(entries))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the `summary.json` of `folder`. OSError, or MpframeError if it is damaged."""
        path = folder / FILE_NAME
        content = read_regular(path, _LARGEST)
        try:
            entries: dict[str, Any] = _numbers_in(json.loads(content))
            metrics, tested = _take_metrics(entries, "val_"), _take_metrics(entries, "test_")
            if metrics:
                entries["metric"] = name = next(iter(metrics))  # `write` puts it first.
                entries["val_metric"] = metrics.pop(name)
            entries.update(other_metrics=metrics, test_metrics=tested)
            entries["status"] = Status(entries["status"])
            hints = get_type_hints(cls)
            for name, value in entries.items():
                if name in hints and not _is_of(value, hints[name]):
                    raise ValueError(f"{name} is {value!r:.40}")
            return cls(**entries)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            what = f"{path}: not a run's summary ({said:.120})"
            raise MpframeError(f"{what}: delete the file or run the job again") from error


def strict_json(entries: Mapping[str, Any], indent: int | None = 2) -> str:
    """Return a JSON object, by default one entry a line. Inf and nan become words."""
    return json.dumps(_in_words(entries), indent=indent) + "\n"


def _in_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_words(held) for key, held in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers_in(value: Any) -> Any:
    """Return what `_in_words` was given."""
    if isinstance(value, dict):
        return {key: _numbers_in(held) for key, held in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def _take_metrics(entries: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take the metrics of a split out of the entries, and return them by name."""
    keys = [key for key in entries if key.startswith(prefix) and key != f"{prefix}loss"]
    return {key.removeprefix(prefix): entries.pop(key) for key in keys}


def _is_of(value: Any, hint: Any) -> bool:
    if hint is float:
        return type(value) is float or (type(value) is int and abs(value) < 2**63)
    if hint is int:
        return type(value) is int and 0 <= value < 2**63
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_is_of(held, float) for held in value.values())
    if get_args(hint):
        return any(_is_of(value, one) for one in get_args(hint))
    return isinstance(value, hint)
