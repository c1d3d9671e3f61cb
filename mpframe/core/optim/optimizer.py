"""A torch optimizer over fp32 masters, as the rest of torch sees it: groups, state, checkpoints.

The optimizer steps one tensor for each parameter: its master if it is half, the rows that this rank
holds if it is sharded, else the parameter itself. Schedulers see the model's parameters in the
groups, and share options and hooks with the wrapped optimizer. `MasterWeights` adds the step.
"""

from collections import UserDict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpframe.core.comm import copies_of, is_sharded, part_for, part_of, shard_like
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.optim.masters import (
    Master,
    clear_master,
    load_weights,
    master_behind,
    master_for,
    rebind_master,
    sync_from_weights,
)
from mpframe.core.tree import HALF, map_tensors, to_fp32

_WRAPPED: WeakSet[Optimizer] = WeakSet()  # Their parameters are masters.


def refuse_wrapped(optimizer: Optimizer, *_: Any) -> None:
    """Raise ConfigError if a wrapped optimizer is wrapped again, or steps by itself."""
    if optimizer in _WRAPPED:
        raise ConfigError(
            f"optimizer={type(optimizer).__name__}: has its masters already; use what "
            "precision.prepare returned, or make a new optimizer"
        )


register_optimizer_step_pre_hook(refuse_wrapped)


