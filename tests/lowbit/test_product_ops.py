"""Every product of every op: which operands are quantised, along which axis, and what is summed."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from low_bits import A3, B3, COLUMNS, MX, MX4, ROWS, TF32, A, B, C, Note, See, V, half, made, run
from op_table import TABLE
from torch import Tensor, nn

from mpframe import OpLists, Precision
from mpframe.core.tree import map_tensors, tensors_in
from mpframe.lowbit import kernels
from mpframe.lowbit.formats import FORMATS
from mpframe.lowbit.recipe import Recipe
from mpframe.lowbit.scaling import Axes, Quantization, quantize
from mpframe.tracking.dtype_map import dtype_map


def test_a_linear_layer_by_hand() -> None:
    x, w, b = made(64, 96), made(32, 96, seed=1), made(32, seed=2)
    y, dx, dw, db = run(F.linear, x, w, b)
    x, w, dy = half(x), half(w), half(made(64, 32, seed=9))
    forward = quantize(x, ROWS, MX) @ quantize(w, ROWS, MX).t() + half(b)
    assert torch.equal(y, forward.bfloat16())
    assert torch.equal(dx, half(quantize(dy, ROWS, MX) @ quantize(w, COLUMNS, MX)))
    assert torch.equal(dw, half(quantize(dy, COLUMNS, MX).t() @ quantize(x, COLUMNS, MX)))
    assert torch.equal(db, half(dy.sum(0)))
    # Another axis, other values: one quantization for both products would be seen.
    assert not torch.equal(quantize(w, ROWS, MX), quantize(w, COLUMNS, MX))


def test_each_operand_by_its_own_entry() -> None:
    """A format of its own for each of the six: no operand takes another's."""
    names = ("tf32", "e4m3fn", "e5m2", "e2m3", "e3m2", "e2m1")
    how = {name: Quantization(FORMATS[name]) for name in names}
    products = {
        "forward": {"x": how["e4m3fn"], "w": how["e5m2"]},
        "dx": {"dy": how["e2m3"], "w": how["e3m2"]},
        "dw": {"x": how["e2m1"], "dy": how["tf32"]},
    }
    x, w = made(8, 4), made(3, 4, seed=1)
    y, dx, dw = run(F.linear, x, w, products=Recipe("mine", products))
    x, w, dy = half(x), half(w), half(made(8, 3, seed=9))

    def q(values: Tensor, name: str) -> Tensor:
        return quantize(values, ROWS, how[name])

    assert torch.equal(y, (q(x, "e4m3fn") @ q(w, "e5m2").t()).bfloat16())
    assert torch.equal(dx, half(q(dy, "e2m3") @ q(w, "e3m2")))
    assert torch.equal(dw, half(q(dy, "tf32").t() @ q(x, "e2m1")))
    # The weight on the left is the weight, too.
    leaf, inputs = nn.Parameter(w), x.clone().requires_grad_()
    with Precision("amp", half="bfloat16", products=Recipe("mine", products)).cast():
        y = leaf @ inputs.t()
    assert torch.equal(y, (q(w, "e5m2") @ q(x, "e4m3fn").t()).bfloat16())
    y.backward(dy.t().bfloat16())
    assert torch.equal(leaf.grad, half(q(dy, "tf32").t() @ q(x, "e2m1")))
    assert torch.equal(inputs.grad, half(q(dy, "e2m3") @ q(w, "e3m2")))


