"""Memory: its order (channels last), activations recomputed, and freed memory kept."""

import ctypes
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from mpframe.core.buffers import ModuleState
from mpframe.core.comm import is_sharded
from mpframe.core.errors import ConfigError
from mpframe.precision.cast import casts_here
from mpframe.training.optimizers.selection import refuse_idle

_autograd: Any = torch._C._autograd


def to_channels_last(model: nn.Module) -> None:
    """Store the 4-d weights in this order. Raises ConfigError if there is none, or it is unsafe.

    A convolution passes the order on to its output, so batches need no change.
    """
    known = (parameter for parameter in model.parameters() if not is_lazy(parameter))
    if not any(parameter.dim() == 4 for parameter in known):
        raise ConfigError(
            "trainer.channels_last=true: the model has no 2-d convolution (no weight with four "
            "dimensions), so nothing would change; use trainer.channels_last=false"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and _damages_memory(module):
            raise ConfigError(
                f"trainer.channels_last=true: {name} is a 1 x 1 convolution with a stride and "
                f"{module.in_channels} channels, and on some CPUs its backward pass in this order "
                "damages memory; use trainer.channels_last=false or 8 channels and more"
            )
    model.to(memory_format=torch.channels_last)


def _damages_memory(convolution: nn.Conv2d) -> bool:
    """Return whether oneDNN writes past the end of its buffers (torch 2.15 on AVX2)."""
    strided = convolution.kernel_size == (1, 1) and max(convolution.stride) > 1
    return convolution.weight.is_cpu and strided and convolution.in_channels < 8


def recompute(model: nn.Module, patterns: Sequence[str]) -> None:
    """Make modules run again in the backward pass of training (Chen et al. 2016), in place.

    `patterns` are of module names, as in `ops.modules`; ConfigError if one matches none. A module
    inside a matching one runs again with it.
    """
    names = [name for name, _ in model.named_modules()]
    refuse_idle("trainer.recompute", "module", patterns, names)
    chosen = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    for name in chosen:
        outer = (other for other in chosen if other != name)
        if not any(other == "" or name.startswith(f"{other}.") for other in outer):
            module = model.get_submodule(name)
            module.forward = _Recomputed(module)


# A class, so that a model can be copied and pickled.
class _Recomputed:
    """A module's forward pass, checkpointed if a backward pass follows."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        return checkpoint(
            self._forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs
        )

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the first and of the second forward pass."""
        return nullcontext(), _AsFirst(self._module)


class _AsFirst(ExitStack):
    """The casts and the state of now, for each forward pass that runs again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._block, self._state = casts_here(), ModuleState.of(module).with_copies()

    def __enter__(self) -> Self:
        self.enter_context(self._block())
        self.enter_context(self._state)
        return self


def cast_again() -> AbstractContextManager[Any]:
    """Return a context in which autograd saves weights in place of their casts, and casts again.

    A sharded weight that was gathered is given back after its forward pass, and a cast of it would
    stay. Where others decide what is saved, as `recompute` does, they do.
    """
    if torch.compiler.is_compiling() or not _autograd._saved_tensors_hooks_is_enabled():
        return nullcontext()
    others = _autograd._top_saved_tensors_default_hooks(False)
    return nullcontext() if others else saved_tensors_hooks(_pack, _unpack)


def weight_behind(saved: Tensor) -> tuple[Tensor, torch.dtype] | None:
    """Return the weight of which this is a cast, or a view of one, and the half format."""
    cast = saved if saved._base is None else saved._base
    return None if is_sharded(saved) else getattr(cast, "cast_of", None)


def _pack(saved: Tensor) -> Any:
    behind = weight_behind(saved)
    if behind is None:
        return saved
    return *behind, saved.dtype, saved.shape, saved.stride(), saved.storage_offset()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    weight, half, dtype, *place = packed
    return weight.to(half).to(dtype).as_strided(*place)  # type: ignore[no-any-return]


def keep_freed_memory() -> bool:
    """Make this process keep the memory a step frees for the next; return whether libc can.

    It takes more memory, as kept memory does not always fit the next request: before glibc 2.38 an
    aligned request, as all of torch's are, seldom does.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library, trim_threshold, mmap_max = ctypes.CDLL(None), -1, -4  # <malloc.h>
    # The manual of mallopt(3) turns the first off with -1, and the second with 0.
    return all((library.mallopt(trim_threshold, -1), library.mallopt(mmap_max, 0)))
