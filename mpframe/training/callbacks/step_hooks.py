"""Callbacks at the gradients right before a step: their base, a penalty, LARC, and their norms.

The weights are then masters, and their gradients fp32, unscaled, checked and clipped.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mpframe.core.callback import Batch, Callback
from mpframe.core.comm import SINGLE_PROCESS, Comm, copies_of, is_sharded, part_for, part_of
from mpframe.core.errors import ConfigError
from mpframe.core.ranges import NOT_NEGATIVE, POSITIVE, require, require_whole
from mpframe.core.step_result import StepResult
from mpframe.training.optimizers.multi_optimizer import parts_of
from mpframe.training.optimizers.selection import Selection, refuse_idle
from mpframe.training.optimizers.whole_weights import gather
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer


class StepHook(Callback):
    """Calls itself before each step of the run's optimizers.

    It may write numbers of a step to TensorBoard, if the step is applied. They wait on the device,
    each with its step, because the verdict may come some steps later.

    Args:
        option: its path in the configuration, for messages.
        without: patterns of the names of weights that it does not change.
        log_every: steps between two points in TensorBoard.
    """

    def __init__(self, option: str, without: Sequence[str] = (), log_every: int = 10) -> None:
        self._option, self._without, self._log_every = option, without, log_every
        self.names: dict[Tensor, str] = {}  # of all weights, by the tensors that are stepped
        self.left_out: set[Tensor] = set()  # tensors that it does not change
        self.comm: Comm = SINGLE_PROCESS
        self.places: dict[Tensor, Tensor] = {}  # the model's parameters, by stepped tensors
        self._handles: list[RemovableHandle] = []
        self._due = 0  # the present step if its numbers are written, else 0
        self._noted: dict[int, dict[str, Tensor]] = {}  # by step, until its verdict is known

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Change the gradients that an optimizer is about to step with."""
        chosen = [
            (weight, group["lr"])
            for group in optimizer.param_groups
            for weight in group["params"]
            if weight.grad is not None and weight not in self.left_out
        ]
        self.measure([weight for weight, _ in chosen])
        for weight, lr in chosen:
            self.change(weight, lr)

    def measure(self, weights: Sequence[Any]) -> None:
        """Measure all weights with a gradient before any is changed. Every rank calls it."""

    def change(self, weight: Any, lr: Tensor | float) -> None:
        """Change one weight's gradient, without a graph. Both are parts if ranks divide weights."""

    def note(self, tag: str, value: Tensor) -> None:
        """Keep a number (0-d) of this step, which is due."""
        self._noted.setdefault(self._due, {})[tag] = value

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Hook in. ConfigError if the optimizer takes a closure, or a pattern matches nothing."""
        if trainer.optimizer.needs_closure:
            raise ConfigError(
                f"{self._option}: the optimizer makes its gradients within its step, where no hook "
                "reaches them; choose an optimizer without a closure"
            )
        self._context = context
        self.comm, named = trainer.comm, dict(trainer.model.named_parameters())
        refuse_idle(f"{self._option}.without", "parameter", self._without, list(named))
        for part in parts_of(trainer.optimizer).values():  # A frozen group is in none of them.
            held = {name: p for name, p in named.items() if part.holds(p)}
            self.names |= {part.optimizer_param(p): name for name, p in held.items()}
            self.places |= {part.optimizer_param(p): p for p in held.values()}
            self._handles.append(part.register_step_pre_hook(self))
        takes = Selection(self._without).takes
        self.left_out = {w for w, name in self.names.items() if takes(name, named[name])}

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        step = trainer.progress.global_step + 1
        self._due = step if step % self._log_every == 0 else 0

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        noted = self._noted.pop(trainer.progress.global_step, {})
        if noted and trainer.comm.is_main and not result.known.skipped:
            self._context.tracker.scalars(trainer.progress.global_step, noted)

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()


class Penalty(StepHook):
    """Adds the gradient of `strength * penalty(weight)` to the gradient of each weight.

    Args:
        penalty: penalty(weight) -> 0-d tensor with a gradient, called with the fp32 master.
        strength: > 0, else ConfigError.
        without: patterns of the names of weights that have no penalty.
    """

    def __init__(
        self, penalty: Callable[[Tensor], Tensor], strength: float, without: Sequence[str] = ()
    ) -> None:
        require("callbacks.penalty.strength", strength, POSITIVE, kind="a finite number")
        super().__init__("callbacks.penalty", without)
        self._penalty, self._strength = penalty, strength

    def change(self, weight: Any, lr: Tensor | float) -> None:
        with torch.enable_grad():
            place = self.places.get(weight, weight)
            master = gather(place, weight.detach()).requires_grad_()
            (gradient,) = torch.autograd.grad(self._penalty(master), master)
        weight.grad = torch.add(weight.grad, part_for(place, gradient), alpha=self._strength)


class LARC(StepHook):
    """LARC and LARS (You et al. 2017): each gradient is scaled by the size of its weight.

        clip    LARC    g <- g * min(1, max(eta * |w| / (lr * (|g| + epsilon)), min_update))
        scale   LARS    g <- g * max(eta * |w| / (|g| + epsilon), min_update)

    |.| is the 2-norm of one parameter, in fp32. One step of plain SGD then moves a weight by `eta`
    of its norm: at most that much in `clip`, and the learning rate times that much in `scale`. The
    optimizer adds weight decay later, unscaled. A run writes each rate to TensorBoard.

        optimizer.register_step_pre_hook(LARC(eta=0.001))    in your loop

    Args (ConfigError if out of their range):
        eta: the trust coefficient: a weight's step as a share of its norm, > 0.
        mode: `clip` (LARC) never makes a gradient larger, `scale` (LARS) sets its norm.
        min_update: the smallest factor, >= 0, and the factor of a weight that is zero.
        epsilon: added to the gradient's norm, > 0.
        without: patterns of the names of parameters whose gradients stay as they are.
        log_every: steps between two writes of the rates.
    """

    def __init__(
        self,
        eta: float,
        mode: str = "clip",
        min_update: float = 1e-7,
        epsilon: float = 1e-7,
        without: Sequence[str] = (),
        log_every: int = 10,
    ) -> None:
        require("larc.eta", eta, POSITIVE, "0.001 is usual", "a finite number")
        require("larc.min_update", min_update, NOT_NEGATIVE, "1e-07 is usual", "a finite number")
        require("larc.epsilon", epsilon, POSITIVE, "1e-07 is usual", "a finite number")
        if mode not in ("clip", "scale"):
            raise ConfigError(f"larc.mode={mode}: choose clip (LARC) or scale (LARS)")
        super().__init__("callbacks.larc", without, log_every)
        self.eta, self.mode, self.min_update, self.epsilon = eta, mode, min_update, epsilon
        self._norms: dict[Tensor, tuple[Tensor, Tensor]] = {}  # of gradients and weights, 0-d

    def measure(self, weights: Sequence[Any]) -> None:
        both = [tensor for weight in weights for tensor in (_values(weight.grad), weight)]
        norms = [torch.linalg.vector_norm(tensor.float()) for tensor in both]
        if norms and self.comm.sharding is not None:
            held = [copies_of(self.places[weight]) for weight in weights for _ in range(2)]
            copies = norms[0].new_tensor(held)
            norms = list(self.comm.norm(torch.stack(norms) / copies.sqrt()).unbind())
        self._norms = dict(zip(weights, zip(norms[::2], norms[1::2], strict=True), strict=True))

    def change(self, weight: Any, lr: Tensor | float) -> None:
        values, (slope, size) = _values(weight.grad), self._norms.pop(weight)
        slope = slope + self.epsilon
        clips = self.mode == "clip"
        ratio = self.eta * size / (lr * slope if clips else slope)
        factor = ratio.masked_fill(size == 0, 0.0).clamp(min=self.min_update)  # Not 0 / 0.
        factor = factor.clamp(max=1.0 if clips else torch.finfo(values.dtype).max)
        values.mul_(factor)
        if self._due:
            self.note(f"larc/rate/{self.names[weight]}", factor * lr)

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Hook in. ConfigError if gradients are clipped by their norm as well."""
        if trainer.plan.clip_norm is not None:
            raise ConfigError(
                f"trainer.clip_norm={trainer.plan.clip_norm}: LARC scales each gradient after the "
                "clipping, and would undo it; set trainer.clip_norm=null, or leave callbacks=larc "
                "out"
            )
        super().setup(trainer, context)


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