@pytest.mark.parametrize(
    ("op", "tensors"),
    [
        (torch.matmul, (A, B)),
        (lambda a, b: a @ b, (A3, B)),
        (lambda a, b: a.matmul(b), (A3[:, None], B3[None])),
        (torch.matmul, (V, B3)),
        (torch.matmul, (A, V)),
        (torch.matmul, (V, V)),
        (lambda a, b: torch.mm(a, mat2=b), (A, B)),
        (torch.mv, (A, V)),
        (lambda c, a, b: torch.addmm(c, mat1=a, mat2=b, beta=0.5, alpha=2), (C, A, B)),
        (torch.addmv, (C[:, 0], A, V)),
        (torch.baddbmm, (C, A3, B3)),
        (torch.addbmm, (C, A3, B3)),
        (lambda a, b: torch.einsum("bij, bjk", [a, b]), (A3, B3)),
        (lambda a, b: torch.einsum(a, [0, 1], b, [1, 2]), (A, B)),
        (lambda a, b: torch.einsum("bij,bjk->kbi", a, b), (A3, B3)),
        (lambda a, b: torch.einsum("bij,ajk->ik", a, b), (A3, B3)),
        # An axis of length 1 stands for any length.
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (A3, B3[:1])),
        (lambda a, b: torch.einsum("bij,bjk->ik", a, b), (A3[..., :1], B3[:1])),
        (F.linear, (V, B.t(), C[0])),
    ],
)
def test_every_spelling_gives_the_product(op: Any, tensors: tuple[Tensor, ...]) -> None:
    """In a format that holds every operand the product, and its gradients, are exact: small whole
    numbers, all of whose sums fp32 holds."""
    whole = [(t * 2).round().clamp(-7, 7) for t in tensors]
    leaves = [t.clone().requires_grad_() for t in whole]
    seen: list[str] = []
    with See(seen), Precision("fp32", products=TF32).cast():
        y = op(*leaves)
        dy = made(*y.shape, seed=9).mul(2).round()
        y.backward(dy)
    plain = [t.clone().requires_grad_() for t in whole]
    expected = op(*plain)
    expected.backward(dy)
    assert torch.equal(y, expected)
    for leaf, other in zip(leaves, plain, strict=True):
        assert (leaf.grad is None) == (other.grad is None)
        assert leaf.grad is None or torch.equal(leaf.grad, other.grad)
    assert seen
    assert set(seen) <= {"matmul", "matmul_gradient"}


class TestExperts:
    ENDS = torch.tensor([32, 32, 96], dtype=torch.int32)  # The second has no rows.

    def test_each_group_by_hand(self) -> None:
        """Rows 96 to 128 belong to none: zeros, where torch leaves what is in memory."""
        x, w = half(made(128, 64)), half(made(3, 64, 32, seed=1))
        y, dx, dw = run(lambda x, w: F.grouped_mm(x, w, offs=self.ENDS), x, w)
        dy = half(made(128, 32, seed=9))
        for group, rows in ((0, slice(32)), (2, slice(32, 96))):
            own_x, own_w, own_dy = x[rows], w[group], dy[rows]
            forward = quantize(own_x, ROWS, MX) @ quantize(own_w, COLUMNS, MX)
            assert torch.equal(y[rows], forward.bfloat16())
            own_dx = quantize(own_dy, ROWS, MX) @ quantize(own_w, ROWS, MX).t()
            assert torch.equal(dx[rows], half(own_dx))
            own_dw = quantize(own_x, COLUMNS, MX).t() @ quantize(own_dy, COLUMNS, MX)
            assert torch.equal(dw[group], half(own_dw))
        assert not y[96:].any()
        assert not dx[96:].any()
        assert not dw[1].any()

    @pytest.mark.parametrize(
        ("left", "right"), [((8, 16), (16, 4)), ((3, 8, 8), (8, 16)), ((3, 8, 8), (3, 8, 4))]
    )
    def test_every_form(self, left: tuple[int, ...], right: tuple[int, ...]) -> None:
        """Whole numbers in a format that holds them: exact, and so are the gradients."""
        leaves = [
            made(*shape, seed=n).round().requires_grad_() for n, shape in ((0, left), (1, right))
        ]
        ends = (
            None if len(left) == len(right) == 3 else torch.tensor([4, 10, 16], dtype=torch.int32)
        )
        results = []
        for products in (TF32, "none"):
            with Precision("fp32", products=products).cast():
                y = F.grouped_mm(*leaves, offs=ends)
            dy = made(*y.shape, seed=9).round()
            results.append([y, *torch.autograd.grad(y, leaves, dy)])
        assert all(map(torch.equal, *results))