class OptimizerWrapper(Optimizer):
    """Makes an optimizer step fp32 masters instead of half parameters: the base of `MasterWeights`.

    Without `keep_masters` every parameter is its own master.
    """

    def __init__(self, optimizer: Optimizer, keep_masters: bool) -> None:
        refuse_wrapped(optimizer)
        self.optimizer = optimizer
        self.skips_on_device: bool | None = None
        self.policy: Any = None
        self._keeps_masters = keep_masters
        self._registered = 0  # how many groups
        self._stepped: dict[Tensor, Tensor] = {}  # what the optimizer steps, by parameter
        self._masters: dict[Tensor, Master] = {}  # by half parameter
        self._copies: dict[Tensor, int] = {}  # how many ranks hold it, by sharded part
        self._device = torch.device("cpu")  # of all parameters
        self._share_with_wrapped()
        self._register_groups()

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        """The wrapped optimizer's groups, with the model's parameters as `params`."""
        parameter_of = {stepped: parameter for parameter, stepped in self._stepped.items()}
        return [
            ParamGroup(group, [parameter_of.get(t, t) for t in group["params"]])
            for group in self.optimizer.param_groups
        ]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state, by the model's parameters: its entries in a new dict."""
        parameter_of = {stepped: parameter for parameter, stepped in self._stepped.items()}
        return {parameter_of.get(t, t): state for t, state in self.optimizer.state.items()}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that require gradients, in the order of the groups."""
        return [parameter for parameter in self._stepped if parameter.requires_grad]

    def holds(self, parameter: Tensor) -> bool:
        """Return whether `parameter` is in one of the groups."""
        return parameter in self._stepped

    def master_of(self, parameter: Tensor) -> Tensor:
        """Return the fp32 tensor the update acts on: `parameter` if it is fp32."""
        master = self._masters.get(parameter) or master_behind(parameter)
        return self._stepped[parameter] if master is None else master.current(parameter)

    def optimizer_param(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the wrapped optimizer steps for `parameter`."""
        return self._stepped[parameter]

    def step_wrapped(self, *closure: Any, found_inf: Tensor | None = None) -> Any:
        """Step the wrapped optimizer, whose kernels skip if `found_inf`, 0-d fp32, is not 0."""
        wrapped: Any = self.optimizer
        _WRAPPED.discard(wrapped)
        try:
            if found_inf is not None:
                wrapped.grad_scale, wrapped.found_inf = None, found_inf
            return wrapped.step(*closure)
        finally:
            _WRAPPED.add(wrapped)
            if found_inf is not None:
                del wrapped.grad_scale, wrapped.found_inf

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer, and masters of its half parameters."""
        self.optimizer.add_param_group(param_group)
        try:
            self._register_groups()
        except ConfigError:
            del self.optimizer.param_groups[self._registered :]
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state and `masters`, in the order of the groups."""
        self._register_groups()
        masters = [self.master_of(p) if p in self._masters else None for p in self._stepped]
        return {**self.inner_state_dict(), "masters": masters}

    def inner_state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state without masters, which are saved by name."""
        return self._map_state(shard_like, self.optimizer.state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. A plain optimizer's, which has no `masters`, leaves them as they are.

        Raises:
            CheckpointError: the state was made over other parameters. Nothing is loaded.
        """
        self._register_groups()
        state = dict(state_dict)
        saved = state.pop("masters", [None for _ in self._stepped])
        if len(saved) != len(self._stepped) or any(
            value is not None and value.shape != tensor.shape
            for value, tensor in zip(saved, self._stepped.values(), strict=True)
        ):
            raise CheckpointError(
                f"optimizer state holds {len(saved)} masters, and not the shapes of the model's "
                f"{len(self._stepped)}: load it into the model it was made with"
            )
        _check_group_names(state.get("param_groups", ()), self.optimizer.param_groups)
        try:
            self.optimizer.load_state_dict(self._map_state(part_for, state))
        except ValueError as error:
            raise CheckpointError(
                f"optimizer state: {error}; load it into the model it was made with"
            ) from None
        for (parameter, tensor), value in zip(self._stepped.items(), saved, strict=True):
            if value is not None and parameter in self._masters:
                self._masters[parameter].start_from(parameter, value)
            elif value is not None:
                tensor.copy_(value)
        self.skips_on_device = None

    def masters_by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the fp32 tensor behind each parameter of `model`, by its name, if it has one."""
        self._register_groups()
        masters: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if is_sharded(parameter):
                masters[name] = parameter.detach()
            elif parameter in self._stepped or master_behind(parameter) is not None:
                masters[name] = self.master_of(parameter).detach()
        return masters

    @torch.no_grad()
    def load_masters(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Load parameters and buffers by name: masters exactly, half weights as their rounding.

        Raises:
            CheckpointError: a name is missing or unexpected, or a shape differs. Nothing is loaded.
        """
        load_weights(model, self.masters_by_name(model), weights)

    def _pop_grads(self) -> dict[Tensor, Tensor]:
        """Pop the gradients, by master, from parameters and (added in fp32) from masters."""
        if len(self.optimizer.param_groups) > self._registered:
            self._register_groups()
        popped = {}
        for parameter, master in self._stepped.items():
            gradient, of_master = parameter.grad, None if master is parameter else master.grad
            if gradient is None:
                gradient = of_master
            elif of_master is not None:
                wide = gradient.float()
                # torch adds a sparse gradient to a dense one, and not the other way round.
                gradient = wide + of_master if of_master.is_sparse else of_master + wide
            if gradient is not None:
                popped[master] = part_of(gradient) if self._copies else gradient
                parameter.grad = master.grad = None
        return popped

    def _register_groups(self) -> None:
        for group in self.optimizer.param_groups[self._registered :]:
            self._check(group["params"])
            for index, parameter in enumerate(group["params"]):
                group["params"][index] = self._stepped[parameter] = self._master_for(parameter)
            self._registered += 1
            self.skips_on_device = None  # The new parameters have no state yet.

    def _master_for(self, parameter: Tensor) -> Tensor:
        """Return the tensor to step for a parameter. A new master takes over its state."""
        if parameter.dtype not in HALF or not self._keeps_masters:
            clear_master(parameter)
            part = part_of(parameter)
            if is_sharded(parameter):
                self._copies[part] = copies_of(parameter)
            return part
        master = self._masters[parameter] = master_for(parameter)
        sync_from_weights([(parameter, master)])
        if parameter in self.optimizer.state:
            state = self.optimizer.state.pop(parameter)
            self.optimizer.state[master.value] = {k: to_fp32(v) for k, v in state.items()}
        return master.value.requires_grad_(parameter.requires_grad)

    def _check(self, parameters: list[Tensor]) -> None:
        if not self._stepped and parameters:
            self._device = parameters[0].device
        for index, parameter in enumerate(parameters):
            shape = "no shape yet" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
            what = f"optimizer: parameter {index} of {shape} is"
            if parameter in self._stepped:
                raise ConfigError(f"{what} in a group already, and would be stepped twice")
            if parameter.is_complex():
                raise ConfigError(
                    f"{what} {parameter.dtype}; masters hold real numbers: store it as two real "
                    "parameters"
                )
            keeps_master = self._keeps_masters and parameter.dtype in HALF
            if keeps_master and parameter.layout != torch.strided:
                raise ConfigError(
                    f"{what} sparse and {parameter.dtype}; a half weight is dense: store it in "
                    "fp32 (ops.modules=...:fp32), or dense"
                )
            if parameter.device != self._device:
                raise ConfigError(
                    f"optimizer: parameters on {self._device} and {parameter.device}; a step is "
                    "skipped as a whole, so give each device its own optimizer"
                )

    def _map_state(self, change: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Return a `state_dict` with the tensors of sharded parameters changed."""
        mapped = dict(state["state"])
        for index, parameter in enumerate(self._stepped):
            if is_sharded(parameter) and index in mapped:
                mapped[index] = map_tensors(partial(change, parameter), mapped[index])
        return {**state, "state": mapped}

    def _share_with_wrapped(self) -> None:
        _WRAPPED.add(self.optimizer)
        self.defaults = self.optimizer.defaults
        vars(self).update({k: v for k, v in vars(self.optimizer).items() if k.endswith("_hooks")})

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers replace `step` by another function.
        return {k: v for k, v in vars(self).items() if k != "step" and not k.endswith("_hooks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share_with_wrapped()
        for parameter, master in self._masters.items():
            rebind_master(parameter, master)


class ParamGroup(UserDict[str, Any]):
    """A wrapped optimizer's group, with the model's `params` instead of the masters."""

    def __init__(self, group: dict[str, Any], params: list[Tensor]) -> None:
        self.data = group
        self._params = params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise ConfigError(
                "optimizer.param_groups: params stay as they are; add some with add_param_group, "
                "or make a new optimizer"
            )
        self.data[key] = value


def _check_group_names(saved: Iterable[Any], groups: Iterable[Any]) -> None:
    """Raise CheckpointError if the groups of a state have other names or another order.

    torch compares only their sizes, and would give one group the settings of another.
    """
    then, now = ([str(g["name"]) for g in some if "name" in g] for some in (saved, groups))
    if then != now:
        raise CheckpointError(
            f"optimizer.groups: the checkpoint has {', '.join(then) or 'none'}, this run "
            f"{', '.join(now) or 'none'}; resume with the groups it was made with"
        )
