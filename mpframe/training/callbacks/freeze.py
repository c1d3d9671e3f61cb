"""Freezes layers for the first epochs or steps, as in fine-tuning below a new head.

A frozen parameter gets no gradient, so the optimizer does not change it, its master or its state.
It stays in its group, so schedules and checkpoints are as without freezing. The step and the epoch
say what is frozen, so a resumed run needs no state for it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mpframe.core.callback import Batch, Callback
from mpframe.core.errors import ConfigError
from mpframe.core.ranges import require_whole
from mpframe.training.optimizers.multi_optimizer import parts_of
from mpframe.training.optimizers.selection import refuse_idle
from mpframe.training.plan import Progress
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Frozen:
    """The parameters of one pattern, and how long they are frozen."""

    named: str  # the pattern and how many they are, for the log
    unit: str
    count: int
    parameters: list[nn.Parameter]

    def is_over(self, progress: Progress) -> bool:
        passed = progress.epoch if self.unit == "epochs" else progress.global_step
        return passed >= self.count


class Freeze(Callback):
    """Freezes parameters when a run begins, and trains them from an epoch or a step on.

    A parameter belongs to the first pattern that matches its name, `steps` before `epochs`. A
    parameter that a group of the optimizer freezes stays frozen for the whole run.

    Args:
        epochs: name pattern -> frozen for so many epochs, >= 1, else ConfigError.
        steps: name pattern -> frozen for so many steps, skipped ones included, >= 1.
        eval_mode: whether modules whose parameters are all frozen, here or by a group of the
            optimizer, train in eval mode: BatchNorm keeps its running statistics, no dropout.
    """

    def __init__(
        self,
        epochs: Mapping[str, int] | None = None,
        steps: Mapping[str, int] | None = None,
        eval_mode: bool = False,
    ) -> None:
        given = {"steps": steps or {}, "epochs": epochs or {}}
        self._plans = [(unit, *plan) for unit, plans in given.items() for plan in plans.items()]
        for unit, pattern, count in self._plans:
            require_whole(f"callbacks.freeze.{unit}.{pattern}", count)
        self._eval_mode = eval_mode

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Freeze. ConfigError if a pattern matches nothing, or an optimizer has nothing left."""
        free = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        kind = "parameter that is trained and that no earlier pattern takes"
        chosen = []
        for unit, pattern, count in self._plans:
            refuse_idle(f"callbacks.freeze.{unit}", kind, [pattern], list(free))
            taken = [free.pop(name) for name in list(free) if fnmatchcase(name, pattern)]
            chosen.append(_Frozen(f"{pattern} ({len(taken)} tensors)", unit, count, taken))
        self._frozen = [frozen for frozen in chosen if not frozen.is_over(trainer.progress)]
        for frozen in self._frozen:
            set_requires_grad(trainer.optimizer, frozen.parameters, False)
            log.info("frozen for %d %s: %s", frozen.count, frozen.unit, frozen.named)
        if not all(part.parameters for part in parts_of(trainer.optimizer).values()):
            raise ConfigError(
                "callbacks.freeze: leaves an optimizer nothing to train; freeze fewer parameters"
            )
        self._find_modules(trainer.model)

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        """Train what was frozen for long enough, and keep the modules of the rest in eval mode."""
        over = [frozen for frozen in self._frozen if frozen.is_over(trainer.progress)]
        for frozen in over:
            self._frozen.remove(frozen)
            set_requires_grad(trainer.optimizer, frozen.parameters, True)
            log.info("trained from step %d on: %s", trainer.progress.global_step + 1, frozen.named)
        if over:
            trainer.model.train()
            self._find_modules(trainer.model)
        for module in self._modules:  # `train` of the whole model has reached them.
            module.eval()

    def _find_modules(self, model: nn.Module) -> None:
        self._modules = list(_all_frozen(model)) if self._eval_mode else []


def set_requires_grad(optimizer: Any, parameters: Iterable[Tensor], requires_grad: bool) -> None:
    """Freeze some of the model's parameters, with masters and state, or train them from now on."""
    chosen = list(parameters)
    for part in parts_of(optimizer).values():
        held = [parameter for parameter in chosen if part.holds(parameter)]
        stepped = [part.optimizer_param(parameter) for parameter in held]
        for tensor in (*held, *stepped):
            tensor.requires_grad_(requires_grad)
        if requires_grad:
            _fill_momentum(part.optimizer, stepped)


def _fill_momentum(optimizer: Optimizer, masters: list[Tensor]) -> None:
    """Give masters a momentum of zeros, as fused SGD needs it if others of their group have one."""
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        started = any("momentum_buffer" in optimizer.state.get(m, ()) for m in group["params"])
        if group["fused"] and started and not group["dampening"]:
            for master in set(masters).intersection(group["params"]):
                # SGD's first step follows: momentum * 0 + g = g.
                optimizer.state[master].setdefault("momentum_buffer", torch.zeros_like(master))


def _all_frozen(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with parameters that are all frozen."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        yield module
    else:
        for child in module.children():
            yield from _all_frozen(child)
