"""Recurrent layers and cells whose products are quantised: torch's results, product by product."""

from typing import Any

import pytest
import torch
from low_bits import made, prepared
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from mpframe import Precision
from mpframe.core.tree import tensors_in
from mpframe.lowbit.recipe import Recipe

# Every product in half, and so by our own cells, with torch's operands.
UNQUANTISED = Recipe("unquantised", {})
FIRST = {"bias": False, "batch_first": True}
STACKED = {"num_layers": 3, "dropout": 0.5}
BOTH_WAYS = {"num_layers": 2, "bidirectional": True, "dropout": 0.5, "batch_first": True}


def packed(features: int) -> PackedSequence:
    return pack_sequence([made(length, features, seed=length) for length in (5, 3, 3, 1)])


def whole(given: Any) -> Any:
    """`given` in whole numbers from -2 to 2."""
    if isinstance(given, PackedSequence):
        return given._replace(data=whole(given.data))
    return given.round().clamp(-2, 2)


def fill(layer: nn.Module, divisor: int) -> None:
    """Give the weights whole numbers from -1 to 1, or others within 1 / divisor."""
    with torch.no_grad():
        for number, p in enumerate(layer.parameters()):
            values = made(*p.shape, seed=number)
            p.copy_((values.round() if divisor == 1 else values).clamp(-1, 1) / divisor)


def run(layer: nn.Module, given: Any, products: Any, mode: str, **options: Any) -> list[Tensor]:
    """The results of a layer, and the gradients of its weights, for dy from -2 to 2"""
    layer.zero_grad()
    torch.manual_seed(3)  # of dropout
    with Precision(mode, products=products, **options).cast():
        outputs = [t for t in tensors_in(layer(given)) if t.requires_grad]
    dy = [(torch.arange(t.numel()) % 5 - 2).view_as(t).to(t.dtype) for t in outputs]
    torch.autograd.backward(outputs, dy)
    return [*outputs, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("form", "half"), [({}, None), (STACKED, "bfloat16"), (BOTH_WAYS, None)], ids=str
)
def test_exactly_torchs_in_whole_numbers(form: dict[str, Any], half: str | None) -> None:
    """Layers, directions, steps, dropout (by 2) and packing, with nothing to round: all sums are
    whole numbers below 2^24; in bfloat16 the same numbers are rounded once, at the end."""
    fill(layer := nn.RNN(4, 4, nonlinearity="relu", **form), 1)
    mode = {"mode": "amp", "half": half, "compute": "emulated"} if half else {"mode": "fp32"}
    for given in (whole(made(3, 3, 4)), whole(packed(4))):
        ours, theirs = (run(layer, given, own, **mode) for own in (UNQUANTISED, "none"))
        assert [t.dtype for t in ours] == [t.dtype for t in theirs]
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("kind", "form"),
    [(nn.LSTM, {}), (nn.GRU, FIRST), (nn.RNN, STACKED), (nn.LSTM, {**BOTH_WAYS, "proj_size": 4}),
     (nn.LSTM, BOTH_WAYS), (nn.LSTMCell, {}), (nn.GRUCell, {"bias": False}),
     (nn.RNNCell, {"bias": False, "nonlinearity": "relu"})],
    ids=str,
)  # fmt: skip
def test_torchs_to_rounding(kind: Any, form: dict[str, Any]) -> None:
    """A gate sums at most 2 * 8 + 8 + 2 = 26 terms below 1, so two orders differ by at most
    26 * 2^-24 < 2^-19. Weights are so small (16 * 1/32 = 1/2) that no step makes the error of the
    step before larger; a gradient sums over at most 5 * 4 rows, 3 layers and both directions, times
    dy up to 2: 20 * 3 * 2 * 2 * 2^-19 < 2^-11. That of a cell has 3 rows: below 2^-16."""
    fill(layer := kind(8, 8, **form), 32)
    cell = isinstance(layer, nn.RNNCellBase)
    for given in [made(3, 8).clamp(-1, 1)] if cell else [made(4, 5, 8).clamp(-1, 1), packed(8)]:
        ours, theirs = (run(layer, given, own, "fp32") for own in (UNQUANTISED, "none"))
        for own, other in zip(ours, theirs, strict=True):
            assert own.shape == other.shape
            assert (own - other).abs().max() < (2**-16 if cell else 2**-11)


def test_each_weight_has_histories_of_its_own() -> None:
    layer = nn.LSTM(8, 8, proj_size=4)
    precision = prepared(layer, "fp8_delayed")
    with precision.cast():
        layer(made(3, 2, 8))[0].float().sum().backward()
    histories = precision.state_dict()["amax"]
    names = ("weight_ih_l0", "weight_hh_l0", "weight_hr_l0")
    assert set(histories) == {f"{name} {role}" for name in names for role in ("x", "w", "dy")}
    for name in names:
        own = getattr(layer, name)
        assert histories[f"{name} w"]["present"] == own.detach().float().abs().max()
