"""Every product of every op: which operands are quantised, along which axis, and what is summed."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from low_bits import A3, B3, COLUMNS, MX, MX4, ROWS, TF32, A, B, C, Note, See, V, half, made, run
from op_table import TABLE
from torch import Tensor, nn

from mpframe import OpLists, Precision
from mpframe.core.tree import map_tensors, tensors_in
from mpframe.precision.lowbit.formats import FORMATS
from mpframe.precision.lowbit.recipe import Recipe
from mpframe.precision.lowbit.scaling import Axes, quantize
from mpframe.tracking.dtype_map import dtype_map

EXPERTS = partial(F.grouped_mm, offs=torch.tensor([4, 10, 16], dtype=torch.int32))
# An outer product sums over nothing, the order of a chain is chosen inside, prelu is none,
# and a recurrent layer is one kernel.
IN_HALF = {
    "addbmm", "addr", "chain_matmul", "conv_tbc", "einsum", "gru", "gru_cell", "linalg_multi_dot",
    "linalg_vecdot", "lstm", "lstm_cell", "prelu", "rnn_relu", "rnn_relu_cell", "rnn_tanh",
    "rnn_tanh_cell",
}  # fmt: skip
ALLOW = sorted(OpLists.named().allow)
SEEN = torch.ones(8, 8, dtype=torch.bool).tril(-1)  # The first row sees nothing, as by padding.


@pytest.mark.parametrize("op", [lambda x, w: x @ w.t(), lambda x, w: (w @ x.t()).t(), F.linear])
def test_each_operand_by_hand_by_its_own_entry(op: Any) -> None:
    """In blocks along what is summed, a format for each of the six; the weight on the left, too."""
    how = {name: replace(MX, format=own, block=4) for name, own in FORMATS.items()}
    products = {
        "forward": {"x": how["e4m3fn"], "w": how["e5m2"]},
        "dx": {"dy": how["e2m3"], "w": how["e3m2"]},
        "dw": {"x": how["e2m1"], "dy": how["tf32"]},
    }
    x, w, dy = half(made(8, 8)), half(made(4, 8, seed=1)), half(made(8, 4, seed=9))
    leaf, inputs = nn.Parameter(w), x.clone().requires_grad_()
    with Precision("amp", half="bfloat16", products=Recipe("mine", products)).cast():
        y = op(inputs, leaf)
    y.backward(dy.bfloat16())

    def q(values: Tensor, name: str, axes: Axes = ROWS) -> Tensor:
        return quantize(values, axes, how[name])

    assert torch.equal(y, (q(x, "e4m3fn") @ q(w, "e5m2").t()).bfloat16())
    assert torch.equal(inputs.grad, half(q(dy, "e2m3") @ q(w, "e3m2", COLUMNS)))
    assert torch.equal(leaf.grad, half(q(dy, "tf32", COLUMNS).t() @ q(x, "e2m1", COLUMNS)))


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize(
    ("name", "op", "tensors"),
    [
        ("", torch.matmul, (A3, B)), ("", torch.matmul, (A3[:, None], B3[None])),
        ("", torch.matmul, (V, B3)), ("", torch.matmul, (A, V)), ("", torch.matmul, (V, V)),
        ("", lambda c, a, b: torch.addmm(c, mat1=a, mat2=b, beta=0.5, alpha=2), (C, A, B)),
        ("", F.linear, (V, B.t(), C[0])), ("", EXPERTS, (made(8, 16), made(16, 4))),
        ("", EXPERTS, (made(3, 8, 8), made(8, 16))),
        *((name, way, TABLE[name].inputs) for name in ALLOW for way in TABLE[name].spellings),
    ],
)  # fmt: skip
def test_every_spelling_of_every_op_of_allow_gives_the_product(
    name: str, op: Any, tensors: tuple[Any, ...]
) -> None:
    """In a format that holds every operand the product, and its gradients, are exact: small whole
    numbers, all of whose sums fp32 holds. What is added to the list is a product or says why not.
    """

    def whole(t: Tensor) -> Tensor:
        return (t * 4).round().clamp(-7, 7).requires_grad_() if t.is_floating_point() else t

    ours, plain = (map_tensors(whole, tensors) for _ in "ab")
    seen: list[str] = []
    with Note(seen) if name in IN_HALF else See(seen), Precision("fp32", products=TF32).cast():
        y = next(tensors_in(op(*ours)))
        dy = made(*y.shape, seed=9).mul(2).round()
        y.backward(dy)
    assert any("gradient" in one for one in seen) == bool(seen) == (name not in IN_HALF)
    if name == "scaled_dot_product_attention":  # Its softmax is not exact.
        return
    (expected := next(tensors_in(op(*plain)))).backward(dy)
    assert torch.equal(y, expected)
    for leaf, other in zip(tensors_in(ours), tensors_in(plain), strict=True):
        assert (leaf.grad is None) == (other.grad is None)
        assert leaf.grad is None or torch.equal(leaf.grad, other.grad)


def test_each_group_of_experts_by_hand() -> None:
    """The second has no rows. 96 to 128 belong to none: zeros, where torch leaves what is there."""
    x, w, ends = half(made(128, 64)), half(made(3, 64, 32, seed=1)), torch.tensor([32, 32, 96])
    y, dx, dw = run(lambda x, w: F.grouped_mm(x, w, offs=ends.int()), x, w)
    dy = half(made(128, 32, seed=9))
    for group, rows in ((0, slice(32)), (2, slice(32, 96))):
        own_x, own_w, own_dy = x[rows], w[group], dy[rows]
        forward = quantize(own_x, ROWS, MX) @ quantize(own_w, COLUMNS, MX)
        assert torch.equal(y[rows], forward.bfloat16())
        own_dx = quantize(own_dy, ROWS, MX) @ quantize(own_w, ROWS, MX).t()
        assert torch.equal(dx[rows], half(own_dx))
        own_dw = quantize(own_x, COLUMNS, MX).t() @ quantize(own_dy, COLUMNS, MX)
        assert torch.equal(dw[group], half(own_dw))
    assert not any(own.any() for own in (y[96:], dx[96:], dw[1]))


def test_attention_by_option() -> None:
    """Two products forward, and two backward for each of those."""
    q, k, v = (made(2, 2, 64, 32, seed=s) for s in range(3))
    for products, expected in (("mxfp8", []), (TF32, ["matmul"] * 2 + ["matmul_gradient"] * 4)):
        with Note(seen := []):
            run(F.scaled_dot_product_attention, q, k, v, products=products)
        assert seen == expected


@pytest.mark.parametrize(
    ("options", "sees"),
    [({"is_causal": True, "scale": 0.3}, True), ({"enable_gqa": True}, True),
     ({"attn_mask": made(8, 8, seed=3)}, True), ({"attn_mask": SEEN}, False),
     ({"attn_mask": torch.zeros(8, 8).masked_fill(~SEEN, -math.inf)}, False)],
    ids=["causal", "enable_gqa", "mask", "masked_altogether", "masked_altogether by inf"],
)  # fmt: skip
def test_attention_equals_torchs(options: dict[str, Any], sees: bool) -> None:
    """To 2^-7 of the largest: two roundings to bfloat16 here and there, of 2^-9 each."""
    q, k, v = (made(2, 4, 8, 16, seed=s) for s in range(3))
    if "enable_gqa" in options:
        k, v = k[:, :2], v[:, :2]
    ours, theirs = (
        run(lambda *t: F.scaled_dot_product_attention(*t, **options), q, k, v, products=products)
        for products in (TF32, "none")
    )
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == other.dtype
        assert (own - other).abs().max() <= 2**-6 * other.abs().max()
    assert bool(ours[0][:, :, 0].any()) == sees  # what the first row sees


def conv_by_torch(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The layer in fp32, with this weight."""
    zeros = None if layer.bias is None else torch.zeros_like(layer.bias)
    own = {"weight": weight, "bias": zeros if bias is None else bias}
    return torch.func.functional_call(layer, own, (x,))


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv1d(32, 64, 3, padding=1, stride=2), made(32, 32, 9)),
        (nn.Conv2d(64, 64, (3, 2), groups=2, dilation=(1, 2), stride=(2, 1)), made(32, 64, 7, 7)),
        (nn.Conv2d(32, 32, (1, 3), padding="same", bias=False), made(32, 32, 5, 5)),
        (nn.Conv3d(32, 32, 2), made(32, 32, 3, 3, 3)),
        (nn.ConvTranspose1d(32, 64, 3, stride=2, output_padding=1, padding=1), made(32, 32, 5)),
        (nn.ConvTranspose2d(64, 64, 2, stride=2, groups=2), made(32, 64, 3, 3)),
        (nn.Conv2d(32, 64, 3), made(32, 5, 5)),
    ],
)
def test_a_convolution_quantises_along_what_is_summed(layer: Any, x: Tensor) -> None:
    x, weight = half(x), half(layer.weight.detach())
    leaf = x.clone().requires_grad_()
    with See([]), Precision("amp", half="bfloat16", products=MX4).cast():
        y = layer(leaf)
        dy = half(made(*y.shape, seed=9))
        y.backward(dy.bfloat16())
    batched = x.dim() == weight.dim()
    first = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    over_in, over_out = (COLUMNS, ROWS) if first else (ROWS, COLUMNS)
    channels, samples = Axes((1 if batched else 0,), 0), Axes((0,), 1)
    bias = None if layer.bias is None else half(layer.bias.detach())
    by_torch = partial(conv_by_torch, layer)
    forward = by_torch(quantize(x, channels, MX), quantize(weight, over_in, MX), bias)
    assert torch.equal(y, forward.bfloat16())
    for_dx, for_dw = x.clone().requires_grad_(), weight.clone().requires_grad_()
    by_torch(for_dx, quantize(weight, over_out, MX)).backward(quantize(dy, channels, MX))
    assert torch.equal(leaf.grad, half(for_dx.grad))
    own_x, own_dy = (quantize(t, samples, MX) if batched else t for t in (x, dy))
    by_torch(own_x, for_dw).backward(own_dy)
    assert torch.equal(layer.weight.grad, half(for_dw.grad))
    if bias is not None:
        axes = tuple(axis for axis in range(dy.dim()) if axis != batched)
        assert torch.equal(layer.bias.grad, half(dy.sum(axes)))


def test_others_see_the_op_and_not_its_parts() -> None:
    """What reads the weights is `linear`, as ever, and they are stored in half."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    precision = Precision("mixed", half="bfloat16", products="mxfp8")
    precision.prepare(model, torch.optim.SGD(model.parameters()), A)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {row.why for row in dtype_map(precision, model)} == {"linear in ops.allow"}
