"""How one step is divided among several losses.

A turn is a forward and backward pass for each of its losses, then a step of its optimizer. With a
single loss a step is one turn. With several, each lowered by the part of a `MultiOptimizer` that
bears its name,

    skip="each"    the losses take turns in their order: the second is computed with the weights
                   that the first one's update left, as a generator's after its discriminator's
    skip="all"     all losses are computed with the same weights, in one turn, for nobody may have
                   moved before the last verdict is known

A loss reaches the parameters of its own part alone: a generator's loss runs through the
discriminator and leaves no gradient there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpframe.errors import ConfigError
from mpframe.loss_scaling.interface import LossScaler, Scaling, scale_of
from mpframe.optim import MasterWeights, MultiOptimizer
from mpframe.optim.multi_optimizer import joined
from mpframe.optim.step_result import StepResult, largest

Loss = Callable[[Any, Any], Tensor]
AnyOptimizer = MasterWeights | MultiOptimizer


@dataclass(frozen=True)
class Objective:
    """A loss and what it moves.

    Attributes:
        name: the model is called with it where there are several losses; "" for the only one.
        loss: loss(outputs, targets) -> 0-d tensor.
        scaler: scales this loss; None: it is not scaled.
        parameters: receive its gradients; None: all.
    """

    name: str
    loss: Loss
    scaler: LossScaler | None
    parameters: list[Tensor] | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the model is given beside its inputs."""
        return (self.name,) if self.name else ()

    @property
    def scale(self) -> Tensor | float:
        """The present loss scale."""
        return scale_of(self.scaler)

    def backward(self, loss: Tensor) -> None:
        """Scaled backward pass of the unscaled `loss`."""
        scaled = loss if self.scaler is None else loss * self.scaler.scale
        scaled.backward(inputs=self.parameters)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Turn:
    """Losses computed with the same weights, and the optimizer that then moves.

    Attributes:
        objectives: the losses.
        optimizer: steps once all gradients are there.
        scaler: what its `step` is told of.
    """

    objectives: Sequence[Objective]
    optimizer: AnyOptimizer
    scaler: Scaling

    @property
    def scale(self) -> Any:
        """The scale of its backward passes, by name where there are several scalers."""
        if isinstance(self.scaler, Mapping):
            return {name: scaler.scale for name, scaler in self.scaler.items()}
        return self.objectives[0].scale

    def step(
        self,
        max_norm: float | None,
        whole: bool,
        skip_mask: Tensor | None,
        closure: Callable[[], Any] | None = None,
    ) -> StepResult:
        """The optimizer's step, with the arguments of `MasterWeights.step`."""
        optimizer: Any = self.optimizer  # Either kind takes the scaling that `turns_of` gave it.
        own = {} if closure is None else {"closure": closure}
        result: StepResult = optimizer.step(
            self.scaler, max_norm=max_norm, skip_if_dropped=whole, skip_mask=skip_mask, **own
        )
        return result


class OneVerdict:
    """A scaler shared by several turns: it is told once a step, of the largest gradient of any.

    So its scale is the same in all turns of a step.

    Args:
        scaler: the one that is shared.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler
        self._seen: list[Tensor] = []

    @property
    def scale(self) -> Tensor:
        """The present scale: 0-d float32."""
        return self._scaler.scale

    def update(self, amax: Tensor) -> None:
        """Keep what a turn saw."""
        self._seen.append(amax)

    def settle(self) -> None:
        """Tell the scaler of all turns since the last time."""
        self._scaler.update(largest(self._seen))
        self._seen = []


@dataclass(frozen=True)
class Turns:
    """A step's turns.

    Attributes:
        turns: one after the other.
        shared: the scaler they share; None where each has its own or there is one turn.
    """

    turns: Sequence[Turn]
    shared: OneVerdict | None = None

    @property
    def objectives(self) -> list[Objective]:
        """Every loss, in order."""
        return [objective for turn in self.turns for objective in turn.objectives]

    def settle(self) -> None:
        """All turns of a step are over."""
        if self.shared is not None:
            self.shared.settle()


def turns_of(loss: Loss | Mapping[str, Loss], optimizer: AnyOptimizer, scaler: Scaling) -> Turns:
    """How a step goes about its losses.

    Args:
        loss: the only one, or several by name.
        optimizer: of several losses a `MultiOptimizer` with a part for each, by the same name.
        scaler: one, one for each loss by name, or None.

    Raises:
        ConfigError: names of losses, optimizers and scalers do not match.
    """
    if not isinstance(loss, Mapping):
        if isinstance(scaler, Mapping):
            raise ConfigError(
                "optimizer.scalers=each: there is one loss, and one backward pass has one scale; "
                "use optimizer.scalers=shared"
            )
        return Turns([Turn([Objective("", loss, scaler)], optimizer, scaler)])
    parts = optimizer.parts if isinstance(optimizer, MultiOptimizer) else {}
    if list(parts) != list(loss) or not optimizer.own_losses:  # type: ignore[union-attr]
        raise ConfigError(
            f"optimizer.parts={', '.join(parts) or 'none'}: the losses are {', '.join(loss)}; give "
            "each an optimizer by its name, in this order"
        )
    if isinstance(scaler, Mapping) and list(scaler) != list(loss):
        raise ConfigError(
            f"loss_scaling: scalers for {', '.join(scaler)}; the losses are {', '.join(loss)}"
        )
    return _turns_of_several(loss, optimizer, scaler)  # type: ignore[arg-type]


def _turns_of_several(losses: Mapping[str, Loss], optimizer: MultiOptimizer, scaler: Any) -> Turns:
    alternating = optimizer.skip == "each"
    shared = None
    if alternating and scaler is not None and not isinstance(scaler, Mapping):
        scaler = shared = OneVerdict(scaler)
    own = scaler if isinstance(scaler, Mapping) else dict.fromkeys(losses, scaler)
    objectives = {
        name: Objective(name, loss, own[name], optimizer.parts[name].parameters)
        for name, loss in losses.items()
    }
    if not alternating:
        return Turns([Turn(list(objectives.values()), optimizer, scaler)])
    turns = [Turn([objectives[name]], optimizer.parts[name], own[name]) for name in losses]
    return Turns(turns, shared)


def means(losses: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The mean of each objective's losses over the micro-batches that count.

    Args:
        losses: of each micro-batch, for each objective; nan where it was dropped.
    """
    if len(losses) == 1:
        return list(losses[0])
    return [torch.stack(own).nanmean() for own in zip(*losses, strict=True)]


def with_losses(result: StepResult, losses: Sequence[Tensor]) -> StepResult:
    """The result of a turn's step with the losses of its objectives filled in."""
    if len(losses) == 1:
        return replace(result, loss=losses[0])
    parts = zip(result.each().items(), losses, strict=True)
    return joined({name: replace(part, loss=loss) for (name, part), loss in parts})