IN_HALF = {
    "addr": "an outer product sums over nothing",
    "chain_matmul": "its order is chosen inside",
    "linalg_multi_dot": "its order is chosen inside",
    "prelu": "no product",
}


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("op", sorted(OpLists.named().allow))
def test_every_op_of_allow(op: str) -> None:
    """Whatever is added to the list is a product here, forward and backward, or says why not."""
    row = TABLE[op]
    for spelling in row.spellings:
        given = map_tensors(lambda t: t.clone().requires_grad_(t.is_floating_point()), row.inputs)
        seen: list[str] = []
        with Note(seen) if op in IN_HALF else See(seen), Precision("fp32", products=TF32).cast():
            result = next(tensors_in(spelling(*given)))
            result.backward(torch.ones_like(result))
        assert bool(seen) == (op not in IN_HALF)
        if seen:
            assert any("gradient" in name for name in seen)


class TestNothingEscapes:
    """Inside an op, what is multiplied is what was quantised."""

    @pytest.fixture
    def quantised(self, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
        results: list[Tensor] = []

        def noted(*args: Any) -> Tensor:
            results.append(quantize(*args))
            return results[-1]

        def checked(function: Any) -> Any:
            def call(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
                assert any(a is own for own in results)
                assert any(b is own for own in results)
                return function(a, b, *rest)

            return call

        monkeypatch.setattr(kernels, "quantize", noted)
        monkeypatch.setattr(torch, "matmul", checked(torch.matmul))
        monkeypatch.setattr(torch, "convolution", checked(torch.convolution))
        return results

    def test_in_a_transformer_block(self, quantised: list[Tensor]) -> None:
        layer = nn.TransformerEncoderLayer(32, 1, 64, dropout=0.0, batch_first=True)
        precision = Precision("mixed", half="bfloat16", products="mxfp8")
        precision.prepare(layer, torch.optim.SGD(layer.parameters()))
        seen: list[str] = []
        with See(seen), precision.cast():
            layer(made(2, 32, 32)).float().sum().backward()
        assert (seen.count("matmul"), seen.count("matmul_gradient")) == (4, 7)  # x needs none.
        assert len(quantised) == 2 * (4 + 7)

    def test_attention_by_option(self, quantised: list[Tensor]) -> None:
        q, k, v = (made(2, 2, 64, 32, seed=s) for s in range(3))
        run(F.scaled_dot_product_attention, q, k, v)
        assert not quantised
        run(F.scaled_dot_product_attention, q, k, v, products=TF32)
        assert len(quantised) == 12


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True, "scale": 0.3}, {"enable_gqa": True}, {"mask": "bool"}, {"mask": "float"}],
    ids=str,
)
def test_attention_equals_torchs(options: dict[str, Any]) -> None:
    """To 2^-7 of the largest: two roundings to bfloat16 here and there, of 2^-9 each."""
    q, k, v = made(2, 4, 8, 16), made(2, 4, 8, 16, seed=1), made(2, 4, 8, 16, seed=2)
    if "enable_gqa" in options:
        k, v = k[:, :2], v[:, :2]
    kind = options.get("mask")
    if kind:
        mask = made(8, 8, seed=3)
        options = {"attn_mask": mask > -1 if kind == "bool" else mask}
    ours = run(lambda *t: F.scaled_dot_product_attention(*t, **options), q, k, v, products=TF32)
    theirs = run(lambda *t: F.scaled_dot_product_attention(*t, **options), q, k, v, products="none")
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == other.dtype
        assert (own - other).abs().max() <= 2**-6 * other.abs().max()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_that_is_masked_altogether_gives_0(kind: str) -> None:
    """As torch does, forward and backward: padding makes such rows."""
    q, k, v = (made(2, 4, 8, 16, seed=s) for s in range(3))
    seen = torch.ones(8, 8, dtype=torch.bool).tril(-1)  # The first row sees nothing.
    mask = seen if kind == "bool" else torch.zeros(8, 8).masked_fill(~seen, -math.inf)

    def attention(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, attn_mask=mask)

    y, *ours = run(attention, q, k, v, products=TF32)
    _, *theirs = run(attention, q, k, v, products="none")
    assert not y[:, :, 0].any()
    assert y[:, :, 1:].all()
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).abs().max() <= 2**-6 * other.abs().max()  # as above


