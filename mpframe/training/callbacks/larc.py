"""Scales each gradient by the size of its weight: LARC or LARS, around any optimizer."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch.utils.hooks import RemovableHandle

from mpframe.errors import ConfigError
from mpframe.optim import LARC, MultiOptimizer
from mpframe.optim.selection import Selection, hint
from mpframe.training.callback import Callback
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer


class LayerwiseRates(Callback):
    """Hooks `LARC` to the optimizers of a run while it trains.

    Args:
        eta: the trust coefficient: a weight's step as a share of its norm, > 0.
        mode: `clip` (LARC) or `scale` (LARS).
        min_update: the smallest factor, >= 0.
        epsilon: added to the gradient's norm, > 0.
        without: patterns of the names of parameters whose gradients stay as they are.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        eta: float,
        mode: str = "clip",
        min_update: float = 1e-7,
        epsilon: float = 1e-7,
        without: Sequence[str] = (),
    ) -> None:
        self._larc = LARC(eta, mode, min_update, epsilon)
        self._without = without
        self._handles: list[RemovableHandle] = []

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Begin.

        Raises:
            ConfigError: gradients are clipped, too; the optimizer takes a closure; or a pattern
                matches no parameter.
        """
        _refuse_beside(trainer)
        named = dict(trainer.model.named_parameters())
        _refuse_idle(self._without, list(named))
        left_out = [p for n, p in named.items() if Selection(self._without).takes(n, p)]
        optimizer = trainer.optimizer
        parts = optimizer.parts.values() if isinstance(optimizer, MultiOptimizer) else [optimizer]
        for part in parts:  # A frozen group is in none of them.
            self._larc.without.update(part.stepped(p) for p in left_out if part.holds(p))
            self._handles.append(part.register_step_pre_hook(self._larc))

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()


def _refuse_beside(trainer: Trainer) -> None:
    if trainer.plan.clip_norm is not None:
        raise ConfigError(
            f"trainer.clip_norm={trainer.plan.clip_norm}: LARC scales each gradient after the "
            "clipping, and would undo it; set trainer.clip_norm=null, or leave callbacks=larc out"
        )
    if trainer.optimizer.needs_closure:
        raise ConfigError(
            "callbacks.larc: the optimizer makes its gradients within its step, where no hook "
            "reaches them; choose an optimizer without a closure"
        )


def _refuse_idle(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"callbacks.larc.without=[{pattern}]: matches no parameter; {hint(pattern, names)}"
            )
