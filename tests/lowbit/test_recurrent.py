"""Recurrent layers and cells whose products are quantised: torch's results, product by product."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from mpframe import Precision
from mpframe.core.tree import tensors_in
from mpframe.lowbit import kernels
from mpframe.lowbit.recipe import Recipe
from mpframe.lowbit.scaling import quantize

# Every product in half, and so by our own cells, with torch's operands.
UNQUANTISED = Recipe("unquantised", {})
FORMS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": True},
    {"num_layers": 3, "dropout": 0.5},
    {"num_layers": 2, "bidirectional": True, "dropout": 0.5, "batch_first": True},
]
LENGTHS = (5, 3, 3, 1)


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(features: int) -> PackedSequence:
    return pack_sequence([made(length, features, seed=length) for length in LENGTHS])


def whole(given: Any) -> Any:
    """`given` in whole numbers from -2 to 2."""
    if isinstance(given, PackedSequence):
        return given._replace(data=whole(given.data))
    return given.round().clamp(-2, 2)


def run(
    layer: nn.Module, given: Any, products: Any, mode: str = "fp32", **options: Any
) -> list[Tensor]:
    """The results of a layer, and the gradients of its weights, for dy from -2 to 2"""
    layer.zero_grad()
    torch.manual_seed(3)  # of dropout
    with Precision(mode, products=products, **options).cast():
        y = layer(given)
    outputs = [t for t in tensors_in(y) if t.requires_grad]
    dy = [(torch.arange(t.numel()) % 5 - 2).view_as(t).to(t.dtype) for t in outputs]
    torch.autograd.backward(outputs, dy)
    return [*outputs, *(p.grad for p in layer.parameters() if p.grad is not None)]


class TestEqualsTorchs:
    @pytest.mark.parametrize(
        ("form", "half"), [(FORMS[0], None), (FORMS[2], "bfloat16"), (FORMS[3], None)], ids=str
    )
    def test_exactly_in_whole_numbers(self, form: dict[str, Any], half: str | None) -> None:
        """Layers, directions, steps, dropout (by 2) and packing, with nothing to round: all sums
        are whole numbers below 2^24; in bfloat16 the same numbers are rounded once, at the end."""
        layer = nn.RNN(4, 4, nonlinearity="relu", **form)
        with torch.no_grad():
            for number, p in enumerate(layer.parameters()):
                p.copy_(whole(made(*p.shape, seed=number)).clamp(-1, 1))
        in_half = {"mode": "amp", "half": half, "compute": "emulated"} if half else {}
        for given in (whole(made(3, 3, 4)), whole(packed(4))):
            ours = run(layer, given, UNQUANTISED, **in_half)
            theirs = run(layer, given, "none", **in_half)
            assert [t.dtype for t in ours] == [t.dtype for t in theirs]
            assert all(map(torch.equal, ours, theirs))

    @pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
    @pytest.mark.parametrize(
        ("kind", "form"),
        [*zip([nn.LSTM, nn.GRU, nn.RNN, "projected"], FORMS, strict=True), (nn.LSTM, FORMS[3])],
        ids=str,
    )
    def test_to_rounding(self, kind: Any, form: dict[str, Any]) -> None:
        """A gate sums at most 2 * 8 + 8 + 2 = 26 terms below 1, so two orders differ by at most
        26 * 2^-24 < 2^-19. Weights are so small (16 * 1/32 = 1/2) that no step makes the error of
        the step before larger; a gradient sums over at most 5 * 4 rows, 3 layers and both
        directions, times dy up to 2: 20 * 3 * 2 * 2 * 2^-19 < 2^-11."""
        more = {"proj_size": 4} if kind == "projected" else {}
        layer = (nn.LSTM if kind == "projected" else kind)(8, 8, **form, **more)
        with torch.no_grad():
            for number, p in enumerate(layer.parameters()):
                p.copy_(made(*p.shape, seed=number).clamp(-1, 1) / 32)
        for given in (made(4, 5, 8).clamp(-1, 1), packed(8)):
            ours, theirs = run(layer, given, UNQUANTISED), run(layer, given, "none")
            assert len(ours) == len(theirs)
            for own, other in zip(ours, theirs, strict=True):
                assert own.shape == other.shape
                assert (own - other).abs().max() < 2**-11


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTMCell, {}),
        (nn.GRUCell, {"bias": False}),
        (nn.RNNCell, {"bias": False, "nonlinearity": "relu"}),
    ],
)
def test_cells(kind: Any, options: dict[str, Any]) -> None:
    """Two orders of 26 terms below 1, as above, and 3 rows of dy up to 2: below 2^-16."""
    cell = kind(8, 8, **options)
    given = made(3, 8).clamp(-1, 1)
    ours, theirs = run(cell, given, UNQUANTISED), run(cell, given, "none")
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).abs().max() < 2**-16


class TestProducts:
    @pytest.fixture
    def quantised(self, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
        """What was quantised; anything else that is multiplied fails the test."""
        results: list[Tensor] = []

        def noted(*args: Any) -> Tensor:
            results.append(quantize(*args))
            return results[-1]

        def checked(a: Tensor, b: Tensor) -> Tensor:
            assert any(a is own for own in results)
            assert any(b is own for own in results)
            return torch.mm(a, b)

        monkeypatch.setattr(kernels, "quantize", noted)
        monkeypatch.setattr(torch, "matmul", checked)
        return results

    @pytest.mark.parametrize(
        ("layer", "products"),
        [
            # Forward and dw: the inputs of all 3 steps at once, the hidden state step by step. dx:
            # of what is no input of the layer, nor its first state.
            (nn.LSTM(32, 64, proj_size=32), 7 + 7 + 5),
            (nn.GRU(32, 32, 2), 8 + 8 + 5),
            (nn.RNN(32, 32, bidirectional=True), 8 + 8 + 4),
            (nn.LSTMCell(32, 32), 2 + 2),
        ],
        ids=str,
    )
    def test_each_is_quantised(self, quantised: list[Tensor], layer: Any, products: int) -> None:
        steps = () if isinstance(layer, nn.LSTMCell) else (3,)
        run(layer, made(*steps, 32, 32), "mxfp8", "amp", half="bfloat16")
        assert len(quantised) == 2 * products

    def test_each_weight_has_histories_of_its_own(self) -> None:
        layer = nn.LSTM(8, 8, proj_size=4)
        precision = Precision("mixed", half="bfloat16", products="fp8_delayed")
        precision.prepare(layer, torch.optim.SGD(layer.parameters()))
        with precision.cast():
            layer(made(3, 2, 8))[0].float().sum().backward()
        histories = precision.state_dict()["amax"]
        names = ("weight_ih_l0", "weight_hh_l0", "weight_hr_l0")
        assert set(histories) == {f"{name} {role}" for name in names for role in ("x", "w", "dy")}
        for name in names:
            own = getattr(layer, name)
            assert histories[f"{name} w"]["present"] == own.detach().float().abs().max()

    def test_compiled_and_eager_agree(self) -> None:
        torch.manual_seed(0)
        cell: Any = nn.GRUCell(32, 32)
        precision = Precision("mixed", half="bfloat16", products="mxfp8")
        cell, _ = precision.prepare(cell, torch.optim.SGD(cell.parameters()))
        results = []
        for step in (cell, torch.compile(cell, backend="aot_eager", fullgraph=True)):
            cell.zero_grad()
            with precision.cast():
                y = step(made(32, 32))
            y.float().square().sum().backward()
            results.append([y, *(p.grad for p in cell.parameters())])
        assert all(map(torch.equal, *results))
