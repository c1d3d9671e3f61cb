"""`Precision`: one value that makes a model and its optimizer run in a dtype mode.

    precision = Precision("mixed", half="float16")
    model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters()))
    with precision.cast():
        loss = loss_fn(model(inputs), targets)

`prepare` stores the weights as the mode says and puts fp32 masters in the optimizer. In a `cast`
block ops run by the lists. policy.py decides the formats, cast.py applies them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mpframe.core.blocks import block, cast_to, check_patterns, pin_modules
from mpframe.core.cast import Casts
from mpframe.core.comm import Comm
from mpframe.core.handlers import OpHandler
from mpframe.core.master_weights import MasterWeights
from mpframe.core.masters import Master, master_class, set_master
from mpframe.core.op_lists import OpLists
from mpframe.core.policy import Policy, lowbit
from mpframe.core.recomputation import follow_backward_passes, release
from mpframe.core.storage import WeightUses, check_not_lazy, store
from mpframe.core.tree import device_of, map_tensors
from mpframe.core.widening import watch


class Precision:
    """A dtype mode, applied.

    Args:
        mode: `fp32`, `mixed` (half weights, fp32 masters) or `amp` (fp32 weights, ops cast).
        half: `float16` or `bfloat16`.
        ops: the op lists and module pins; the shipped default lists if None.
        compute: half on a CPU: `native`, `emulated`, or `auto` (native if the CPU can). Also for
            products below 16 bits, but there `auto` is native only on GPUs.
        master_weights: False leaves the masters out, to study what they are for. A subclass of
            `Master` keeps the fp32 values in another way, such as training's `SplitMaster`.
        products: the recipe by which matrix products and convolutions are computed below 16 bits,
            a name or a `Recipe`; `none`: they stay in half.
        recipes: a user's recipes, by the names that `products` and pins call them.
        op_handlers: run ops in another way; they are asked before the lists.

    Raises:
        ConfigError: a value is not one of those named here.
    """

    def __init__(
        self,
        mode: str = "fp32",
        half: str = "float16",
        *,
        ops: OpLists | None = None,
        compute: str = "auto",
        master_weights: bool | type[Master] = True,
        products: Any = "none",
        recipes: Mapping[str, Any] | None = None,
        op_handlers: Sequence[OpHandler] = (),
    ) -> None:
        if not isinstance(products, str):
            recipes = {**(recipes or {}), products.name: products}
            products = products.name
        lists = OpLists.named() if ops is None else ops
        self.policy = Policy(mode, half, lists, compute, products, recipes or {})
        if mode == "mixed" and isinstance(master_weights, type):
            master_weights.check_format(self.policy.half_dtype)
        self.master_weights = master_weights
        by_recipes = [lowbit().ProductHandler(self.policy)] if self.policy.recipes else []
        self.op_handlers = (*op_handlers, *by_recipes)
        casts = self.policy.casts or bool(op_handlers)
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
        """Store the weights as the mode says and wrap the optimizer; both are changed in place.

        For a model with two optimizers call it twice. A weight has one master: a second optimizer
        over it shares the first one's, and fp32 values that the first did not take are kept for
        the second, and for groups added later.

        Args:
            model: on its device, in fp32, before the first step. A weight that is half on arrival
                has lost its fp32 value already; its master starts from the half value.
            optimizer: over the model's parameters.
            example: an input of the model for `trace`; None: the model is not traced.
            keep_frozen: False drops the fp32 values of weights that need no gradient, which saves
                4 bytes each; if such a weight is trained later, it starts from its half value.

        Returns:
            The same model, and the wrapped optimizer with masters from before the rounding.

        Raises:
            ConfigError: a parameter is complex, or lazy and there is no example; a pin names no
                module; or `compute` is native and the model's device lacks a product of a recipe.
        """
        check_patterns(model, self.policy)
        if example is not None and model not in self._uses:
            self.trace(model, example)
        if self.policy.mode != "fp32":
            check_not_lazy(model)
        wanted = {p for group in optimizer.param_groups for p in group["params"]}
        for parameter, value in store(model, self.policy, self.uses(model)).items():
            if keep_frozen or parameter.requires_grad or parameter in wanted:
                set_master(parameter, value, master_class(self.master_weights) or Master)
        watch(model, widens=self.policy.stores_by_op)
        self.attach(model)
        kept = self.master_weights if self.policy.mode == "mixed" else True
        return model, MasterWeights(optimizer, keep_masters=kept)

    def trace(self, model: nn.Module, example: Any) -> None:
        """Run the model once, to store in half every weight that only half ops read.

        Without a trace the classes of torch.nn tell which weights these are, and weights of other
        classes stay fp32. The results of several calls are put together. Lazy layers get their
        shapes and first values; all else of the model, and the random generators, stay as they are.

        Args:
            model: on its device, before or after it is prepared.
            example: on the same device. A tuple is the model's arguments, a mapping its keyword
                arguments, anything else its only argument. A function is called with the model.
        """
        tracing = import_module("mpframe.core.trace")  # Only a model that is traced needs it.
        tracing.materialize(model, example)
        if self.policy.stores_by_op:
            self.attach(model)
            with self.undisturbed():
                uses = tracing.trace(model, example, self.cast())
            self._uses[model] = self.uses(model) | uses

    def uses(self, model: nn.Module) -> WeightUses:
        """The ops that read each weight in the trace; empty if the model was not traced."""
        return self._uses.get(model, WeightUses())

    def use_shards(self, model: nn.Module, sharded: Mapping[Tensor, Any]) -> None:
        """Go on with a model whose weights were divided among ranks, before `prepare`.

        Args:
            model: after `trace`.
            sharded: the parameters as they were, each with the one in its place.
        """
        if self._casts is not None:
            self._casts.keeps_weights = False  # They would outlive the gathered weights.
        uses = self.uses(model)
        by_weight = {sharded[weight]: ops for weight, ops in uses.by_weight.items()}
        self._uses[model] = WeightUses(by_weight, uses.called)

    def attach(self, model: nn.Module) -> None:
        """Make the model's pins follow this precision's casts; no weight is touched.

        `prepare` calls it. Call it yourself for a model that is evaluated in another mode than it
        was trained in. A second call does nothing.

        Raises:
            ConfigError: `compute` is native and the model's device lacks a product of a recipe.
        """
        if model in self._hooked:
            return
        self._hook(model)
        self._hooked.add(model)
        if self.policy.mode == "mixed" and self.policy.ops.empty:
            model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Context manager in which pins follow this precision, to try it out."""
        handles = self._hook(model)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cast(self) -> AbstractContextManager[None]:
        """Run the ops of the block by the lists; one weight is cast at most once in it.

        Blocks nest: the innermost decides, also if it is an fp32 one, which casts nothing. A block
        acts only in the thread that enters it.
        """
        if self._casts is not None:
            follow_backward_passes(self._casts)
        return block(self._casts)

    def release(self) -> None:
        """Undo what its blocks replaced in torch, as when it is garbage collected."""
        release(id(self._casts))

    def dtype_map(self, model: nn.Module) -> list[Any]:
        """A `Row` for each module: its storage and compute format, and what decides them."""
        rows: list[Any] = _views().dtype_map(model, self.policy, self.uses(model))
        return rows

    def describe(self, model: nn.Module) -> str:
        """The dtype map as text: a table, the recipes of products in it, and in `mixed` which share
        of the weights stays fp32."""
        return str(_views().describe(model, self.policy, self.uses(model)))

    def warnings(self) -> list[str]:
        """What the chosen settings cost in accuracy, a line each; empty if they cost nothing."""
        return list(_views().warnings(self.policy, self.master_weights))

    def __str__(self) -> str:
        return str(self.policy)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context manager that may run the model; what lasts from step to step is restored."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)

    def agree(self, comm: Comm) -> None:
        """Bring what handlers measured in this step in line with the other ranks.

        Args:
            comm: all its ranks call this.
        """
        for handler in self.op_handlers:
            handler.sync(comm)

    def state_dict(self) -> dict[str, Any]:
        """What handlers carry from step to step: of products random generators and amax."""
        states = (handler.state_dict() for handler in self.op_handlers)
        return {name: value for state in states for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for handler in self.op_handlers:
            handler.load_state_dict(state)

    def _hook(self, model: nn.Module) -> list[RemovableHandle]:
        if self._casts is None:
            return []
        for handler in self.op_handlers:
            handler.attach(model)
        self._casts.compute_on(device_of(model))
        return pin_modules(model, self.policy)


def _views() -> Any:
    """The tables that show a precision: no part of the engine, so imported when one is wanted."""
    return import_module("mpframe.tracking.dtype_map")


def _cast_inputs(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast the model's inputs to the format of its weights, because without lists no op does."""
    weight = next(model.parameters(), None)
    if weight is None:
        return args, kwargs
    return map_tensors(lambda tensor: cast_to(tensor, weight.dtype), (args, kwargs))
