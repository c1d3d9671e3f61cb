"""`Precision`: one object that makes a model and its optimizer run in a dtype mode.

precision = Precision("mixed", half="float16")
model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters()))
with precision.cast():
    loss = loss_fn(model(inputs), targets)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mpframe.core.casts import outside_casts
from mpframe.core.errors import ConfigError
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.core.optim.masters import set_master
from mpframe.core.optim.optimizer import refuse_wrapped
from mpframe.core.optim.widening import watch
from mpframe.core.tree import HALF, device_of
from mpframe.precision.cast import Casts, cast_block, casts_here, pin_modules
from mpframe.precision.handlers import OpHandler, cast_to
from mpframe.precision.op_lists import PINS, OpLists
from mpframe.precision.policy import NO_PRODUCTS, Policy
from mpframe.precision.storage import store
from mpframe.precision.torch_functions import follow_backward_passes, stop_following
from mpframe.precision.trace import WeightUses, initialize_lazy, trace


class Precision:
    """A dtype mode, as it is applied to a model and its optimizer.

    Args:
        mode: `fp32`, `mixed` (half weights, fp32 masters) or `amp` (fp32 weights, ops cast).
        half: `float16` or `bfloat16`, the 16-bit format of the run.
        ops: the op lists and module pins. If None, the shipped default lists.
        compute: how half ops run on a CPU: by `native` kernels, `emulated` (half inputs, fp32
            accumulation, one rounding), or `auto` (native if the CPU can). It also holds for
            products below 16 bits, for which `auto` is native only on GPUs.
        master_weights: False leaves the masters out, to study what they are for.
        products: the recipe that computes matrix products and convolutions below 16 bits, a name or
            a `Recipe`, or `none` to keep them in half.
        recipes: your recipes, by the names that `products` and pins use.
        op_handlers: run ops in another way. They are asked before the lists.

    Raises:
        ConfigError: a value is none of the ones named here.
    """

    def __init__(
        self,
        mode: str = "fp32",
        half: str = "float16",
        *,
        ops: OpLists | None = None,
        compute: str = "auto",
        master_weights: bool = True,
        products: Any = "none",
        recipes: Mapping[str, Any] | None = None,
        op_handlers: Sequence[OpHandler] = (),
    ) -> None:
        if not isinstance(products, str):
            recipes = {**(recipes or {}), products.name: products}
            products = products.name
        lists = OpLists.named() if ops is None else ops
        self.policy = Policy(mode, half, lists, compute, products, recipes or {})
        self.op_handlers = tuple(op_handlers)
        names = {products, *lists.modules.values()} - {*PINS, NO_PRODUCTS}
        if names or recipes:
            from mpframe.precision.lowbit.handler import find_recipes  # Few runs need it.

            self.policy, recipe_handler = find_recipes(self.policy)
            self.op_handlers += (recipe_handler,)
        self.master_weights = master_weights
        casts = self.policy.casts or bool(self.op_handlers)
        self._casts = Casts(self.policy, self.op_handlers) if casts else None
        self._hooked: WeakSet[nn.Module] = WeakSet()
        self._uses: WeakKeyDictionary[nn.Module, WeightUses] = WeakKeyDictionary()

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example: Any = None,
        *,
        keep_frozen: bool = True,
    ) -> tuple[nn.Module, MasterWeights]:
        """Store the weights as the mode says and wrap the optimizer, both in place.

        Call it for each optimizer of a model. They share a weight's master, and fp32 values are
        kept for later optimizers and groups.

        Args:
            model: on its device, in fp32, before the first step. If a weight is already
                half, its master starts from the half value.
            optimizer: over the model's parameters.
            example: an input of the model for `trace`, or None for no trace.
            keep_frozen: False drops the fp32 values of weights that need no gradient. It saves 4
                bytes each, but such a weight, if it is trained later, starts from its half value.

        Returns:
            The same model, and the wrapped optimizer, with masters from before rounding.

        Raises:
            ConfigError: a parameter is complex, or lazy without an example. Or a pin names no
                module, or the optimizer is another model's.
        """
        if not hasattr(optimizer, "param_groups"):  # apex's LARC, around one, is no Optimizer.
            raise ConfigError(
                f"optimizer={optimizer!r:.40}: must be a torch optimizer; prepare each of several"
            )
        refuse_wrapped(optimizer)
        wanted = {p for group in optimizer.param_groups for p in group["params"]}
        weights = set(model.parameters())
        if wanted and wanted.isdisjoint(weights) and any(p.requires_grad for p in weights):
            raise ConfigError(
                f"optimizer={type(optimizer).__name__}: holds no parameter of this "
                f"{type(model).__name__}; make it over model.parameters()"
            )
        self.policy.check_patterns(model)
        if example is not None and model not in self._uses:
            self.trace(model, example)
        for parameter, value in store(model, self.policy, self.uses(model)).items():
            if keep_frozen or parameter.requires_grad or parameter in wanted:
                set_master(parameter, value)
        watch(model, widens=self.policy.stores_by_op)
        self.attach(model)
        keep_masters = self.master_weights or self.policy.mode != "mixed"
        wrapped = MasterWeights(optimizer, keep_masters=keep_masters)
        wrapped.policy = self.policy
        return model, wrapped

    def trace(self, model: nn.Module, example: Any) -> None:
        """Run the model once, to store in half every weight that only half ops read.

        Without a trace the classes of torch.nn tell which weights these are, and weights of other
        classes stay fp32. Several calls add up. Lazy layers get their shapes and first values. The
        rest of the model and the random generators are not changed.

        Args:
            model: on its device, before or after it is prepared.
            example: a tuple is the model's arguments, a mapping its keyword arguments, anything
                else its only argument. A function is called with the model.
        """
        initialize_lazy(model, example)
        if self.policy.stores_by_op:
            self.attach(model)
            uses = self.uses(model)
            with self.preserve_state():
                trace(model, example, self.cast(), uses)
            self._uses[model] = uses

    def uses(self, model: nn.Module) -> WeightUses:
        """Return the ops that read each weight in the model's traces, if there were any."""
        return self._uses.get(model, WeightUses())

    def use_shards(self, model: nn.Module, sharded: Mapping[Tensor, Any], saving: Any) -> None:
        """Carry a trace over to the sharded parameters that replaced the traced ones.

        Call it before `prepare`. Half ops run in contexts that `saving` makes.
        """
        if self._casts is not None:
            self._casts.saving = saving  # Kept casts would outlive the gathered weights.
        uses = self.uses(model)
        by_weight = {sharded[weight]: ops for weight, ops in uses.by_weight.items()}
        self._uses[model] = WeightUses(by_weight, uses.called)

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Hook the model so that this precision's blocks see its pins, and return the hooks.

        `prepare` calls it. Call it yourself for a model that is evaluated in another mode than it
        was trained in. A second call does nothing.
        """
        if model in self._hooked:
            return []
        handles: list[RemovableHandle] = []
        if self._casts is not None:
            for handler in self.op_handlers:
                handler.attach(model)
            self._casts.compute_on(device_of(model))
            handles = pin_modules(model, self.policy)
        self._hooked.add(model)
        if self.policy.mode == "mixed" and self.policy.ops.empty:
            handles.append(model.register_forward_pre_hook(_cast_inputs, with_kwargs=True))
        return handles

    def cast(self) -> AbstractContextManager[None]:
        """Return a block that runs its ops by the lists, and casts each trained weight once.

        The innermost block decides, even an fp32 one, and only in the thread that enters it.
        """
        if self._casts is not None:
            follow_backward_passes(self._casts, casts_here)
            return cast_block(self._casts)
        return outside_casts()

    def release(self) -> None:
        """Undo what this precision's blocks replaced in torch, as garbage collection also does."""
        stop_following(id(self._casts))

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Context manager that restores what handlers carry from step to step."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)

    def state_dict(self) -> dict[str, Any]:
        """Return what handlers carry from step to step, such as random generators."""
        states = (handler.state_dict() for handler in self.op_handlers)
        return {name: value for state in states for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for handler in self.op_handlers:
            handler.load_state_dict(state)

    def __str__(self) -> str:
        return str(self.policy)


def _cast_inputs(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast the model's inputs to half if it has half weights, because without lists no op does."""
    half = next((p.dtype for p in model.parameters() if p.dtype in HALF), torch.float32)
    return cast_to((args, kwargs), half)
