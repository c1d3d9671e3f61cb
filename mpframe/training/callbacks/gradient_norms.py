"""The gradient norms of groups of layers, as the optimizer is about to use them."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpframe.core.callback import Batch
from mpframe.core.comm import copies_of, is_sharded, part_of
from mpframe.core.ranges import require_whole
from mpframe.core.step_result import StepResult
from mpframe.training.callbacks.step_hooks import StepHook
from mpframe.training.optimizers.selection import refuse_idle
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

OPTION = "callbacks.gradient_norms"


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
        super().__init__(OPTION, ())
        self._groups, self._every = dict(groups or {}), log_every
        self._depth = require_whole(f"{OPTION}.depth", depth)
        self._group_of: dict[Tensor, str] = {}
        self._due: int | None = None
        self._norms: dict[int, dict[str, Tensor]] = {}  # by step, until its verdict is known

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        super().setup(trainer, context)
        self._context, self._comm = context, trainer.comm
        for group, pattern in self._groups.items():
            refuse_idle(f"{OPTION}.groups.{group}", "parameter", [pattern], [*self.names.values()])
        self._group_of = {weight: self._group(name) for weight, name in self.names.items()}

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        step = trainer.progress.global_step + 1
        self._due = step if step % self._every == 0 else None

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Measure on the device: no wait."""
        if self._due is None:
            return
        held: dict[str, list[Tensor]] = {}
        for weight in (w for group in optimizer.param_groups for w in group["params"]):
            if weight.grad is not None and weight in self._group_of:
                held.setdefault(self._group_of[weight], []).append(weight.grad)
        norms = self._norms.setdefault(self._due, {})
        for group, gradients in held.items():
            # Of a part that several ranks hold, each takes its share.
            parts = [part_of(g) / copies_of(g) ** 0.5 if is_sharded(g) else g for g in gradients]
            norm = _norm(parts)
            norms[group] = self._comm.norm(norm) if self._comm.sharding is not None else norm

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        norms = self._norms.pop(trainer.progress.global_step, {})
        if norms and trainer.comm.is_main and not result.known.skipped:
            tags = {f"grad/group/{group}": norm for group, norm in norms.items()}
            self._context.tracker.scalars(trainer.progress.global_step, tags)

    def _group(self, name: str) -> str:
        if self._groups:
            fitting = (g for g, pattern in self._groups.items() if fnmatchcase(name, pattern))
            return next(fitting, "others")
        module, _, weight = name.rpartition(".")
        return ".".join((module or weight).split(".")[: self._depth])


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    dense = [g._values() if g.is_sparse else g for g in gradients]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense)))  # type: ignore[no-any-return]
