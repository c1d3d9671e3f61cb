"""`Precision`: one value that makes a model and its optimizer run in a dtype mode.

    precision = Precision("mixed", half="float16")
    model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters()))
    with precision.cast():
        loss = loss_fn(model(inputs), targets)

`prepare` stores the weights as the mode says and puts fp32 masters in the optimizer; `cast` runs
the ops of its block by the lists. The deciding is in policy.py, the casting in cast.py.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mpframe.distributed.world import World
from mpframe.errors import ConfigError
from mpframe.optim.master_weights import MasterWeights
from mpframe.optim.masters.master import Master, remember
from mpframe.optim.masters.split_master import KINDS, refuse_split
from mpframe.optim.masters.widening import watch
from mpframe.precision.casting.blocks import block
from mpframe.precision.casting.cast import Casts
from mpframe.precision.casting.recomputation import follow_backward_passes, release
from mpframe.precision.dtype_map import Row, as_table, dtype_map
from mpframe.precision.lazy import materialize, refuse_lazy
from mpframe.precision.op_lists import OpLists
from mpframe.precision.pins import cast_to, pin_modules, refuse_idle_pins
from mpframe.precision.policy import Policy
from mpframe.precision.products.native import refusals, refused
from mpframe.precision.products.recipe import Recipe
from mpframe.precision.products.state import ProductState, Watch
from mpframe.precision.storage.fp32_share import fp32_share
from mpframe.precision.storage.reads import Reads, reads_of
from mpframe.precision.storage.storage import formats_of, store
from mpframe.tree import HALF, device_of, map_tensors


class Precision:
    """A dtype mode, applied.

    Args:
        mode: `fp32`, `mixed` (half weights, fp32 masters) or `amp` (fp32 weights, ops cast).
        half: `float16` or `bfloat16`.
        ops: the op lists and module pins; the shipped default lists if None.
        compute: half on a CPU: `native`, `emulated`, or `auto` (native if the CPU can); products
            below 16 bits likewise, but `auto` has them native on GPUs alone.
        master_weights: False leaves the masters out, to study what they are for. "split", for
            bfloat16: 2 bytes beside each weight hold the bits that it lacks, instead of 4.
        products: the recipe by which matrix products and convolutions are computed below 16 bits,
            by its name or as a value; `none`: they stay in half.
        recipes: a user's own, by the names that `products` and pins call them.

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
        master_weights: bool | str = True,
        products: str | Recipe = "none",
        recipes: Mapping[str, Recipe] | None = None,
    ) -> None:
        own = dict(recipes or {})
        if isinstance(products, Recipe):
            own[products.name] = products
            products = products.name
        lists = OpLists.named() if ops is None else ops
        self.policy = Policy(mode, half, lists, compute, products, own)
        if mode == "mixed" and master_weights == "split":
            refuse_split(self.policy.half_dtype)
        self.master_weights = master_weights
        self._products = ProductState()
        self._casts = Casts(self.policy, self._products) if self.policy.casts else None
        self._hooked: WeakSet[nn.Module] = WeakSet()
        self._reads: WeakKeyDictionary[nn.Module, Reads] = WeakKeyDictionary()

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
            example: what the model is called with, for `trace`; None: not traced.
            keep_frozen: False drops the fp32 values of weights that need no gradient, which saves
                4 bytes each; if such a weight is trained later, it starts from its half value.

        Returns:
            The same model, and the wrapped optimizer with masters from before the rounding.

        Raises:
            ConfigError: a parameter is complex, or lazy and there is no example; a pin names no
                module; or `compute` is native and the model's device lacks a product of a recipe.
        """
        refuse_idle_pins(model, self.policy)
        if example is not None and model not in self._reads:
            self.trace(model, example)
        if self.policy.mode != "fp32":
            refuse_lazy(model)
        wanted = {p for group in optimizer.param_groups for p in group["params"]}
        for parameter, value in store(model, self.policy, self.reads(model)).items():
            if keep_frozen or parameter.requires_grad or parameter in wanted:
                remember(parameter, value, KINDS[self.master_weights] or Master)
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
        materialize(model, example)
        if self.policy.stores_by_op:
            self.attach(model)
            with self.undisturbed():
                self._reads[model] = self.reads(model) | reads_of(model, example, self.cast())

    def shard(self, model: nn.Module, world: World, device: torch.device) -> dict[Tensor, Tensor]:
        """Divide the model's weights among ranks, before `prepare`: each keeps its part in fp32.

        What the mode stores in half is gathered in half, all else in fp32.

        Args:
            model: fp32, after `trace`; it goes to `device`.
            world: the ranks that train it together.
            device: what this rank computes on.

        Returns:
            The parameters as they were, each with the sharded one in its place.

        Raises:
            ConfigError: a weight cannot be divided, or lies beyond the half range; or no op list
                says which weights are half.
        """
        if self.policy.mode == "mixed" and self.policy.ops.empty:
            raise ConfigError(
                "ops=none: casts nothing between blocks, and with trainer.parallel=fsdp blocks are "
                "gathered in the format of their weights; use the default lists"
            )
        formats = formats_of(model, self.policy, self.reads(model))
        _refuse_beyond(model, formats)
        replaced = world.shard(model, formats, device)
        if self._casts is not None:
            self._casts.keeps_weights = False  # They would outlive the gathered weights.
        traced = self.reads(model)
        of = {replaced[weight]: ops for weight, ops in traced.of.items()}
        self._reads[model] = Reads(of, traced.called)  # type: ignore[arg-type]
        return replaced

    def reads(self, model: nn.Module) -> Reads:
        """The ops that read each weight in the trace; empty if the model was not traced."""
        return self._reads.get(model, Reads())

    def attach(self, model: nn.Module) -> None:
        """Let pins follow this precision's casts; no weight is touched.

        `prepare` calls it. Call it alone for a model that is evaluated in another mode than it was
        trained in. A second call does nothing.

        Raises:
            ConfigError: `compute` is native and the model's device lacks a product of a recipe.
        """
        if model in self._hooked:
            return
        _refuse_emulated(self.policy, device_of(model))
        self._hooked.add(model)
        self._hook(model)
        if self.policy.mode == "mixed" and self.policy.ops.empty:
            model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Within the block pins follow this precision, to try it out."""
        handles = self._hook(model)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cast(self) -> AbstractContextManager[None]:
        """Run the ops of the block by the lists; one weight is cast at most once in it.

        Blocks nest: the innermost decides, also if it is an fp32 one, which casts nothing. A block
        acts in the thread that enters it, and in no other.
        """
        if self._casts is not None:
            follow_backward_passes(self._casts)
        return block(self._casts)

    def release(self) -> None:
        """Take back what its blocks replaced in torch, as when it is garbage collected."""
        release(id(self._casts))

    def dtype_map(self, model: nn.Module) -> list[Row]:
        """Every module's storage and compute format and what decides them."""
        return dtype_map(model, self.policy, self.reads(model))

    def describe(self, model: nn.Module) -> str:
        """The dtype map as text: a table, the recipes of products in it, and in `mixed` which share
        of the weights stays fp32."""
        lines = [as_table(self.dtype_map(model)), *map(str, self.policy.recipes.values())]
        if self.policy.stores_by_op:
            lines += fp32_share(model, self.policy, self.reads(model))
        return "\n".join(lines)

    def warnings(self) -> list[str]:
        """What the chosen settings cost in accuracy, a line each; empty if they cost nothing."""
        mode, half = self.policy.mode, self.policy.half
        lines = []
        masters = "false" if self.master_weights is False else self.master_weights
        if masters is not True and mode != "mixed":
            lines.append(
                f"dtype.master_weights={masters} changes nothing with dtype={mode}, whose weights "
                "are fp32"
            )
        elif masters == "false":
            lines.append(
                f"dtype.master_weights=false: the optimizer works on {half} weights and keeps its "
                "state in them; updates below half a unit in a weight's last place are lost"
            )
        if self.policy.ops.empty and mode != "fp32":
            lines.append(
                f"ops=none: the model's norms, softmax and reductions run in {half} too, where "
                "sums lose small terms and squares leave the range"
                if mode == "mixed"
                else "ops=none casts nothing with dtype=amp: the run is an fp32 run"
            )
        return lines

    def __str__(self) -> str:
        return str(self.policy)

    def undisturbed(self) -> AbstractContextManager[None]:
        """The block may run the model; what products carry from step to step stays as it was."""
        return self._products.undisturbed()

    def watch_products(self, watch: Watch | None) -> None:
        """Count what quantisation takes from each operand of each product.

        Args:
            watch: called with the weight's name (empty if there is none), the product, the operand
                and a row of `products.noise`; None: nothing is counted.
        """
        self._products.watch = watch

    def agree(self, world: World) -> None:
        """Let the histories of delayed scaling be those of all ranks' samples, after each step.

        Args:
            world: all its ranks call this.
        """
        length = max((recipe.history for recipe in self.policy.recipes.values()), default=0)
        if world.size > 1 and length:
            self._products.agree(world, length)

    def state_dict(self) -> dict[str, Any]:
        """What products carry from step to step: random generators, and histories of amax."""
        return self._products.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._products.load_state_dict(state)

    def _hook(self, model: nn.Module) -> list[RemovableHandle]:
        if self._casts is None:
            return []
        self._casts.compute_on(device_of(model))
        self._products.learn_names(model)
        return pin_modules(model, self.policy)


