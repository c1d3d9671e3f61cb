"""Several optimizers that make one step: Muon beside AdamW, a generator's beside a discriminator's.

Each part is a `MasterWeights` with its parameters. They share the verdict:

    skip="all"     no part moves unless the gradients of all are finite
    skip="each"    a part with finite gradients moves, even if others have none

Parts that lower one loss share its backward pass: one scale, clipped together by the norm of all
their gradients. Parts with a loss each are scaled and clipped apart. One scaler that they share is
told the largest gradient of any.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.core.comm import Comm
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.loss_scaling.scaler import Scaling, scale_of
from mpframe.core.optim.gradients import Gradients, check_clipping
from mpframe.core.optim.master_weights import MasterWeights, evaluate_closure, no_new_gradients
from mpframe.core.optim.masters import load_weights
from mpframe.core.step_result import StepResult, Verdict, read_verdicts
from mpframe.core.tree import not_finite

SKIPS = ("all", "each")
_OfParts = Tensor | float | Mapping[str, Tensor | float]
_Tensors = Mapping[str, Tensor]
_Grads = Mapping[str, Gradients]


class MultiOptimizer:
    """Optimizers that step together, used as one `MasterWeights` is.

    `parts` are all on one device, none with a closure. With `own_losses` each part lowers the loss
    that has its name. ConfigError: a parameter is in two parts, or `skip` is no word from above.
    """

    needs_closure = False

    def __init__(
        self, parts: Mapping[str, MasterWeights], *, skip: str = "all", own_losses: bool = False
    ) -> None:
        if skip not in SKIPS:
            raise ConfigError(f"optimizer.skip={skip}: must be all or each")
        for (name, part), (other, second) in combinations(parts.items(), 2):
            shared = sum(map(second.holds, part.parameters))
            if shared:
                raise ConfigError(
                    f"optimizer.parts: {shared} parameters are in {name} and in {other}; each "
                    "belongs to one part"
                )
        self.parts, self.skip, self.own_losses = dict(parts), skip, own_losses

    @property
    def param_groups(self) -> list[Any]:
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for part in self.parts.values() for parameter in part.parameters]

    def master_of(self, parameter: Tensor) -> Tensor:
        for part in self.parts.values():
            if part.holds(parameter):
                return part.master_of(parameter)
        raise KeyError(parameter)

    def set_comm(self, comm: Comm) -> None:
        for part in self.parts.values():
            part.set_comm(comm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    @torch.no_grad()
    def accumulate(self, scale: _OfParts = 1.0, count: _OfParts = 1) -> Tensor:
        """As `MasterWeights.accumulate`, with a scale and a count for all, or for each by name.

        If the returned amax is inf or nan, parts dropped the micro-batch: with skip="all" all of
        them, with skip="each" those that overflowed.
        """
        collected = {
            name: part.collect_grads(_of(scale, name), _of(count, name))
            for name, part in self.parts.items()
        }
        amax = largest([gradients.amax for gradients in collected.values()])
        for name, gradients in collected.items():
            if self.skip == "all":  # One part that overflowed drops the micro-batch of all.
                gradients.scaler_amax = gradients.amax
                gradients.amax = torch.where(amax < torch.inf, gradients.amax, amax)
            self.parts[name].accumulator.add(gradients)
        return amax

    def set_reduced_grads(self, means: Mapping[Tensor, Tensor], amax: Any, before: Any) -> None:
        for part in self.parts.values():
            part.set_reduced_grads(means, None, before)  # Each computes its own amax.

    @torch.no_grad()
    def step(
        self,
        scaler: Scaling | Callable[[], Any] = None,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        skip_mask: Tensor | None = None,
    ) -> StepResult:
        """Step every part as `MasterWeights.step` does, and return the step of all, and by part.

        `scaler` is one, or one for each loss by name, or a closure that computes the loss and calls
        backward. `max_norm` is of all gradients that were scaled together.
        """
        check_clipping(max_norm=max_norm, max_value=max_value)
        scaling, loss = evaluate_closure(scaler)
        scales = {name: scale_of(_of(scaling, name)) for name in self.parts}
        grads = {name: part.collect_step_grads(scales[name]) for name, part in self.parts.items()}
        if all(gradients.no_new for gradients in grads.values()):
            raise no_new_gradients()
        norms = {name: part.norm_of(grads[name]) for name, part in self.parts.items()}
        skips = {name: not_finite(gradients.amax) for name, gradients in grads.items()}
        if max_norm is not None:  # Clipping by an infinite norm would make gradients zero.
            skips = {name: skips[name] | not_finite(norm) for name, norm in norms.items()}
        if self.skip == "all":
            skips = dict.fromkeys(skips, torch.stack([*skips.values()]).any())
        if skip_mask is not None:
            skips = {name: skipped | skip_mask for name, skipped in skips.items()}
        if max_norm is not None:
            self._clip(grads, norms, skips, max_norm)
        verdicts: dict[str, Verdict | None] = dict.fromkeys(self.parts)
        if not all(part.skips_on_device for part in self.parts.values()):
            steps = [(skips[name], gradients.dropped) for name, gradients in grads.items()]
            verdicts = dict(zip(self.parts, read_verdicts(steps), strict=True))
        results = {}
        for name, part in self.parts.items():
            gradients, norm, skipped = grads[name], norms[name], skips[name]
            gradients.max_value = max_value
            part.apply(gradients, skipped.float(), verdicts[name])
            used = torch.ones_like(norm) * scales[name]
            results[name] = StepResult(
                skipped, gradients.amax, norm, used, gradients.dropped, None, verdicts[name]
            )
        _update_scalers(scaling, grads)
        return replace(merge_results(results), loss=loss)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def inner_state_dict(self) -> dict[str, Any]:
        return {name: part.inner_state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises CheckpointError if it is of other parts."""
        load_states(self.parts, state, "optimizer.parts")

    def masters_by_name(self, model: nn.Module) -> dict[str, Tensor]:
        parts = self.parts.values()
        return {n: w for part in parts for n, w in part.masters_by_name(model).items()}

    def load_masters(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        load_weights(model, self.masters_by_name(model), weights)

    def _clip(self, grads: _Grads, norms: _Tensors, skips: _Tensors, max_norm: float) -> None:
        # A part that skips must not spoil the others' norm with its inf.
        clean = {name: torch.where(skips[name], 0.0, norm) for name, norm in norms.items()}
        together = torch.linalg.vector_norm(torch.stack(list(clean.values())))
        for name, gradients in grads.items():
            gradients.clip(clean[name] if self.own_losses else together, max_norm)


def merge_results(results: Mapping[str, StepResult]) -> StepResult:
    """Merge the results of all parts into the step's."""
    parts = list(results.values())
    dropped = [part.dropped for part in parts if part.dropped is not None]
    losses = [part.loss for part in parts if part.loss is not None]
    return StepResult(
        found_inf=torch.stack([part.skipped for part in parts]).all(),
        amax=largest([part.amax for part in parts]),
        grad_norm=torch.linalg.vector_norm(torch.stack([part.grad_norm for part in parts])),
        scale=parts[0].scale,
        dropped=largest(dropped) if dropped else None,
        loss=torch.stack(losses).sum() if losses else None,
        verdict=_join_verdicts(results),
        parts=dict(results),
    )


def largest(magnitudes: list[Tensor]) -> Tensor:
    """Return the largest of these 0-d magnitudes, nan if one is nan; a single one itself."""
    return magnitudes[0] if len(magnitudes) == 1 else torch.stack(magnitudes).max()


def _join_verdicts(parts: Mapping[str, StepResult]) -> Verdict | None:
    """Return the verdict on a step of several: skipped if all are; None if one is not known."""
    known = [part.verdict for part in parts.values() if part.verdict is not None]
    if len(known) < len(parts):
        return None
    return Verdict(all(verdict.skipped for verdict in known), max(v.dropped for v in known))


def with_verdicts(results: list[StepResult]) -> list[StepResult]:
    """Return the results with their verdicts, which are read together."""
    steps = [(part.found_inf, part.dropped) for one in results for part in one.each().values()]
    verdicts = iter(read_verdicts(steps) if steps else ())
    complete = []
    for result in results:
        parts = {n: replace(part, verdict=next(verdicts)) for n, part in result.each().items()}
        several = replace(result, parts=parts, verdict=_join_verdicts(parts))
        complete.append(parts[""] if result.parts is None else several)
    return complete


def _of(given: Any, name: str) -> Any:
    """Return the part's entry if `given` is a mapping, else `given`."""
    return given[name] if isinstance(given, Mapping) else given


def _update_scalers(scaler: Any, grads: _Grads) -> None:
    """Give each scaler its part's amax, a shared one the largest, once."""
    amax = {n: g.amax if g.scaler_amax is None else g.scaler_amax for n, g in grads.items()}
    if isinstance(scaler, Mapping):
        for name, of_part in scaler.items():
            of_part.update(amax[name])
    elif scaler is not None:
        scaler.update(largest(list(amax.values())))


def parts_of(optimizer: Any) -> dict[str, MasterWeights]:
    """Return the optimizers that make one step, by name, "" for a single one."""
    return optimizer.parts if isinstance(optimizer, MultiOptimizer) else {"": optimizer}


def load_states(named: Mapping[str, Any], states: Mapping[str, Any], option: str) -> None:
    """Load a state into each object. CheckpointError if the names differ."""
    if named and states and set(named) != set(states):
        raise CheckpointError(
            f"{option}: the checkpoint has {_names(states)}, this run {_names(named)}; resume with "
            "the optimizers it was made with"
        )
    for name in named.keys() & states.keys():
        named[name].load_state_dict(states[name])


def _names(given: Iterable[str]) -> str:
    return ", ".join(name or "a single one" for name in sorted(given))
