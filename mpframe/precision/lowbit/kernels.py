"""The products themselves: both operands quantised, then multiplied and summed in fp32.

A matrix product uses an instruction of the device, if there is one (native.py) and `dtype.compute`
wants it. All others, and convolutions, are emulated: fp32 kernels multiply the quantised numbers.

They are custom ops, which a compiler takes as a whole, so that it keeps their numbers. There is no
second derivative: torch says that the op of the gradients has none.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpframe.core.errors import ConfigError
from mpframe.precision.lowbit import native
from mpframe.precision.lowbit.native import Parts, take_apart
from mpframe.precision.lowbit.recipe import Recipe
from mpframe.precision.lowbit.scaling import Axes, Quantization, count_noise, quantize

Taken = TypeVar("Taken", Tensor, Parts)
Watch = Callable[[str, str, str, Tensor], None]
"""Takes a weight's name or an empty one, the product, the operand, and a row of `count_noise`."""

_numbers = count()
_quantizers: weakref.WeakValueDictionary[str, "Quantizer"] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Operand:
    """One operand of a product: float32 values, their role, and the axes that are summed over."""

    values: Tensor
    role: str
    axes: Axes
    groups: int = 1  # of a convolution, which share no block

    def misfit(self, how: Quantization) -> str:
        """Say why the values have no whole blocks, or nothing if they do."""
        shape, blocked = self.values.shape, how.per == "block" and how.scale != "none"
        if not shape.numel():
            return "it is empty"
        along, across = (how.block, how.across) if blocked else (1, 1)
        inner, outer = shape[self.axes.contracted[0]] // self.groups, shape[self.axes.free]
        for length, block in ((inner, max(how.hadamard, along)), (outer, across)):
            if length % block:
                return f"{length} is no multiple of {block}"
        return ""


class ProductState:
    """The random numbers of a run's products, and who watches the quantisation of which weights.

    The generators are part of a checkpoint, so a resumed run rounds like the one it continues.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None  # called for each operand that is quantised
        self._generators: dict[str, torch.Generator] = {}
        self._names: dict[int, str] = {}  # by the id of a weight that lives

    def learn_names(self, model: nn.Module) -> None:
        """Learn the names of the model's weights, which a watch is told."""
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._names:
                self._names[id(parameter)] = name
                weakref.finalize(parameter, self._names.pop, id(parameter)).atexit = False

    def watched_name(self, tensor: Any) -> str:
        """Return a weight's name while somebody watches, else "", one constant for compilers."""
        return "" if self.watch is None else self._names.get(id(tensor), "")

    def draw(self, like: Tensor) -> Tensor:
        """Return uniforms in [0, 1), fp32, of the shape of `like`, by the run's seed."""
        device = like.device.type
        if device not in self._generators:
            # Not the seed itself, which has drawn the weights.
            seed = (torch.initial_seed() + 0x9E3779B9) % 2**63
            self._generators[device] = torch.Generator(like.device).manual_seed(seed)
        return torch.rand(like.shape, generator=self._generators[device], device=like.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states by device type."""
        return {"generators": {device: g.get_state() for device, g in self._generators.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`, which is empty for a run that had no products."""
        self._generators = {}
        for device, generator in state.get("generators", {}).items():
            self._generators[device] = torch.Generator(device)
            self._generators[device].set_state(generator.cpu())


class Quantizer:
    """Quantises pairs of operands by a recipe, with the random numbers of a run."""

    def __init__(self, recipe: Recipe, state: ProductState, compute: str = "auto") -> None:
        self.recipe, self.state, self.compute = recipe, state, compute
        self.key = str(next(_numbers))  # stands for the quantizer in the arguments of an op
        _quantizers[self.key] = self

    def matmul(self, product: str, left: Operand, right: Operand, site: str) -> Tensor:
        """Return left @ right, both quantised. It takes the arguments of `pair`."""
        if self._explain_emulation(product, left, right):
            return torch.matmul(*self.pair(product, left, right, site))
        rest = product, site, take_apart
        return native.multiply(self._quantize(left, *rest), self._quantize(right, *rest))

    def pair(self, product: str, left: Operand, right: Operand, site: str) -> tuple[Tensor, Tensor]:
        """Quantise both operands of `forward`, `dx` or `dw`, unless they stay in half.

        `site` is the name of the weight, for the watch, or "".
        """
        if self._in_half(product, left, right):
            return left.values, right.values
        if self.compute == "native":
            why = self._explain_emulation(product, left, right)
            raise ConfigError(
                f"dtype.compute=native: dtype.products={self.recipe.name} has no native {product} "
                f"product on {left.values.device.type}: {why}; choose dtype.compute=auto, which "
                "emulates it"
            )
        rest = product, site, quantize
        return self._quantize(left, *rest), self._quantize(right, *rest)

    def _in_half(self, product: str, left: Operand, right: Operand) -> bool:
        hows = self.recipe.products.get(product)
        return hows is None or any(side.misfit(hows[side.role]) for side in (left, right))

    def _explain_emulation(self, product: str, left: Operand, right: Operand) -> str:
        """Say why no instruction multiplies two operands, or nothing if one does."""
        device = left.values.device
        if not native.is_wanted(self.compute, device) or self._in_half(product, left, right):
            return "no instruction is wanted, or it stays in half"
        if left.values.dim() != 2:
            return "it is a convolution or a batch, and scaled_mm takes two matrices"
        hows = self.recipe.products[product]
        return native.refusal(hows[left.role], hows[right.role], device)

    def _quantize(
        self, operand: Operand, product: str, site: str, take: Callable[..., Taken]
    ) -> Taken:
        """Quantise one operand by `quantize` or `take_apart`."""
        how = self.recipe.products[product][operand.role]
        taken = take(operand.values, operand.axes, how, self.state.draw)
        if self.state.watch is not None:
            quantized = taken.values(operand.axes.free) if isinstance(taken, Parts) else taken
            row = count_noise(operand.values, quantized, operand.axes, how)
            self.state.watch(site, product, operand.role, row)
        return taken


def _multiply(
    left: Tensor, right: Tensor, product: str, roles: str, quantizer: str, site: str
) -> Tensor:
    """Return left @ right: float32, of 2 axes, or of 3 with the batch first.

    `roles` is like `x w`, `quantizer` a key, and `site` is in `Quantizer.pair`.
    """
    of_left, of_right = roles.split()
    last, before = left.dim() - 1, left.dim() - 2
    rows = Operand(left, of_left, Axes((last,), before))
    columns = Operand(right, of_right, Axes((before,), last))
    return _quantizers[quantizer].matmul(product, rows, columns, site)


matmul = torch.library.custom_op("mpframe::matmul", _multiply, mutates_args=())
# The product of `dx` and `dw`, which has no gradient.
matmul_gradient = torch.library.custom_op("mpframe::matmul_gradient", _multiply, mutates_args=())


@matmul.register_fake
@matmul_gradient.register_fake
def _(left: Tensor, right: Tensor, *_: Any) -> Tensor:
    return torch.matmul(left, right)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, *ctx.rest = inputs
    ctx.save_for_backward(first, second)
    ctx.quantizer = _quantizers.get(inputs[-2])  # It lives as long as the graph.


def _matmul_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    left, right = ctx.saved_tensors
    _, roles, *rest = ctx.rest
    of_left, of_right = roles.split()
    dleft = dright = None
    if ctx.needs_input_grad[0]:
        product = "dw" if of_left == "w" else "dx"
        dleft = matmul_gradient(dy, right.mT, product, f"dy {of_right}", *rest)
    if ctx.needs_input_grad[1]:
        product = "dw" if of_right == "w" else "dx"
        dright = matmul_gradient(left.mT, dy, product, f"{of_left} dy", *rest)
    return dleft, dright, None, None, None, None


matmul.register_autograd(_matmul_backward, setup_context=_remember)


def _operand(values: Tensor, role: str, over: int, groups: int = 1) -> Operand:
    """Sum over the places and axis `over`, along which blocks run.

    That is the channels (1), or in dw the batch (0), so that a kernel's shifts move whole blocks.
    """
    return Operand(values, role, Axes((over, *range(2, values.dim())), 1 - over), groups)


def weight_operand(values: Tensor, over: int, groups: int) -> Operand:
    """Sum over axis `over`, where axis 0 has the channels of all groups."""
    return _operand(values, "w", over, groups if over == 0 else 1)


_REST = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
    "SymInt[] output_padding, SymInt groups, str quantizer, str site) -> Tensor"
)
_CONVOLUTION = f"(Tensor x, Tensor w, {_REST}"
_GRADIENT = f"(Tensor dy, Tensor other, str product, SymInt[] shape, {_REST}"


