"""`Precision`: one value that makes a model and its optimizer run in a dtype mode.

    precision = Precision("mixed", half="float16")
    model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters()))
    with precision.cast():
        loss = loss_fn(model(inputs), targets)

`prepare` stores the weights as the mode says and puts fp32 masters in the optimizer; `cast` runs
the ops of its block by the lists. The deciding is in policy.py, the casting in cast.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.errors import ConfigError
from mpframe.precision.cast import CASTABLE, CastMode
from mpframe.precision.dtype_map import Row, dtype_map, storage_of
from mpframe.precision.master_weights import MasterWeights
from mpframe.precision.op_lists import OpLists
from mpframe.precision.policy import Policy
from mpframe.precision.tree import map_tensors


class Precision:
    """A dtype mode, applied.

    Args:
        mode: `fp32`, `mixed` (half weights, fp32 masters) or `amp` (fp32 weights, ops cast).
        half: `float16` or `bfloat16`.
        ops: the op lists and module pins; the shipped default lists where None.
        compute: half on a CPU: `native`, `emulated`, or `auto` (native where the CPU can).
        master_weights: False leaves the masters out, to study what they are for.

    Raises:
        ConfigError: a value is not one of those named here.
    """

    def __init__(
        self,
        mode: str = "fp32",
        half: str = "float16",
        *,
        ops: OpLists | None = None,
        compute: str = "auto",
        master_weights: bool = True,
    ) -> None:
        self.policy = Policy(mode, half, OpLists.named() if ops is None else ops, compute)
        self.master_weights = master_weights
        self._mode: CastMode | None = None
        self._device = torch.device("cpu")

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, MasterWeights]:
        """Store the weights as the mode says and wrap the optimizer; both are changed in place.

        Args:
            model: on its device, in fp32, before the first step.
            optimizer: over the model's parameters.

        Returns:
            The same model, and the wrapped optimizer with masters from before the rounding.

        Raises:
            ConfigError: a parameter is complex, or a pin names no module.
        """
        _refuse_complex(model)
        self._refuse_idle_pins(model)
        masters = self._store(model)
        self._device = next((p.device for p in model.parameters()), self._device)
        self._mode = CastMode(self.policy, self._device)
        self._pin_modules(model)
        if self.policy.mode == "mixed" and self.policy.ops.empty:
            model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        return model, MasterWeights(optimizer, masters, keep_masters=self.master_weights)

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Run the ops of the block by the lists; one weight is cast at most once in it."""
        if not self.policy.casts:
            yield
            return
        mode = self._mode = self._mode or CastMode(self.policy, self._device)
        try:
            with mode:
                yield
        finally:
            mode.forget_weights()

    def dtype_map(self, model: nn.Module) -> list[Row]:
        """Every module's storage and compute format and what decides them."""
        return dtype_map(model, self.policy)

    def __str__(self) -> str:
        return str(self.policy)

    def _store(self, model: nn.Module) -> dict[Tensor, Tensor]:
        """Round the weights that are to be half; returns their fp32 values from before."""
        formats: dict[nn.Parameter, torch.dtype] = {}
        for name, module in model.named_modules():
            storage = storage_of(name, module, self.policy)
            for parameter in module.parameters(recurse=False):
                # A tied weight takes the widest format that any of its modules wants.
                wide = formats.get(parameter) == torch.float32
                formats[parameter] = torch.float32 if wide else storage
        if self.policy.mode == "mixed" and self.policy.ops.empty:
            _store_buffers(model, self.policy.half_dtype)
        return {p: _restore_as(p, dtype) for p, dtype in formats.items() if _differs(p, dtype)}

    def _pin_modules(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            pin = self.policy.pin_of(name) if self.policy.mode != "fp32" else None
            if pin is not None:
                _pin(self, module, pin[1])

    def _refuse_idle_pins(self, model: nn.Module) -> None:
        names = [name for name, _ in model.named_modules() if name]
        for pattern in self.policy.ops.modules:
            only = Policy(ops=OpLists(modules={pattern: "fp32"}))
            if not any(only.pin_of(name) for name in names):
                known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                raise ConfigError(
                    f"ops.modules[{pattern!r}] matches no module; the model has {known}"
                )

    def _cast_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        half = self.policy.half_dtype
        return map_tensors(lambda t: _castable_to(t, half), (args, kwargs))  # type: ignore[no-any-return]


def _pin(precision: Precision, module: nn.Module, pin: str) -> None:
    """Hooks that run `module`, inputs and ops, in the pinned format while a cast is active."""
    outer: list[str | None] = []
    dtype = torch.float32 if pin == "fp32" else precision.policy.half_dtype

    def enter(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        mode = precision._mode
        assert mode is not None
        outer.append(mode.pin)
        mode.pin = pin
        return map_tensors(lambda t: _castable_to(t, dtype), (args, kwargs))  # type: ignore[no-any-return]

    def leave(_: nn.Module, args: Any, result: Any) -> None:
        assert precision._mode is not None
        precision._mode.pin = outer.pop()

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def _castable_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype in CASTABLE else tensor


def _differs(parameter: Tensor, dtype: torch.dtype) -> bool:
    return parameter.dtype in CASTABLE and parameter.dtype != dtype


def _restore_as(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Store a parameter in another format, saturated; returns its fp32 values from before."""
    before = parameter.detach().float().clone()
    limit = torch.finfo(dtype).max
    parameter.data = before.clamp(-limit, limit).to(dtype)
    return before


def _store_buffers(model: nn.Module, half: torch.dtype) -> None:
    for buffer in model.buffers():
        if buffer.dtype in CASTABLE:
            buffer.data = buffer.data.to(half)


def _refuse_complex(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"model: parameter {name!r} is {parameter.dtype}; formats of real numbers are cast "
                "and mastered here: store it as two real parameters"
            )
