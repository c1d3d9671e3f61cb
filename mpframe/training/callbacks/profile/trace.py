"""Reads a trace of torch.profiler: for each op its module, its format and its time.

An op is what is called from outside: `aten::linear`, and not the `aten::addmm` in it. Its time is
that of its kernels if it started any on a device, else the time it took on the CPU.

    module    the innermost marked module around it; of a backward op that of its forward op, which
              has the same sequence number
    format    that of its first floating-point tensor; of a cast both, as `float32 to float16`

What autograd and Python do between two ops is no op, and is not counted.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpframe.training.callbacks.profile.modules import MARK

MODEL, OPTIMIZER, OUTSIDE = "(the model itself)", "(optimizer)", "(outside of modules)"
NO_FORMAT = "no float"
_FORMATS = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::complex<float>": "complex64",
}
_CASTS = {"aten::to", "aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"}
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_NODE = "autograd::engine::evaluate_function"

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Op:
    """One op of a trace.

    Attributes:
        name: as PyTorch calls it, e.g. `aten::linear`.
        module: the qualified name of its module, or one of the words in brackets above.
        format: e.g. `float16`; of a cast `float32 to float16`; `no float` without such a tensor.
        backward: whether it belongs to the backward pass.
        milliseconds: its time.
    """

    name: str
    module: str
    format: str
    backward: bool
    milliseconds: float

    @property
    def is_cast(self) -> bool:
        """Whether it only changes the format."""
        return " to " in self.format


@dataclass
class _Range:
    """An event with those within it."""

    event: Event
    children: list["_Range"] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.event["name"])

    @property
    def end(self) -> float:
        return float(self.event["ts"] + self.event["dur"])

    @property
    def arguments(self) -> Mapping[str, Any]:
        return dict(self.event.get("args", {}))

    @property
    def is_op(self) -> bool:
        """Whether its time counts: ranges, and what autograd wraps around ops, are none."""
        known = self.event["cat"] == "cpu_op" and "::" in self.name
        return known and not self.name.startswith(("autograd::", "torch::autograd::"))

    def all(self) -> Iterator["_Range"]:
        """It and all within it, in the order of their beginnings."""
        yield self
        for child in self.children:
            yield from child.all()


def read_ops(path: Path) -> list[Op]:
    """All ops of a trace.

    Args:
        path: what `export_chrome_trace` wrote, compressed; recorded with `record_shapes`.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    roots = _nested(event for event in events if event.get("cat") in ("cpu_op", "user_annotation"))
    modules: dict[int, str] = {}
    for root in roots:
        _note_forward(root, OUTSIDE, modules)
    kernels = _kernels(events)
    return [op for root in roots for op in _ops(root, OUTSIDE, False, modules, kernels)]


def _nested(events: Iterable[Event]) -> list[_Range]:
    """The outermost ranges of every thread, each with those within it."""
    roots: list[_Range] = []
    open_of_thread: dict[Any, list[_Range]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        own, around = _Range(event), open_of_thread[event["tid"]]
        while around and around[-1].end <= event["ts"]:
            around.pop()
        (around[-1].children if around else roots).append(own)
        around.append(own)
    return roots


def _kernels(events: Iterable[Event]) -> dict[int, float]:
    """Microseconds on a device, by the op that started them."""
    times: dict[int, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            times[event.get("args", {}).get("External id", -1)] += event["dur"]
    return times


def _note_forward(own: _Range, module: str, modules: dict[int, str]) -> None:
    """Note the module of each sequence number; of several ops with one the last made the node."""
    module = _module_of(own, module)
    number = own.arguments.get("Sequence number")
    if number is not None and not own.arguments.get("Fwd thread id"):
        modules[number] = module
    for child in own.children:
        _note_forward(child, module, modules)


def _ops(
    own: _Range,
    module: str,
    backward: bool,
    modules: Mapping[int, str],
    kernels: Mapping[int, float],
) -> Iterator[Op]:
    module = _module_of(own, module)
    if own.name.startswith(_NODE):
        backward, number = True, own.arguments.get("Sequence number", -1)
        module = modules.get(number, OUTSIDE)
    if own.is_op:
        yield Op(own.name, module, _format_of(own), backward, _microseconds(own, kernels) / 1e3)
        return
    for child in own.children:
        yield from _ops(child, module, backward, modules, kernels)


def _module_of(own: _Range, around: str) -> str:
    if own.event["cat"] == "user_annotation":
        if own.name.startswith(MARK):
            return own.name.removeprefix(MARK) or MODEL
        if own.name.startswith("Optimizer.step#"):
            return OPTIMIZER
    return around


def _microseconds(own: _Range, kernels: Mapping[int, float]) -> float:
    if not kernels:
        return float(own.event["dur"])
    return sum(kernels.get(inner.arguments.get("External id", -2), 0.0) for inner in own.all())


def _format_of(own: _Range) -> str:
    formats = [known for inner in own.all() if (known := _formats_in(inner))]
    if own.name in _CASTS:
        copies = [_formats_in(inner) for inner in own.all() if inner.name == "aten::copy_"]
        for to, source in (pair for pair in copies if len(pair) == 2):
            if source != to:
                return f"{source} to {to}"
    return formats[0][0] if formats else NO_FORMAT


def _formats_in(own: _Range) -> Sequence[str]:
    """The formats of its floating-point tensors."""
    types = own.arguments.get("Input type", ())
    return [_FORMATS.get(own, own) for own in types if own in _FORMATS or "Float8" in own]
