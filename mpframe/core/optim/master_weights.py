"""fp32 master weights around any torch optimizer, and a step that is all or nothing.

A half weight w cannot take small updates: 1 + 2^-12 rounds back to 1. So each half parameter has a
master m in fp32 that the wrapped optimizer updates in the parameter's place,

    m <- optimizer(m, fp32(g) / scale),    w <- round_to_half(m)

with weight decay, momentum and second moments in fp32. An fp32 parameter is its own master. An
update goes over a bucket of parameters at a time, so few fp32 gradients exist at once.
"""

import inspect
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError
from mpframe.core.loss_scaling.scaler import LossScaler, scale_of
from mpframe.core.optim.gradients import (
    Accumulator,
    Gradients,
    as_count,
    check_clipping,
    in_chunks,
    measure_grads,
)
from mpframe.core.optim.masters import Pair, round_to_weights, sync_from_weights
from mpframe.core.optim.optimizer import OptimizerWrapper
from mpframe.core.optim.widening import Frozen, frozen_beside, widen_turned, widen_written
from mpframe.core.step_result import StepResult, Verdict, read_verdicts
from mpframe.core.tree import HALF, host_waits_for, is_apple

_TORCHS = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"
_STEPS_BY_PARAMETER = {getattr(torch.optim, name) for name in _TORCHS.split()}


