"""Layers that a rank does not use in a step, as with stochastic depth or experts.

Gathering a block's weights and summing its gradients takes all ranks. So a rank that passes a block
by runs it with nothing: it gathers the weights in its turn, and in the backward pass again. It adds
zeros to the sums, by torch's `set_reduce_scatter_unused_params`. This works for blocks that run in
the order in which the model lists them.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from mpframe.core.comm import Comm, is_sharded
from mpframe.core.errors import ConfigError
from mpframe.core.tree import map_tensors, tensors_in

ADDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # since torch 2.15


class Usage:
    """Watches which weights this rank uses, and has it take part in the blocks that it passes by.

    `blocks` are the modules of a divided model that are gathered one by one, in the model's order.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._watchers: OrderedDict[int, Callable[[str, Tensor], None]] = OrderedDict()
        self.loss: Tensor | None = None  # which of several is computed, by a weight it trains
        # Called once a block's weights, gathered for the first time, are in the model.
        self.on_gathered: list[Callable[[], None]] = []
        self._blocks, self._names = blocks, {module: name for name, module in model.named_modules()}
        self._weights = dict(model.named_parameters())
        self._seen = {w for w in self._weights.values() if is_sharded(w)}  # and gathered ones
        self._met: set[nn.Module] = set()
        self._used: set[str] = set()
        self._next: int | None = None  # the block whose turn it is in the model's forward pass
        self._tie: Tensor | None = None  # leads to blocks that were passed by
        self._linked: bool | None = None  # whether the last block's inputs came with a graph
        self._links = [[0, 0] for _ in blocks]  # per block: seen without a graph, and with one
        # Per block, by loss: whether its inputs come with a graph.
        self._known: list[dict[Tensor | None, bool]] = [{} for _ in blocks]
        self._order: list[int] = []
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)
        for turn, block in enumerate(blocks):
            enter = partial(self._enter, turn)
            block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            block.register_forward_hook(self._leave, prepend=True)
        for module in (*blocks, model):
            module.register_forward_pre_hook(self._watch)

    def watch(self, see: Callable[[str, Tensor], None]) -> RemovableHandle:
        """Call `see` with a gathered weight and its name whenever it has this rank's gradient."""
        handle = RemovableHandle(self._watchers)
        self._watchers[handle.id] = see
        return handle

    def agree(self, comm: Comm) -> None:
        """Compare the ranks' forward passes. ConfigError: their backward passes would not fit."""
        ends, order = [end for link in self._links for end in link], hash(tuple(self._order)) >> 1
        *ends, most, least = comm.max_of([*ends, order, -order])
        self._order, self._links = [], [[0, 0] for _ in self._links]
        for turn, (without, linked) in enumerate(zip(ends[::2], ends[1::2], strict=True)):
            if without and linked:
                raise ConfigError(
                    f"trainer.parallel=fsdp: one rank passes {self._names[self._blocks[turn]]} by, "
                    "whose inputs have no gradients on another; call it on all ranks, or use "
                    "trainer.parallel=ddp"
                )
            if without or linked:
                self._known[turn][self.loss] = bool(linked)
        if most != -least:
            raise ConfigError(
                "trainer.parallel=fsdp: the ranks run the model's blocks in different orders; run "
                "them in the order in which the model lists them, or use trainer.parallel=ddp"
            )

    def drop_unused(self, comm: Comm) -> None:
        """Take away the gradients of weights that no rank has used, after a backward pass."""
        used, self._used = self._used, set()
        by_me = [name in used for name in self._weights]
        by_any = comm.max_of(by_me)
        if by_me != by_any and not ADDS_ZEROS:
            name = next(n for n, used in zip(self._weights, by_me, strict=True) if not used)
            raise ConfigError(
                f"trainer.parallel=fsdp: {name} was not used on this rank: needs torch 2.15, which "
                f"adds zeros for it, and this is {torch.__version__}; use trainer.parallel=ddp"
            )
        for weight, used_by_any in zip(self._weights.values(), by_any, strict=True):
            if not used_by_any and weight.requires_grad:  # Frozen ones keep another loss's.
                weight.grad = None

    def _begin(self, model: nn.Module, args: Any) -> None:
        if ADDS_ZEROS and not _recomputes():
            self._next, self._tie, self._linked = 0, None, None

    def _enter(self, turn: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._next is None or _recomputes():
            return
        inputs = list(tensors_in([args, kwargs]))
        linked = any(tensor.requires_grad for tensor in inputs)
        while self._next < turn:
            self._pass_by(self._next, inputs, linked)
        self._next, self._linked = max(self._next, turn + 1), linked
        if torch.is_grad_enabled():
            self._links[turn][linked] = 1
            self._order.append(turn)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> Any:
        """Have the backward pass of the output reach the blocks passed by, and this block."""
        if self._next is None or _recomputes() or not torch.is_grad_enabled():
            return None
        trained = [weight for weight in block.parameters() if weight.requires_grad]
        found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        if self._tie is None and (not trained or any(t.requires_grad for t in found)):
            return None
        others = [*trained, *([] if self._tie is None else [self._tie])]
        self._tie = None if found else self._tie
        return map_tensors(lambda t: _tie(t, *others) if t.is_floating_point() else t, output)

    def _end(self, model: nn.Module, args: Any, output: Any) -> Any:
        if self._next is None or _recomputes():
            return None
        outputs = list(tensors_in(output))
        linked = any(t.requires_grad for t in outputs) if self._linked is None else self._linked
        while self._next < len(self._blocks):
            self._pass_by(self._next, outputs, linked)
        output = self._leave(nn.Identity(), args, output)
        self._next = None
        return output

    def _pass_by(self, turn: int, near: Sequence[Tensor], linked: bool) -> None:
        """Gather a block, and have the backward pass gather it again and sum its gradients.

        `near` are the tensors of that time, on the device whose order the backward pass keeps.
        """
        block: Any = self._blocks[turn]
        known, forward = self._known[turn].get(self.loss), block.forward
        nothing = torch.zeros(0, device=near[0].device if near else None)
        nothing.requires_grad_(linked if known is None else known)
        block.forward = lambda nothing: _tie(nothing, *block.parameters())
        try:
            self._tie = block(nothing)
        finally:
            block.forward = forward

    def _watch(self, module: nn.Module, args: Any) -> None:
        """Notice the gathered weights that get a gradient."""
        for name, weight in module.named_parameters(self._names[module]):
            if weight.requires_grad and weight not in self._seen:
                hook = weight.register_post_accumulate_grad_hook
                hook(partial(self._use, name))  # type: ignore[no-untyped-call]
                self._seen.add(weight)
        for tell in self.on_gathered if module not in self._met else ():
            tell()
        self._met.add(module)

    def _use(self, name: str, weight: Tensor) -> None:
        if weight.grad is None:  # The backward pass came by a tie.
            return
        self._used.add(name)
        for watch in self._watchers.values():
            watch(name, weight)


class _Tie(torch.autograd.Function):
    """A copy of a tensor whose backward pass goes on to others, with no gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.empty = [other.new_zeros(0) if not other.numel() else None for other in others]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *ctx.empty


_tie: Callable[..., Tensor] = _Tie.apply


def _recomputes() -> bool:
    """Return whether a backward pass runs, in which a checkpointed layer runs again."""
    return torch._C._current_graph_task_id() != -1
