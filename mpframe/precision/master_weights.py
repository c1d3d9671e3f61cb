"""fp32 master weights around any torch optimizer, and a step that is all or nothing.

A half weight w cannot take small updates: 1 + 2^-12 rounds back to 1. So each half parameter has a
master m in fp32 that the wrapped optimizer updates in the parameter's place,

    m <- optimizer(m, fp32(g) / scale),    w <- round_to_half(m)

and weight decay, momentum and second moments act on, and live beside, fp32 values. An fp32
parameter is its own master: the wrapper adds nothing to it but the check of its gradient.

The wrapped optimizer stays the same object, so schedules built on it go on working.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.errors import CheckpointError, ConfigError
from mpframe.precision.gradients import amax_of, clip, norm_of, to_fp32, unscale, values_of
from mpframe.step import LossScaler, StepResult

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Wraps a torch optimizer so that it updates fp32 masters of half parameters.

    Args:
        optimizer: any torch optimizer, over parameters of any mix of float32, float16, bfloat16.
        masters: the fp32 values to start from, by parameter; where a half parameter has none, its
            master starts from the half value.
        keep_masters: False updates the half weights themselves, to study what masters are for.

    Raises:
        ConfigError: a parameter is complex.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: Mapping[Tensor, Tensor] | None = None,
        *,
        keep_masters: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.keep_masters = keep_masters
        self._masters: dict[Tensor, Tensor] = {}
        self._accumulated: dict[Tensor, Tensor] = {}
        self._bad_batches: list[Tensor] = []
        for group in optimizer.param_groups:
            self._adopt(group, masters or {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups; their `params` are the masters."""
        return self.optimizer.param_groups

    def master_of(self, parameter: Tensor) -> Tensor:
        """The fp32 tensor the update acts on: `parameter` itself where it is fp32."""
        return self._masters[parameter]

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its half parameters get masters."""
        self.optimizer.add_param_group(group)
        self._adopt(self.optimizer.param_groups[-1], {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of parameters and masters, and what was accumulated."""
        self.optimizer.zero_grad(set_to_none)
        for parameter in self._masters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
        self._accumulated.clear()
        self._bad_batches.clear()

    @torch.no_grad()
    def accumulate(self, scale: Tensor | float = 1.0) -> Tensor:
        """Add this micro-batch's gradients, unscaled, to fp32 accumulators and clear them.

        A micro-batch whose gradients are not finite adds nothing and does not count in the mean
        that `step` takes. No wait for the device.

        Args:
            scale: the loss scale of the backward pass, > 0.

        Returns:
            0-d fp32, the micro-batch's amax; inf or nan where it was dropped.
        """
        gradients = self._take_gradients(scale)
        amax = amax_of(values_of(list(gradients.values())), self._device)
        bad = ~torch.isfinite(amax)
        for master, gradient in gradients.items():
            clean = _zero_where(bad, gradient)
            kept = self._accumulated.get(master)
            self._accumulated[master] = clean if kept is None else kept + clean
        self._bad_batches.append(bad)
        return amax

    @torch.no_grad()
    def step(
        self,
        scaler: LossScaler | None = None,
        *,
        max_norm: float | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> StepResult:
        """Unscale, check, clip, update or skip, and tell the scaler: one step, all or nothing.

        Args:
            scaler: scaled this step's loss; None: the loss was not scaled.
            max_norm: clip the global 2-norm of the gradients to this, > 0; None: do not clip.
            closure: recomputes the loss, for optimizers that need it (LBFGS); fp32 weights only.

        Returns:
            What was done. After a skip no parameter, master or optimizer state has changed.

        Raises:
            ConfigError: a closure beside half weights or a scaler.
        """
        if closure is not None:
            return self._step_with_closure(closure, scaler)
        scale = torch.ones((), device=self._device) if scaler is None else scaler.scale
        bad = torch.stack(self._bad_batches) if self._bad_batches else None
        gradients = (
            self._take_gradients(1.0 if scaler is None else scale)
            if bad is None
            else self._mean(bad)
        )
        values = values_of(list(gradients.values()))
        amax, norm = amax_of(values, self._device), norm_of(values, self._device)
        if bad is not None:
            amax = torch.where(bad.all(), torch.inf, amax)
        skipped = ~torch.isfinite(amax)
        if max_norm is not None:
            # A norm beyond fp32's range would clip every gradient to zero: such a step is skipped.
            skipped = skipped | ~torch.isfinite(norm)
            clip(values, norm, max_norm)
        self._apply(gradients, skipped)
        if scaler is not None:
            # One overflowing micro-batch is an overflow, although the step goes on without it.
            scaler.update(amax if bad is None else torch.where(bad.any(), torch.inf, amax))
        return StepResult(skipped, amax, norm, scale, dropped=None if bad is None else bad.sum())

    def saturated(self) -> Tensor:
        """How many half weights stand at the end of their format's range (0-d int64)."""
        beyond = [
            (master.abs() > torch.finfo(parameter.dtype).max).sum()
            for parameter, master in self._half_pairs()
        ]
        return torch.stack(beyond).sum() if beyond else torch.zeros((), dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, in the layout a plain optimizer loads, and the masters.

        `masters` lists the fp32 master of each half parameter in the groups' order, None where a
        parameter is its own.
        """
        masters = [m if m is not p else None for p, m in self._masters.items()]
        return {**self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this class, or of a plain optimizer, returned.

        A plain optimizer's state has no masters: they stay as they are.

        Raises:
            CheckpointError: the state was made over other parameters.
        """
        state = dict(state)
        masters = state.pop("masters", [None] * len(self._masters))
        if len(masters) != len(self._masters):
            raise CheckpointError(
                f"optimizer state has {len(masters)} parameters, the model has "
                f"{len(self._masters)}: load it into the model it was made with"
            )
        self.optimizer.load_state_dict(state)
        for own, loaded in zip(self._masters.values(), masters, strict=True):
            if loaded is not None:
                own.copy_(loaded)
        if any(loaded is not None for loaded in masters):
            self._publish()

    def masters_by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """The fp32 tensor behind each parameter of `model` that is optimized, by its name."""
        named = model.named_parameters(remove_duplicate=False)
        return {n: self._masters[p].detach() for n, p in named if p in self._masters}

    @torch.no_grad()
    def load_masters(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Take parameters and buffers by name: masters exactly, half weights as their rounding.

        Raises:
            CheckpointError: a name is missing or unexpected, or a shape differs; nothing is taken.
        """
        own = {**model.state_dict(), **self.masters_by_name(model)}
        _refuse_other_weights(own, weights)
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        self._publish()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._masters)).device

    def _adopt(self, group: dict[str, Any], masters: Mapping[Tensor, Tensor]) -> None:
        """Put the masters of a group's half parameters in their place, state and all."""
        for index, parameter in enumerate(group["params"]):
            _refuse_complex(parameter, index)
            master = parameter
            if parameter.dtype in _HALF and self.keep_masters:
                start = masters.get(parameter, parameter)
                master = start.detach().to(torch.float32, copy=True)
                master.requires_grad_(parameter.requires_grad)
                group["params"][index] = master
                if parameter in self.optimizer.state:
                    kept = self.optimizer.state.pop(parameter)
                    self.optimizer.state[master] = {k: _widened(v) for k, v in kept.items()}
            self._masters[parameter] = master

    def _half_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(p, m) for p, m in self._masters.items() if p is not m]

    def _take_gradients(self, scale: Tensor | float) -> dict[Tensor, Tensor]:
        """Move the parameters' gradients out: fp32, unscaled, by master."""
        gradients = {
            master: to_fp32(parameter.grad)
            for parameter, master in self._masters.items()
            if parameter.grad is not None
        }
        for parameter in self._masters:
            parameter.grad = None
        if isinstance(scale, Tensor) or scale != 1.0:
            unscale(values_of(list(gradients.values())), torch.as_tensor(scale))
        return gradients

    def _mean(self, bad: Tensor) -> dict[Tensor, Tensor]:
        """The accumulated gradients over the number of good micro-batches."""
        gradients = dict(self._accumulated)
        good = (~bad).sum().clamp(min=1)
        torch._foreach_div_(values_of(list(gradients.values())), good.float())
        return gradients

    def _apply(self, gradients: dict[Tensor, Tensor], skipped: Tensor) -> None:
        """Update the masters and round them into the weights, unless the step is skipped."""
        for master, gradient in gradients.items():
            master.grad = gradient.to(master.dtype)
        if self._skips_on_device():
            self._step_on_device(skipped)
        elif not bool(skipped):  # The one place where a step waits for the device.
            self.optimizer.step()
        else:
            return
        self._publish()

    def _skips_on_device(self) -> bool:
        """True where the optimizer's fused kernel takes the verdict itself."""
        fused = all(group.get("fused") for group in self.param_groups)
        return fused and getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def _step_on_device(self, skipped: Tensor) -> None:
        fused: Any = self.optimizer
        fused.grad_scale, fused.found_inf = None, skipped.float()
        try:
            self.optimizer.step()
        finally:
            del fused.grad_scale, fused.found_inf

    def _publish(self) -> None:
        """Round the masters into the half weights; beyond the format's range, to its end."""
        by_format: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for parameter, master in self._half_pairs():
            by_format.setdefault(parameter.dtype, []).append((parameter, master))
        for half, pairs in by_format.items():
            weights, masters = ([p.detach() for p, _ in pairs], [m.detach() for _, m in pairs])
            limit = torch.finfo(half).max
            torch._foreach_copy_(weights, masters)
            # The copy rounds what lies beyond the range to inf; it belongs at the range's end.
            torch._foreach_clamp_max_(weights, limit)
            torch._foreach_clamp_min_(weights, -limit)

    def _step_with_closure(
        self, closure: Callable[[], Any], scaler: LossScaler | None
    ) -> StepResult:
        if scaler is not None or self._half_pairs():
            raise ConfigError(
                f"optimizer={type(self.optimizer).__name__}: a closure needs fp32 weights and no "
                "loss scaling; use dtype=fp32 loss_scaling=none or an optimizer without a closure"
            )
        with torch.enable_grad():
            loss = torch.as_tensor(self.optimizer.step(closure))
        values = values_of([p.grad for p in self._masters if p.grad is not None])
        amax = amax_of(values, self._device)
        one = torch.ones((), device=self._device)
        never = torch.zeros((), dtype=torch.bool, device=self._device)
        return StepResult(never, amax, norm_of(values, self._device), one, loss=loss)


def _zero_where(bad: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` itself, or zeros of its kind where `bad`."""
    if not gradient.is_sparse:
        return torch.where(bad, torch.zeros_like(gradient), gradient)
    values = torch.where(bad, torch.zeros_like(gradient.values()), gradient.values())
    return torch.sparse_coo_tensor(
        gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
    )


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _refuse_other_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name in sorted(own.keys() ^ weights.keys()):
        what = "is missing from" if name in own else "is unknown to the model but in"
        raise CheckpointError(f"weights: {name!r} {what} the checkpoint; load the model it is of")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise CheckpointError(
                f"weights: {name!r} has shape {tuple(weights[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} in the model; load the model it is of"
            )


def _refuse_complex(parameter: Tensor, index: int) -> None:
    if parameter.is_complex():
        raise ConfigError(
            f"optimizer: parameter {index} of shape {tuple(parameter.shape)} is {parameter.dtype}; "
            "masters hold real numbers: store it as two real parameters or use dtype=fp32"
        )
