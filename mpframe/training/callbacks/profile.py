"""Where the time of a step goes: `callbacks.profile.enabled=true`.

`Profile` records a few steps with torch.profiler and then removes its hooks. Marks in the trace
name the module of a forward pass. Each op of the trace gets its module, its format and its time,
and the largest costs become a table. docs/memory_and_speed.md says how costs are attributed.
"""

import gzip
import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import profile, record_function, schedule

from mpframe.core.callback import Batch, Callback
from mpframe.files.text import align
from mpframe.tracking.tags import Tag
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

MARK = "module: "  # before the module's qualified name, which is empty for the model


@contextmanager
def mark_modules(model: nn.Module) -> Iterator[None]:
    """Make each forward pass of a module of the model a range in the trace, within the block."""
    names = {module: name for name, module in model.named_modules()}
    ranges: list[record_function] = []

    def enter(module: nn.Module, *arguments: object) -> None:
        ranges.append(record_function(MARK + names[module]))
        ranges[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(*arguments: object) -> None:
        if ranges:  # A module that was entered before the hooks came has none.
            ranges.pop().__exit__(None, None, None)

    with ExitStack() as stack:  # Hooks on the backward pass would change the graph.
        for module in names:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


MODEL, OPTIMIZER, OUTSIDE = "(the model itself)", "(optimizer)", "(outside of modules)"
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
_LARGEST = 5  # The table has so many costs one by one.


@dataclass(frozen=True)
class Op:
    """One op of a trace."""

    name: str  # as PyTorch calls it, e.g. `aten::linear`
    module: str  # the qualified name of its module, or one of the words in brackets above
    format: str  # e.g. `float16`, for a cast `float32 to float16`, or `no float`
    backward: bool  # whether it belongs to the backward pass
    milliseconds: float


class _Range:
    """An event with the events within it."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        self.name, self.category = str(event["name"]), event["cat"]
        self.duration, self.end = float(event["dur"]), float(event["ts"] + event["dur"])
        self.arguments: Mapping[str, Any] = event.get("args", {})
        self.children: list[_Range] = []

    @property
    def is_op(self) -> bool:
        """Whether its time counts: not for ranges, nor for autograd's wrappers of ops."""
        known = self.category == "cpu_op" and "::" in self.name
        return known and not self.name.startswith(("autograd::", "torch::autograd::"))

    def all(self) -> Iterator["_Range"]:
        yield self
        for child in self.children:
            yield from child.all()

    def module(self, around: str) -> str:
        """Return the module that a mark names, else the one around it."""
        if self.category == "user_annotation":
            if self.name.startswith(MARK):
                return self.name.removeprefix(MARK) or MODEL
            if self.name.startswith("Optimizer.step#"):
                return OPTIMIZER
        return around

    def formats(self) -> list[str]:
        types = self.arguments.get("Input type", ())
        return [_FORMATS.get(name, name) for name in types if name in _FORMATS or "Float8" in name]


def read_ops(path: Path) -> list[Op]:
    """Return all ops of a compressed chrome trace, recorded with `record_shapes`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    roots = _nest(event for event in events if event.get("cat") in ("cpu_op", "user_annotation"))
    kernels: dict[int, float] = defaultdict(float)  # microseconds, by the op that started them
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            kernels[event.get("args", {}).get("External id", -1)] += event["dur"]
    modules: dict[int, str] = {}
    return [op for root in roots for op in _ops(root, OUTSIDE, False, modules, kernels)]


def _nest(events: Iterable[Mapping[str, Any]]) -> list[_Range]:
    """Return the outermost ranges of every thread, each with its children."""
    roots: list[_Range] = []
    open_of_thread: dict[Any, list[_Range]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        inner, around = _Range(event), open_of_thread[event["tid"]]
        while around and around[-1].end <= event["ts"]:
            around.pop()
        (around[-1].children if around else roots).append(inner)
        around.append(inner)
    return roots


def _ops(
    node: _Range, module: str, backward: bool, modules: dict[int, str], kernels: Mapping[int, float]
) -> Iterator[Op]:
    """Yield the ops of a range, and note in `modules` each forward sequence number's module."""
    module = node.module(module)
    if node.name.startswith(_NODE):
        backward, number = True, node.arguments.get("Sequence number", -1)
        module = modules.get(number, OUTSIDE)
    if not backward:  # If several ops have one number, the last made the node.
        given = [op.arguments for op in (node.all() if node.is_op else [node])]
        modules |= {a["Sequence number"]: module for a in given if "Sequence number" in a}
    if node.is_op:
        time = node.duration
        if kernels:
            ids = (inner.arguments.get("External id", -2) for inner in node.all())
            time = sum(kernels.get(number, 0.0) for number in ids)
        yield Op(node.name, module, _format_of(node), backward, time / 1e3)
        return
    for child in node.children:
        yield from _ops(child, module, backward, modules, kernels)


def _format_of(op: _Range) -> str:
    if op.name in _CASTS:
        copies = [inner.formats() for inner in op.all() if inner.name == "aten::copy_"]
        for to, source in (pair for pair in copies if len(pair) == 2):
            if source != to:
                return f"{source} to {to}"
    known = (form for inner in op.all() for form in inner.formats())
    return next(known, "no float")


def describe_costs(ops: Iterable[Op], steps: int) -> str:
    """Return a table of the five largest costs by module and format, and each format's share.

    `ops` are all ops of `steps` steps. A format below 0.05 % is left out.
    """
    costs: dict[tuple[str, str], float] = defaultdict(float)
    behind: dict[tuple[str, str], float] = defaultdict(float)
    formats: dict[str, float] = defaultdict(float)
    for op in ops:
        costs[op.module, op.format] += op.milliseconds
        behind[op.module, op.format] += op.milliseconds * op.backward
        formats[op.format] += op.milliseconds
    whole = sum(costs.values()) or 1.0  # On a device an op may have started nothing.

    def row(module: str, form: str, keys: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        time, backward = (sum(of[key] for key in keys) for of in (costs, behind))
        share = f"{backward / time:.0%}" if time else ""
        return module, form, f"{time / steps:.3f}", f"{time / whole:.1%}", share

    ranked = sorted(costs, key=lambda key: -costs[key])
    head = ("module", "format", "ms a step", "share", "backward")
    rows = [head, *(row(*key, [key]) for key in ranked[:_LARGEST])]
    if rest := ranked[_LARGEST:]:
        rows.append(row(f"({len(rest)} smaller)", "", rest))
    by_format = sorted(formats.items(), key=lambda item: -item[1])
    words = [f"{form} {time / whole:.1%}" for form, time in by_format if time / whole >= 0.0005]
    casts = sum(time for form, time in formats.items() if " to " in form)
    table = align(rows, right=(2, 3, 4))
    return f"{table}\nby format: {', '.join(words)}; casts {casts / whole:.1%}"


_BEFORE, _WARM_UP, _RECORDED = 5, 1, 3  # steps


class Profile(Callback):
    """Records three steps with torch.profiler, from the seventh step of this start of the run on.

    The trace goes into the run's folder, the largest costs into the log and TensorBoard's text. A
    validation in between ends the recording. A compiled model counts as one module.
    """

    def __init__(self) -> None:
        self._profiler: profile | None = None
        self._around = ExitStack()

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._context = context
        self._first = trainer.progress.global_step + _BEFORE + _WARM_UP + 1  # to be recorded

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        """Begin the warm-up or, if a validation has ended it, record at once."""
        step = trainer.progress.global_step + 1
        if self._profiler is None and self._first - _WARM_UP <= step <= self._first:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # It reports each start on stderr.
            if not trainer.plan.compile:
                self._around.enter_context(mark_modules(trainer.model))
            self._profiler = profile(
                schedule=schedule(wait=0, warmup=_WARM_UP, active=_RECORDED + 1, repeat=1),
                record_shapes=True,
                acc_events=True,  # There is one cycle, and torch 2.11 warns that it drops others.
            )
            self._profiler.start()
            if step == self._first:
                self._profiler.step()

    def on_prediction_step(self, trainer: Trainer) -> None:
        """End before the validation of a step, which is not part of the step's costs."""
        self._end(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        if self._profiler is None:
            return
        trainer.read_verdicts()  # The work that the device has left belongs to this step.
        if trainer.progress.global_step == self._first + _RECORDED - 1:
            self._end(trainer)
        else:
            self._profiler.step()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """End with the run, with a warning if that was too short."""
        self._end(trainer, save=error is None)
        if error is None and trainer.progress.global_step < self._first:
            log.warning(
                "warning: callbacks.profile.enabled=true: the run ended before step %d, where the "
                "profile begins; take more steps",
                self._first,
            )

    def _end(self, trainer: Trainer, save: bool = True) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self._around.close()
        last = trainer.progress.global_step
        if last >= self._first and save:
            try:
                self._save(profiler, last)
            except OSError as error:
                log.warning("warning: the profile cannot be written: %s", error)

    def _save(self, profiler: profile, last: int) -> None:
        path = self._context.folder / "profile" / f"step_{self._first:08d}.pt.trace.json.gz"
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        temporary.unlink(missing_ok=True)  # A link that was placed there is not followed.
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(path)
        ops, steps = read_ops(path), last - self._first + 1
        each = sum(op.milliseconds for op in ops) / steps
        title = f"profile of steps {self._first} to {last}: {each:.3g} ms a step"
        costs = describe_costs(ops, steps)
        log.info("%s\n%s\ntrace: %s", title, costs, path)
        self._context.tracker.text(Tag.TEXT_PROFILE, f"{title}\n\n```\n{costs}\n```")