class GradientNorms(StepHook):
    """Writes the 2-norm of each group's gradients to TensorBoard: unscaled, fp32, after clipping.

    A skipped step has none. With several ranks it is the norm of their average.

    Args:
        groups: patterns of parameter names by the group's name, {encoder: encoder.*}. A parameter
            is in the first that matches, or in `others`. None: by the first parts of its name.
        depth: how many parts of a name then make a group, >= 1: with 2, `layers.0.attention.weight`
            is in `layers.0`.
        log_every: steps between two points.

    ConfigError at `setup`: a pattern matches no parameter.
    """

    def __init__(
        self, groups: Mapping[str, str] | None = None, depth: int = 1, log_every: int = 10
    ) -> None:
        super().__init__("callbacks.gradient_norms", log_every=log_every)
        self._groups = dict(groups or {})
        self._depth = require_whole(f"{self._option}.depth", depth)

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        super().setup(trainer, context)
        for group, pattern in self._groups.items():
            option = f"{self._option}.groups.{group}"
            refuse_idle(option, "parameter", [pattern], [*self.names.values()])
        self._group_of = {weight: self._group(name) for weight, name in self.names.items()}

    def measure(self, weights: Sequence[Any]) -> None:
        """Measure on the device: no wait."""
        held: dict[str, list[Tensor]] = {}
        for weight in weights if self._due else ():
            if weight in self._group_of:
                held.setdefault(self._group_of[weight], []).append(weight.grad)
        for group, gradients in held.items():
            # Ranks that hold the same part take a share each.
            parts = [part_of(g) / copies_of(g) ** 0.5 if is_sharded(g) else g for g in gradients]
            each = torch._foreach_norm(list(map(_values, parts)))
            norm = torch.linalg.vector_norm(torch.stack(each))
            whole = self.comm.norm(norm) if self.comm.sharding is not None else norm
            tag = f"grad/group/{group}"
            of_others = self._noted.get(self._due, {}).get(tag)  # if optimizers share a group
            self.note(tag, whole if of_others is None else torch.hypot(of_others, whole))

    def _group(self, name: str) -> str:
        if self._groups:
            fitting = (g for g, pattern in self._groups.items() if fnmatchcase(name, pattern))
            return next(fitting, "others")
        module, _, weight = name.rpartition(".")
        return ".".join((module or weight).split(".")[: self._depth])
