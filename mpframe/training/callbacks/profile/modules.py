"""Marks in a trace which module runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.profiler import record_function

MARK = "module: "
"""What the name of a mark begins with; the module's qualified name follows, empty for the model."""


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """Within the block each forward pass of a module of the model is a range in the trace.

    There are no hooks on the backward pass: they would change the graph. trace.py finds the module
    of a backward op by the forward op that it belongs to.
    """
    handles: list[Any] = []
    for name, module in model.named_modules():
        enter, leave = _hooks(MARK + name)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The hooks of one module, which may be called again before it is left."""
    ranges: list[record_function] = []

    def enter(*arguments: object) -> None:
        ranges.append(record_function(name))
        ranges[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(*arguments: object) -> None:
        if ranges:  # A module that was entered before the hooks came has none.
            ranges.pop().__exit__(None, None, None)

    return enter, leave