@torch.library.custom_op("mpframe::convolution", mutates_args=(), schema=_CONVOLUTION)
def convolution(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    """Return aten's convolution of 1 to 3 dimensions, float32, without bias."""
    *geometry, quantizer, site = rest
    transposed, groups = geometry[3], geometry[5]
    operands = _operand(x, "x", 1, groups), weight_operand(w, 0 if transposed else 1, groups)
    x, w = _quantizers[quantizer].pair("forward", *operands, site)
    return torch.convolution(x, w, None, *geometry)


@convolution.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return torch.convolution(x, w, None, *rest[:6])


@torch.library.custom_op("mpframe::convolution_gradient", mutates_args=(), schema=_GRADIENT)
def convolution_gradient(
    dy: Tensor, other: Tensor, product: str, shape: Sequence[int], *rest: Any
) -> Tensor:
    """Return the gradient `dx` from dy and the weight, or `dw` from dy and x."""
    *geometry, quantizer, site = rest
    transposed, groups = geometry[3], geometry[5]
    pair = _quantizers[quantizer].pair
    result = dy.new_empty(1).expand(list(shape))  # Only its shape counts.
    if product == "dx":
        weight = weight_operand(other, 1 if transposed else 0, groups)
        (dy, w), x = pair("dx", _operand(dy, "dy", 1, groups), weight, site), result
    else:
        (x, dy), w = pair("dw", _operand(other, "x", 0), _operand(dy, "dy", 0), site), result
    wanted = [product == "dx", product == "dw", False]
    gradients = torch.ops.aten.convolution_backward(dy, x, w, None, *geometry, wanted)
    return gradients[0 if product == "dx" else 1]  # type: ignore[no-any-return]


@convolution_gradient.register_fake
def _(dy: Tensor, other: Tensor, product: str, shape: Sequence[int], *_: Any) -> Tensor:
    return dy.new_empty(shape)


def _convolution_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = convolution_gradient(dy, w, "dx", x.shape, *ctx.rest)
    if ctx.needs_input_grad[1]:
        dw = convolution_gradient(dy, x, "dw", w.shape, *ctx.rest)
    return (dx, dw, *[None] * len(ctx.rest))


convolution.register_autograd(_convolution_backward, setup_context=_remember)