def _refuse_emulated(policy: Policy, device: torch.device) -> None:
    """`native` is not for a device that lacks a product of a recipe in use."""
    named = (policy.products, *policy.ops.modules.values())
    recipes = [policy.recipes[name] for name in named if name in policy.recipes]
    for recipe in recipes if policy.compute == "native" else []:
        for product, why in refusals(recipe, device).items():
            raise refused(recipe, product, device, why)


def _refuse_beyond(model: nn.Module, formats: Mapping[nn.Parameter, torch.dtype]) -> None:
    """Stored weights are held at the end of the half range; gathered ones would be inf."""
    for name, own in model.named_parameters():
        limit = torch.finfo(formats[own]).max
        if formats[own] in HALF and own.numel() and bool(own.detach().abs().max() > limit):
            raise ConfigError(
                f"trainer.parallel=fsdp: {name} lies beyond the range of {str(formats[own])[6:]}, "
                "in which it is gathered; use dtype.half=bfloat16, or ops.modules=...:fp32"
            )


def _cast_inputs(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast the model's inputs to the format of its weights, because without lists no op does."""
    weight = next(model.parameters(), None)
    if weight is None:
        return args, kwargs
    return map_tensors(lambda tensor: cast_to(tensor, weight.dtype), (args, kwargs))
