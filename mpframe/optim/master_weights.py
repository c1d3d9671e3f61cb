"""fp32 master weights around any torch optimizer, and a step that is all or nothing.

A half weight w cannot take small updates: 1 + 2^-12 rounds back to 1. So each half parameter has a
master m in fp32 that the wrapped optimizer updates in the parameter's place,

    m <- optimizer(m, fp32(g) / scale),    w <- round_to_half(m)

and weight decay, momentum and second moments act on, and live beside, fp32 values. An fp32
parameter is its own master: the wrapper adds nothing to it but the check of its gradient.

A step consumes the gradients, whether it is skipped or not: afterwards no parameter and no master
has one.

The wrapped optimizer stays the same object, so schedules built on it go on working; those built on
the wrapper move it as well.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.distributed.world import ALONE, World
from mpframe.errors import CheckpointError, ConfigError
from mpframe.loss_scaling.interface import LossScaler, scale_of
from mpframe.optim.accumulation import Accumulator, Averaged, StepGradients
from mpframe.optim.buckets import Bucket, in_buckets, steps_by_parameter
from mpframe.optim.closure import (
    evaluate,
    missing_closure,
    needs_closure,
    refuse_beside_closure,
    runs_closure_first,
    step_with_closure,
    take_closure,
)
from mpframe.optim.gradients import (
    Gradients,
    agreed,
    as_count,
    before_the_sum,
    check_clipping,
    clip,
    not_finite,
)
from mpframe.optim.masters.master import copy_to_params
from mpframe.optim.masters.masters import Masters, load_by_name, note_wrapped, refuse_wrapped
from mpframe.optim.masters.split_master import KINDS
from mpframe.optim.masters.widening import widen_turned, widen_written
from mpframe.optim.masters.write_detector import adopt_writes
from mpframe.optim.param_group import ParamGroup, refuse_other_groups
from mpframe.optim.sparse_gradients import refuse_untaken
from mpframe.optim.step_result import StepResult
from mpframe.optim.unfreezing import fill_momentum
from mpframe.optim.verdict import Verdict, read
from mpframe.tree import HALF, is_waited_for


class MasterWeights(Optimizer):
    """Wraps a torch optimizer so that it updates fp32 masters of half parameters.

    Schedulers and hooks meet it as an `Optimizer`. Its groups, state, defaults and hooks are those
    of the wrapped optimizer; it keeps no copies of them.

    Args:
        optimizer: any torch optimizer, over parameters of any mix of float32, float16, bfloat16,
            on one device.
        masters: fp32 values to start from, by parameter; copied. They may include parameters of
            groups that are added later. A half parameter without a value here keeps the master
            that it has; if it has none, its master starts from the half value.
        keep_masters: False updates the half weights themselves, to study what masters are for;
            "split" keeps of each master the bits alone that a bfloat16 weight lacks.

    Raises:
        ConfigError: a parameter is complex or sparse in half, the parameters are on several
            devices, or the optimizer is wrapped already.

    Attributes:
        optimizer: the wrapped one, the same object.
        needs_closure: the optimizer evaluates the loss itself, as LBFGS does.
        skips_on_device: the optimizer's kernels take the verdict on the device (torch's fused ones
            do) and the host would wait for that device, as for any but a CPU. None before the first
            step, which makes the optimizer's state: a skip on the device would leave that state
            behind, with arbitrary values in SGD's momentum.
        world: the ranks that step together, each over parameters of the same values. What
            `accumulate` took is averaged over them, and they agree on whether a step is skipped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: Mapping[Tensor, Tensor] | None = None,
        *,
        keep_masters: bool | str = True,
    ) -> None:
        refuse_wrapped(optimizer)
        self.optimizer = optimizer
        self.needs_closure = needs_closure(optimizer)
        self._known = Masters({} if masters is None else masters, KINDS[keep_masters])
        self._known_groups = 0
        self.skips_on_device: bool | None = None
        self.world: World = ALONE
        self._keeps_masters = bool(keep_masters)
        self._buckets: list[Bucket] = [[]]
        self._accumulator: Accumulator | None = None
        self._consumed = False
        self._taken_sparse: set[Tensor] = set()
        self._share_hooks()
        self._register_groups()

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        """The wrapped optimizer's groups; their `params` are the model's own parameters."""
        owners = self._masters.owners
        return [
            ParamGroup(group, [owners[master] for master in group["params"]])
            for group in self.optimizer.param_groups
        ]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state, by the model's own parameters."""
        owners = self._masters.owners
        return {owners.get(master, master): own for master, own in self.optimizer.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """What the wrapped optimizer's groups begin with."""
        return self.optimizer.defaults

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._masters.device

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that this optimizer moves, in the order of its groups."""
        return [parameter for parameter in self._masters if parameter.requires_grad]

    def holds(self, parameter: Tensor) -> bool:
        """Whether `parameter` is in one of the groups."""
        return parameter in self._masters

    def master_of(self, parameter: Tensor) -> Tensor:
        """The fp32 tensor the update acts on: `parameter` itself if it is fp32.

        Of a split master it is a copy.
        """
        return self._masters[parameter]

    def stepped(self, parameter: Tensor) -> Tensor:
        """The tensor in the wrapped optimizer's groups that stands for `parameter`.

        Its state is kept by it. That of a split master has no memory outside of the step.
        """
        return self._masters.stepped(parameter)

    def set_requires_grad(self, parameters: Iterable[Tensor], requires_grad: bool) -> None:
        """Freeze some of the parameters, or train them from the next step on.

        A frozen one gets no gradient: the optimizer leaves it, its master and its state alone.
        """
        masters = []
        for parameter in parameters:
            masters.append(self.stepped(parameter).requires_grad_(requires_grad))
            parameter.requires_grad_(requires_grad)
        if requires_grad:
            fill_momentum(self.optimizer, masters)
        self.skips_on_device = None  # What is trained again has no state yet.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its half parameters get masters."""
        self.optimizer.add_param_group(param_group)
        self._register_groups()

    def join(self, world: World) -> None:
        """Step together with other ranks; see `world`."""
        self.world = world

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of parameters and masters, and what was accumulated."""
        self.optimizer.zero_grad(set_to_none)
        for parameter in self._known.half:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
        self._accumulator = None
        self._consumed = False

    @torch.no_grad()
    def accumulate(self, scale: Tensor | float = 1.0, count: Tensor | float = 1) -> Tensor:
        """Add this micro-batch's gradients, unscaled, to fp32 accumulators and clear them.

        A micro-batch whose gradients are not finite, or whose count is 0, adds nothing to the mean
        that `step` takes. If none is left, `step` skips. It does not wait for the device.

        Args:
            scale: the loss scale of the backward pass, > 0.
            count: how many samples (or tokens) the loss is the mean of, >= 0: a number, or 0-d on
                the device. The mean weighs each micro-batch, on each rank, by it. Gradients that
                `step` finds without a call of `accumulate` count 1.

        Returns:
            0-d fp32, the micro-batch's amax, not weighed; inf or nan if it was dropped, 0 if it
            counts 0.
        """
        gradients = self.take(scale, count)
        self.keep(gradients)
        return gradients.amax

    def keep(self, gradients: Gradients) -> None:
        """Add a micro-batch's gradients to the accumulators, unless their amax is not finite."""
        if self._accumulator is None:
            self._accumulator = Accumulator()
        self._accumulator.add(gradients)

    def keep_means(
        self, means: Mapping[Tensor, Tensor], amax: Tensor | None, before: Tensor | None
    ) -> None:
        """Take the gradients of a step that the ranks have averaged already.

        Args:
            means: fp32 and unscaled, by parameter; others than this optimizer's are left out.
            amax: 0-d fp32, the largest magnitude of this optimizer's on any rank; None: it is
                looked for.
            before: 0-d fp32, what the scaler is told: the largest magnitude on any rank before;
                None if there is no scaler.
        """
        own = {self._masters.stepped(p): means[p] for p in self._masters if p in means}
        self._accumulator = Averaged(own, amax, before, self.device)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        scaler: LossScaler | Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        skip_mask: Tensor | None = None,
        skip_if_dropped: bool = False,
        closure: Callable[[], Any] | None = None,
    ) -> StepResult:
        """Unscale, check, clip, update or skip, and tell the scaler: one step, all or nothing.

        It consumes the gradients: afterwards every parameter's is None. Without any gradient
        nothing is updated and amax is 0, as in torch.

        Args:
            scaler: scaled this step's loss; None: the loss was not scaled. A function without a
                `scale` is a closure, which torch's users pass first.
            max_norm: clip the global 2-norm of the gradients to this, > 0 and finite; None: do
                not clip.
            max_value: clamp each value of the gradients to [-max_value, max_value] instead, > 0
                and finite; None: do not clip.
            skip_mask: 0-d bool on the device; True skips the step whatever its gradients are.
            skip_if_dropped: skip the step if any of its micro-batches was dropped, not only if all
                were.
            closure: computes the loss and calls backward. The optimizers of torch.optim call it
                once, before the step. LBFGS and optimizers from elsewhere call it themselves: that
                takes fp32 weights, no scaler and no clipping, and no such step is ever skipped.

        Returns:
            What was done. After a skip no parameter, master or optimizer state has changed.

        Raises:
            ConfigError: a second step without new gradients; `max_norm` or `max_value` out of
                its range, or both given; a closure that is missing, or that meets half weights, a
                scaler, clipping or a skip_mask; a sparse gradient that the optimizer does not take.
                Nothing has changed.
        """
        check_clipping(max_norm=max_norm, max_value=max_value)
        widen_written()
        scaling, closure = take_closure(scaler, closure)
        if self.needs_closure or (closure is not None and not runs_closure_first(self.optimizer)):
            return self._step_with_closure(closure, scaling, max_norm or max_value, skip_mask)
        loss = None if closure is None else evaluate(closure)
        scale = scale_of(scaling)
        gathered = self.gather(scale)
        if gathered.spent:
            raise no_new_gradients()
        gradients = gathered.gradients
        skipped = not_finite(gathered.worst() if skip_if_dropped else gradients.amax)
        norm = gradients.norm()
        if self.world.sharding is not None:  # This rank has a part of the gradients.
            norm = self.world.norm(norm)
        if max_norm is not None:
            # A norm beyond fp32's range would clip every gradient to zero: such a step is skipped.
            skipped = skipped | not_finite(norm)
            gradients = clip(gradients, norm, max_norm)
        if skip_mask is not None:
            skipped = skipped | skip_mask
        verdict = None if self.skips_on_device else read([(skipped, gathered.dropped)])[0]
        if max_value is not None:
            gradients = replace(gradients, max_value=max_value)
        self.apply(gradients, skipped, verdict)
        if scaling is not None:
            scaling.update(gathered.largest)
        used = scale if isinstance(scale, Tensor) else torch.ones_like(norm)
        return StepResult(skipped, gradients.amax, norm, used, gathered.dropped, loss, verdict)

    def gather(self, scale: Tensor | float) -> StepGradients:
        """The gradients of the step, measured: accumulated, or of one backward pass.

        Args:
            scale: the loss scale of a backward pass that was not accumulated yet, > 0.

        Raises:
            ConfigError: the optimizer does not take a gradient, as it is sparse.
        """
        if len(self.optimizer.param_groups) > self._known_groups:  # No call: every step asks.
            self._register_groups()
        gradients = self._known.take_gradients(scale)
        if self._accumulator is None:
            if self.world.size > 1:
                gradients = agreed(gradients, self.world)
            spent = self._consumed and not gradients.by_master
            gathered = StepGradients(gradients, gradients.amax, spent=spent)
        else:
            if gradients.by_master:
                self._accumulator.add(gradients)
            gathered = self._accumulator.mean(self._known.values(), self.world)
            self._accumulator = None
        if gathered.gradients.sparse:
            self._try_sparse(gathered.gradients.sparse)
        return gathered

    def take(self, scale: Tensor | float, count: Tensor | float) -> Gradients:
        """The gradients, measured and with their count; parameters and masters are left without."""
        gradients = before_the_sum(self._masters.take_gradients(scale), self.world)
        count = as_count(count, self.device)
        if self.world.sharding is not None:  # They are the ranks' mean.
            count = self.world.mean(count)
        amax = torch.where(count == 0, 0.0, gradients.amax)  # Of nothing, whatever they are.
        return agreed(replace(gradients, count=count, amax=amax), self.world)

    @torch.no_grad()
    def apply(self, gradients: Gradients, skipped: Tensor, verdict: Verdict | None) -> None:
        """Update the masters and round them into the weights, unless the step is skipped.

        It goes by buckets: the gradients of some of them are widened, applied and given back, and
        their weights rounded while they are in the cache, before the next are widened.

        Args:
            gradients: what `gather` gave; they are used up.
            skipped: 0-d bool on the device.
            verdict: the same, known on the host; None only if `skips_on_device`.
        """
        self._consumed = bool(gradients.by_master)
        if verdict is not None and verdict.skipped:
            return
        by_master = gradients.by_master
        moved = list(by_master)
        buckets = self._buckets
        if len(buckets) > 1 and not steps_by_parameter(self.optimizer):
            buckets = [[pair for bucket in buckets for pair in bucket]]
        *others, last = buckets
        for bucket in others:
            masters = [held.value for _, held in bucket if held.value in by_master]
            self._update(bucket, masters, gradients, skipped, verdict)
        self._update(last, list(by_master), gradients, skipped, verdict)
        # Fused kernels do not raise the counters by which a kept cast knows that it is old.
        torch.autograd.graph.increment_version(moved)
        if verdict is not None and self.skips_on_device is None:
            takes = is_waited_for(self.device) and _takes_found_inf(self.optimizer)
            self.skips_on_device = takes

    def saturated(self) -> Tensor:
        """How many half weights are held at the end of their range (0-d int64, on the device)."""
        return self._masters.saturated()

    def saturation_warning(self, model: nn.Module) -> str | None:
        """A line on half weights held at the end of their range; None if there are none.

        Waits for the device: ask at reports, not in steps.
        """
        return self._masters.saturation_warning(model)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, in the layout a plain optimizer loads, and the masters.

        `masters` lists the fp32 master of each half parameter in the groups' order, None if a
        parameter is its own.
        """
        return {**self.inner_state_dict(), "masters": self._masters.listed()}

    def inner_state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state alone, beside masters that are kept by name."""
        return self._masters.with_shards(self.optimizer.state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this class, or of a plain optimizer, returned.

        A plain optimizer's state has no masters: they stay as they are.

        Raises:
            CheckpointError: the state was made over other parameters; nothing is loaded.
        """
        state = dict(state_dict)
        masters = state.pop("masters", [None for _ in self._masters])
        self._masters.check_listed(masters)
        refuse_other_groups(state, self.optimizer.param_groups)
        try:
            self.optimizer.load_state_dict(self._masters.with_parts(state))
        except ValueError as error:
            raise CheckpointError(
                f"optimizer state: {error}; load it into the model it was made with"
            ) from None
        self._masters.load_listed(masters)
        self.skips_on_device = None

    def masters_by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """The fp32 tensor behind each parameter of `model`, by its name, if there is one."""
        return self._masters.by_name(model)

    @torch.no_grad()
    def load_masters(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Take parameters and buffers by name: masters exactly, half weights as their rounding.

        Raises:
            CheckpointError: a name is missing or unexpected, or a shape differs; nothing is taken.
        """
        load_masters_of([self], model, weights)

    def _step_with_closure(
        self,
        closure: Callable[[], Any] | None,
        scaler: LossScaler | None,
        clip_bound: float | None,
        skip_mask: Tensor | None,
    ) -> StepResult:
        if closure is None:
            raise missing_closure(self.optimizer)
        half = any(parameter.dtype in HALF for parameter in self._masters)
        refuse_beside_closure(
            self.optimizer,
            half=half,
            scaled=scaler is not None,
            clipped=clip_bound is not None,
            masked=skip_mask is not None,
        )
        result = step_with_closure(self.optimizer, closure)
        self._masters.take_gradients(1.0)
        return result

    def _try_sparse(self, sparse: list[Tensor]) -> None:
        refuse_untaken(self.optimizer, [m for m in sparse if m not in self._taken_sparse])
        self._taken_sparse.update(sparse)

    @property
    def _masters(self) -> Masters:
        self._register_groups()  # Other code may have added one to the wrapped optimizer.
        return self._known

    def _register_groups(self) -> None:
        for group in self.optimizer.param_groups[self._known_groups :]:
            self._known.register(self.optimizer, group)
            self._known_groups += 1
            self.skips_on_device = None  # The new parameters have no state yet.
            self._buckets = in_buckets(self._known.half.items(), self._known.device)

    def _share_hooks(self) -> None:
        """Hooks registered here are the wrapped optimizer's: they see the steps it takes."""
        vars(self).update({k: v for k, v in vars(self.optimizer).items() if k.endswith("_hooks")})

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers put a function of their own in the place of `step`.
        return {k: v for k, v in vars(self).items() if k != "step" and not k.endswith("_hooks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        note_wrapped(self.optimizer)
        self._share_hooks()

    def _update(
        self,
        bucket: Bucket,
        masters: list[Tensor],
        gradients: Gradients,
        skipped: Tensor,
        verdict: Verdict | None,
    ) -> None:
        if bucket:
            adopt_writes(bucket, join=True)
        for master, gradient in zip(masters, gradients.take(masters), strict=True):
            if master.dtype in HALF and self._keeps_masters:
                widen_turned(master)
            master.grad = gradient.to(master.dtype)
        if verdict is None:
            self._step_on_device(skipped)
        else:
            self.optimizer.step()
        for master in masters:
            master.grad = None
        if bucket:
            copy_to_params(bucket)

    def _step_on_device(self, skipped: Tensor) -> None:
        fused: Any = self.optimizer
        fused.grad_scale, fused.found_inf = None, skipped.float()
        try:
            self.optimizer.step()
        finally:
            del fused.grad_scale, fused.found_inf


def no_new_gradients() -> ConfigError:
    """The error of a step whose gradients the step before has consumed."""
    return ConfigError(
        "optimizer.step: the step before has consumed the gradients and no backward pass has "
        "left new ones; call backward, or zero_grad where a step without gradients is meant"
    )


@torch.no_grad()
def load_masters_of(
    parts: Sequence[MasterWeights], model: nn.Module, weights: Mapping[str, Tensor]
) -> None:
    """`MasterWeights.load_masters` for a model whose parameters are in several of them."""
    load_by_name(model, [part._masters for part in parts], weights)


def _takes_found_inf(optimizer: Optimizer) -> bool:
    takes = getattr(optimizer, "_step_supports_amp_scaling", False)
    return takes and all(group.get("fused") for group in optimizer.param_groups)