CONVOLUTIONS = [
    (nn.Conv1d(32, 64, 3, padding=1, stride=2), made(32, 32, 9)),
    (nn.Conv2d(64, 64, (3, 2), groups=2, dilation=(1, 2), stride=(2, 1)), made(32, 64, 7, 7)),
    (nn.Conv2d(32, 32, (1, 3), padding="same", bias=False), made(32, 32, 5, 5)),
    (nn.Conv3d(32, 32, 2), made(32, 32, 3, 3, 3)),
    (nn.ConvTranspose1d(32, 64, 3, stride=2, output_padding=1, padding=1), made(32, 32, 5)),
    (nn.ConvTranspose2d(64, 64, 2, stride=2, groups=2), made(32, 64, 3, 3)),
    (nn.Conv2d(32, 64, 3), made(32, 5, 5)),
]


@pytest.mark.parametrize(
    ("layer", "x"), CONVOLUTIONS, ids=lambda v: str(v)[:60] if isinstance(v, nn.Module) else ""
)
class TestConvolution:
    def test_gives_the_product(self, layer: nn.Module, x: Tensor) -> None:
        """Exact, as above: small whole numbers in a format that holds them."""
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_((p * 50).round().clamp(-3, 3))
        results = []
        for products in ("none", "tf32"):
            layer.zero_grad()
            leaf = x.round().requires_grad_()
            seen: list[str] = []
            with Precision("fp32", products=products).cast():
                y = layer(leaf)
                dy = made(*y.shape, seed=9).round()
                with See(seen) if products == "tf32" else torch.enable_grad():
                    y.backward(dy)
            results.append([y, leaf.grad, *(p.grad.clone() for p in layer.parameters())])
            assert seen == (["convolution_gradient"] * 2 if products == "tf32" else [])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_quantises_along_what_is_summed(self, layer: Any, x: Tensor) -> None:
        x = half(x)
        leaf = x.clone().requires_grad_()
        weight = half(layer.weight.detach())
        layer.zero_grad()
        with Precision("amp", half="bfloat16", products=MX4).cast():
            y = layer(leaf)
        dy = half(made(*y.shape, seed=9))
        y.backward(dy.bfloat16())
        batched = x.dim() == weight.dim()
        first = isinstance(layer, nn.modules.conv._ConvTransposeNd)
        over_in, over_out = (COLUMNS, ROWS) if first else (ROWS, COLUMNS)
        channels = Axes((1 if batched else 0,), 0)
        samples = Axes((0,), 1)
        bias = None if layer.bias is None else half(layer.bias.detach())
        forward = by_torch(layer, quantize(x, channels, MX), quantize(weight, over_in, MX), bias)
        assert torch.equal(y, forward.bfloat16())
        for_dx, for_dw = x.clone().requires_grad_(), weight.clone().requires_grad_()
        over_out_weight = quantize(weight, over_out, MX)
        by_torch(layer, for_dx, over_out_weight, None).backward(quantize(dy, channels, MX))
        assert torch.equal(leaf.grad, half(for_dx.grad))
        if batched:
            x, dy = quantize(x, samples, MX), quantize(dy, samples, MX)
        by_torch(layer, x, for_dw, None).backward(dy)
        assert torch.equal(layer.weight.grad, half(for_dw.grad))


def by_torch(layer: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The layer in fp32, with this weight."""
    state = {"weight": w} | (
        {} if layer.bias is None else {"bias": torch.zeros_like(layer.bias) if b is None else b}
    )
    return torch.func.functional_call(layer, state, (x,))


def test_an_even_kernel_with_padding_same() -> None:
    """What is left over goes to the end: PyTorch warns that it copies the input for that."""
    x, w = made(1, 1, 5).round(), made(1, 1, 4, seed=1).mul(2).round()
    with Precision("fp32", products="tf32").cast():
        y = F.conv1d(x, w, padding="same")
    assert torch.equal(y, F.conv1d(F.pad(x, (1, 2)), w))


def test_others_see_the_op_and_not_its_parts() -> None:
    """What reads the weights is `linear`, as ever, and they are stored in half."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Conv1d(1, 32, 1))
    precision = Precision("mixed", half="bfloat16", products="mxfp8")
    precision.prepare(model, torch.optim.SGD(model.parameters()), example)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert [row.why for row in dtype_map(precision, model)] == [
        "linear in ops.allow",
        "conv1d in ops.allow",
    ]


def example(model: Any) -> Tensor:
    y: Tensor = model[1](model[0](A)[:, None])
    return y