class MasterWeights(OptimizerWrapper):
    """Wraps a torch optimizer so that it updates fp32 masters of half parameters.

    Args:
        optimizer: any torch optimizer, over parameters of any mix of float32, float16, bfloat16,
            on one device. A master that is missing starts from the half value.
        keep_masters: False updates the half weights themselves, to study the effect of masters.

    Raises:
        ConfigError: a parameter is complex or sparse in half, the parameters are on several
            devices, or the optimizer is wrapped already.

    Attributes:
        optimizer: the wrapped one, the same object.
        needs_closure: the optimizer evaluates the loss itself, as LBFGS does, and `step` raises.
        skips_on_device: the host need not wait for the device: the optimizer's kernels skip, as
            torch's fused ones do, or the caller undoes a skip. None before the first step of any
            weight, which makes its state: a skip would leave arbitrary values in SGD's momentum.
        comm: the ranks that average their gradients, and agree on whether a step is skipped.
        accumulator: the gradients of the micro-batches since the last step.
        policy: of the precision whose `prepare` made this, if one did.
    """

    def __init__(self, optimizer: Optimizer, *, keep_masters: bool = True) -> None:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is closure.empty
        self.comm: Comm = SINGLE_PROCESS
        self._buckets: list[list[Pair]] = [[]]
        self._frozen: list[Frozen] = []
        self._steps = 0  # how many have begun
        self.accumulator = Accumulator()
        self._means: Gradients | None = None
        self._alone = True  # whether the last step was one micro-batch of one process
        self._consumed = False
        self.stepped_once: set[Tensor] = set()  # masters of which the optimizer has state
        super().__init__(optimizer, keep_masters)

    def set_comm(self, comm: Comm) -> None:
        """Step together with other ranks."""
        self.comm = comm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also accumulated ones. A step consumes them, zeros as well."""
        self.optimizer.zero_grad(set_to_none)
        for parameter, stepped in self._stepped.items():
            if stepped is parameter:
                continue
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
        if self.accumulator.filled:
            self.accumulator = Accumulator()
        self._means, self._consumed = None, False

    @torch.no_grad()
    def accumulate(self, scale: Tensor | float = 1.0, count: Tensor | float = 1) -> Tensor:
        """Add this micro-batch's gradients, unscaled, to fp32 accumulators and clear them.

        A micro-batch whose gradients are not finite, or whose count is 0, is left out of the mean.
        If none is left, `step` skips.

        Args:
            scale: the loss scale of the backward pass, > 0.
            count: how many samples (or tokens) the loss is the mean of, >= 0: a number, or 0-d on
                the device. It is the weight in the mean over micro-batches and ranks. Gradients
                that only `step` finds count 1.

        Returns:
            The micro-batch's amax, 0-d fp32: inf or nan if it was dropped, 0 if it counts 0.
        """
        gradients = self.collect_grads(scale, count)
        self.accumulator.add(gradients)
        return gradients.amax

    @torch.no_grad()
    def collect_grads(self, scale: Tensor | float, count: Tensor | float = 1) -> Gradients:
        """Pop a micro-batch's gradients from parameters and masters, and measure them."""
        alone = self._alone and not self.accumulator.filled  # Its norm will be the step's.
        gradients = measure_grads(self._pop_grads(), scale, self._device, with_norm=alone)
        amax, sharding = gradients.amax, self.comm.sharding
        if sharding is not None:  # The ranks have summed the gradients, and average the count.
            count = self.comm.mean(as_count(count, amax.device))
            amax = sharding.amax_before_sums(amax, gradients.scale, self._stepped)
        if isinstance(count, Tensor) or not count:  # No samples: the gradients mean nothing.
            amax = torch.where(as_count(count, amax.device) == 0, 0.0, amax)
        gradients.count = count
        gradients.amax = self.comm.max(amax) if self.comm.size > 1 else amax
        return gradients

    def set_reduced_grads(
        self, means: Mapping[Tensor, Tensor], amax: Tensor | None, before: Tensor | None
    ) -> None:
        """Set the gradients of a step, which the ranks have averaged during the backward pass.

        `means` are fp32 and unscaled, by parameter. `amax` is their largest magnitude on any rank,
        0-d fp32, or None to compute it. `before` is the amax before averaging, for the scaler.
        """
        self._register_groups()
        grads = {master: means[p] for p, master in self._stepped.items() if p in means}
        self._means = measure_grads(grads, 1.0, self._device, amax)
        if amax is None:
            self._means.amax = self.comm.max(self._means.amax)
        self._means.scaler_amax = before

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        scaler: LossScaler | Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        skip_mask: Tensor | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> StepResult:
        """Unscale, check, clip, update or skip, and tell the scaler: one step, all or nothing.

        It consumes the gradients, also if it skips. Without any gradient nothing is updated and
        amax is 0. After a skip no parameter, master or optimizer state has changed.

        Args:
            scaler: this loss's scaler, if it is scaled. May be a closure, as in torch.
            max_norm: clip the global 2-norm of the gradients to this, > 0 and finite.
            max_value: or clamp each of their values to [-max_value, max_value], > 0 and finite.
            skip_mask: 0-d bool on the device, True to skip the step whatever its gradients are.
            closure: computes the loss and calls backward. It is called once, before the step.

        Raises:
            ConfigError: there are no new gradients, a bound is out of its range, both are given, or
                the optimizer needs a closure (training/trainers/lbfgs.py). Nothing has changed.
        """
        if max_norm is not None or max_value is not None:
            check_clipping(max_norm=max_norm, max_value=max_value)
        if self.needs_closure:
            raise ConfigError(
                f"optimizer={type(self.optimizer).__name__}: evaluates the loss itself; step it "
                "with mpframe.training.trainers.lbfgs, or use an optimizer without a closure"
            )
        scaling, loss = evaluate_closure(scaler, closure)
        scale = scale_of(scaling)
        gradients = self.collect_step_grads(scale)
        if gradients.no_new:
            raise no_new_gradients()
        amax, dropped = gradients.amax, gradients.dropped
        norm = self.norm_of(gradients)
        if max_norm is None:
            found_inf = torch.logical_not(amax < torch.inf, out=torch.empty_like(amax))
        else:
            found_inf = gradients.clip(norm, max_norm)
        if skip_mask is not None:
            found_inf = torch.maximum(found_inf, skip_mask)
        verdict = None if self.skips_on_device else read_verdicts([(found_inf, dropped)])[0]
        gradients.max_value = max_value
        self.apply(gradients, found_inf, verdict)
        if not isinstance(scale, Tensor):
            scale = torch.ones_like(norm) if scaling is None else scaling.scale
        if scaling is not None:
            scaling.update(amax if gradients.scaler_amax is None else gradients.scaler_amax)
        return StepResult(found_inf, amax, norm, scale, dropped, loss, verdict)

    def norm_of(self, gradients: Gradients) -> Tensor:
        """Return the global 2-norm, 0-d fp32, of gradients of which this rank may have parts."""
        norm = gradients.norm(self._copies)
        return norm if self.comm.sharding is None else self.comm.norm(norm)

    def collect_step_grads(self, scale: Tensor | float) -> Gradients:
        """Return the step's gradients: accumulated, or left by a backward pass with this scale."""
        left = self._means is None and not self.accumulator.filled
        if left and self.comm.size > 1:
            self.accumulate(scale)  # So that the ranks average them.
        grads, device = self._pop_grads(), self._device
        for frozen in self._frozen:
            widen_written(frozen, self._steps)
        self._steps += 1
        if self._means is not None:
            gradients = self._means
        elif self.accumulator.filled:
            if grads:
                self.accumulator.add(measure_grads(grads, scale, device))
            gradients = self.accumulator.mean(self._stepped.values(), self.comm)
            # Most steps are as the one before.
            self._alone = gradients.dropped is None and self.comm.size == 1
            self.accumulator = Accumulator()
        else:
            gradients = measure_grads(grads, scale, device, with_norm=True)
        gradients.no_new = left and self._consumed and not gradients.by_master
        self._means = None
        if self.skips_on_device and not self.stepped_once.issuperset(gradients.by_master):
            self.skips_on_device = None
        return gradients

    @torch.no_grad()
    def apply(self, gradients: Gradients, found_inf: Any, verdict: Verdict | None) -> None:
        """Update the masters and round them into the weights, unless `found_inf`, 0-d fp32, is 1.

        It goes bucket by bucket. `verdict` is the same on the host, unless `skips_on_device`.
        """
        self._consumed = bool(gradients.by_master)
        if verdict is not None and verdict.skipped:
            return
        if verdict is not None or not self._has_kernels_that_skip():
            found_inf = None
        buckets, by_master = self._buckets, gradients.by_master
        moved = list(by_master)
        if len(buckets) > 1 and not _steps_by_parameter(self.optimizer):
            buckets = [[*chain(*buckets)]]
        for bucket in buckets[:-1]:
            values = [master.value for _, master in bucket]
            masters = [master for master in values if master in by_master]
            self._update(bucket, masters, gradients, found_inf)
        self._update(buckets[-1], list(by_master), gradients, found_inf)
        # Fused kernels do not bump the versions by which a cached cast knows that it is stale.
        torch.autograd.graph.increment_version(moved)
        if verdict is not None and self.skips_on_device is None:
            self.stepped_once.update(moved)
            self.skips_on_device = host_waits_for(self._device) and self._has_kernels_that_skip()

    def _has_kernels_that_skip(self) -> bool:
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        takes_found_inf = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        return fused and takes_found_inf and not is_apple(self._device)

    def _register_groups(self) -> None:
        if len(self.optimizer.param_groups) > self._registered:
            super()._register_groups()
            masters = self._masters
            self._buckets = [[(w, masters[w]) for w in chunk] for chunk in in_chunks(masters)]
            self._frozen = frozen_beside(self._stepped)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_frozen": []}  # A copy's frozen weights are fp32.

    def _update(
        self, bucket: list[Pair], masters: list[Tensor], gradients: Gradients, found_inf: Any
    ) -> None:
        if bucket:  # In fp32 there are no half weights.
            sync_from_weights(bucket)
        for master, gradient in zip(masters, gradients.pop_fp32(masters), strict=True):
            if master.dtype in HALF and self._keeps_masters:
                widen_turned(master)
            master.grad = gradient.to(master.dtype)
            if not gradient.is_sparse and gradient.stride() != master.stride():  # See _add_unless.
                master.grad = torch.empty_like(master).copy_(gradient)
        self.step_wrapped(found_inf=found_inf)
        for master in masters:
            master.grad = None
        if bucket:
            round_to_weights(bucket)


def evaluate_closure(scaler: Any, closure: Any = None) -> tuple[Any, Tensor | None]:
    """Return the scaler, and the closure's loss, detached. torch's callers pass a closure first."""
    if isinstance(scaler, Tensor | float | int | torch.amp.GradScaler):
        raise ConfigError("optimizer.step: takes a scaler of mpframe itself, not its scale")
    if callable(scaler) and not hasattr(scaler, "scale"):
        scaler, closure = None, scaler
    if closure is None:
        return scaler, None
    with torch.enable_grad():
        loss = closure()
    return scaler, None if loss is None else torch.as_tensor(loss).detach()


def no_new_gradients() -> ConfigError:
    """Return the error of a step whose gradients the step before has consumed."""
    return ConfigError(
        "optimizer.step: the step before has consumed the gradients and no backward pass has "
        "left new ones; call backward, or zero_grad where a step without gradients is meant"
    )


def _steps_by_parameter(optimizer: Any) -> bool:
    """Return whether a step per bucket equals one step. Hooks expect a single step."""
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    every = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    foreign = [hook for hook in every if not str(hook.__module__).startswith("mpframe.")]
    return type(optimizer) in _STEPS_BY_PARAMETER and not hooked and not foreign
