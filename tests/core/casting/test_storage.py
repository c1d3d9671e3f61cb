"""Which weights `mixed` stores in half: those that only half ops read, as a traced step shows."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from vocabulary import HALVES

from mpframe import OpLists, Precision
from mpframe.core.errors import ConfigError
from mpframe.tracking.dtype_map import describe

FP32, HALF = torch.float32, torch.float16


class Conv1D(nn.Module):
    """Hugging Face's linear layer of GPT-2: a class of its own around addmm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.size(-1))
        return torch.addmm(self.bias, flat, self.weight).view(*x.shape[:-1], -1)


class Experts(nn.Module):
    """Slices of one weight, each for some of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 4) / 2)
        self.shift = nn.Parameter(torch.randn(3, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.chunk(3)
        parts = []
        for index in torch.arange(3):
            hidden = F.relu(F.linear(rows[index], self.up[index]) + self.shift[index])
            parts.append(hidden @ self.down[index])
        return torch.cat(parts)


class StandardizedConv2d(nn.Conv2d):
    """BiT's convolution: its weight has mean 0 and variance 1 before it convolves."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        mean = weight.mean((1, 2, 3), keepdim=True)
        weight = (weight - mean) / (weight.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class BatchNormalizedConv2d(nn.Conv2d):
    """timm's way to say the same."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Borrows(nn.Module):
    """Uses the weight of a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.lender = nn.Module()
        self.lender.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.lender.weight)


class Listed(nn.Module):
    """Weights in a list: one for a product, one for a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ParameterList([torch.randn(4, 4), torch.randn(4)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,io->no", x, self.own[0]) * self.own[1]


class Joined(nn.Module):
    """Three products in one: the weights are concatenated first."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.v = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat([self.q, self.k.t().contiguous(), self.v.clone()]))


class Twice(nn.Module):
    """A layer called twice, and another way to use its bias in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x) * self.layer.bias)


class Tied(nn.Module):
    """An embedding that is the output head too, and a head of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(4, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return self.head(hidden) + self.other(hidden)


class LooksAtShapes(nn.Module):
    """What asks for a weight's shape or format does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight) + torch.zeros_like(self.weight).sum() + self.weight.new_zeros(())
        return x.view_as(self.weight) @ self.weight.T.mT.data.requires_grad_()


class Writes(nn.Linear):
    """Computes on a copy of its weight in place."""

    def __init__(self, way: str) -> None:
        super().__init__(4, 4, bias=False)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.clone()
        if self.way == "mul_":
            weight.mul_(0.1)
        if self.way == "+=":
            weight += 0.1
        if self.way == "item":
            weight = torch.zeros(4, 4)
            weight[:] = self.weight
        return x @ weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


ROWS, LINE, IMAGE = torch.randn(6, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 6, 6)
SQUARE, WORDS = torch.randn(4, 4), torch.tensor([[0, 3, 3], [1, 2, 6]])


def normed() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(4, 4))


def spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(4, 4))


CASES: list[tuple[Callable[[], nn.Module], Tensor, set[str]]] = [
    (lambda: Conv1D(4, 3), ROWS, {"weight", "bias"}),
    (Experts, ROWS, {"up", "down"}),
    (lambda: nn.Conv2d(3, 2, 3), IMAGE, {"weight", "bias"}),
    (lambda: StandardizedConv2d(3, 2, 3), IMAGE, {"bias"}),
    (lambda: BatchNormalizedConv2d(3, 2, 3), IMAGE, {"bias"}),
    (normed, ROWS, {"bias"}),
    (spectral, ROWS, {"bias"}),
    (Borrows, ROWS, {"lender.weight"}),
    (Listed, ROWS, {"own.0"}),
    (Joined, ROWS, {"q", "k", "v"}),
    (Twice, ROWS, {"layer.weight"}),
    (Tied, WORDS, {"other.weight"}),
    (LooksAtShapes, SQUARE, {"weight"}),
    (lambda: Writes("mul_"), SQUARE, set()),
    (lambda: Writes("+="), SQUARE, set()),
    (lambda: Writes("item"), SQUARE, set()),
    (
        Attention,
        LINE,
        {f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias")}
        | {"attention.out_proj.weight", "attention.out_proj.bias"},
    ),
    (lambda: nn.LayerNorm(4), ROWS, set()),
    (lambda: nn.PReLU(), ROWS, {"weight"}),
    (lambda: nn.BatchNorm1d(4), ROWS, set()),
]
IDS = [f"{make().__class__.__name__}-{number}" for number, (make, _, _) in enumerate(CASES)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def in_half(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.dtype != FP32}


def gradients(model: nn.Module, precision: Precision, example: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    with precision.cast():
        out = model(example)
    out = out[0] if isinstance(out, tuple) else out
    (out.float().sin().sum() * 8).backward()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("compute", ["native", "emulated"])
@pytest.mark.parametrize(("make", "example", "expected"), CASES, ids=IDS)
def test_half_is_what_only_half_ops_read(
    make: Callable[[], nn.Module], example: Tensor, expected: set[str], compute: str, half: str
) -> None:
    """And no number moves for it: the gradients are those of fp32 weights cast op by op."""
    grads = {}
    for mode in ("amp", "mixed"):
        torch.manual_seed(0)
        model = make()
        precision = Precision(mode, half, compute=compute)
        model, _ = precision.prepare(model, sgd(model), example)
        grads[mode] = gradients(model, precision, example)
    assert in_half(model) == expected
    assert grads["amp"].keys() == grads["mixed"].keys()
    for name, gradient in grads["amp"].items():
        assert torch.equal(gradient, grads["mixed"][name]), name


def test_weight_standardization_keeps_its_direction() -> None:
    """Weights far from 0 lose their differences in half, and those are all that the mean leaves."""

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        layers: list[nn.Module] = [StandardizedConv2d(3, 8, 3, padding=1)]
        for _ in range(4):
            conv = StandardizedConv2d(8, 8, 3, padding=1)
            layers += [nn.GroupNorm(2, 8), nn.ReLU(), conv]
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                layer.weight.data.mul_(0.1).add_(1.0)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    images, targets = torch.randn(16, 3, 10, 10), torch.randint(0, 8, (16,))

    def gradient(model: nn.Module, block: Any) -> Tensor:
        with block:
            outputs = model(images)
        F.cross_entropy(outputs.float(), targets).backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    def distance(found: Tensor) -> float:
        return 1 - float(F.cosine_similarity(found, wanted, 0))

    wanted = gradient(net(), nullcontext())
    autocast = distance(gradient(net(), torch.autocast("cpu", torch.bfloat16)))
    found = {}
    for example in (images, None):
        model, precision = net(), Precision("mixed", "bfloat16", compute="native")
        precision.prepare(model, sgd(model), example)
        found[example is None] = distance(gradient(model, precision.cast()))
    # Both round the same operands; autocast on a CPU also runs the norms in bfloat16.
    assert found[False] < 1.2 * autocast
    assert found[True] > 20 * autocast


@pytest.mark.parametrize("op", ["batch_norm", "instance_norm"])
def test_weights_beside_statistics_stay_fp32_in_any_list(op: str) -> None:
    class Normalizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("variance", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            norm: Any = getattr(F, op)
            return norm(x, self.mean, self.variance, self.weight)  # type: ignore[no-any-return]

    model = Normalizes()
    ops = OpLists.named().moved({op: "allow"})
    precision = Precision("mixed", ops=ops)
    precision.prepare(model, sgd(model), IMAGE)
    assert [read.op for read in precision.uses(model).of(model.parameters())] == [op]
    assert in_half(model) == set()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any) -> None:
    model = kind(4, 3, num_layers=2)
    precision = Precision("mixed")
    precision.prepare(model, sgd(model), LINE)
    assert in_half(model) == {name for name, _ in model.named_parameters()}
    assert gradients(model, precision, LINE)


def test_without_an_example_the_classes_of_torch_tell() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Conv1D(4, 4))
    Precision("mixed").prepare(model, sgd(model))
    assert in_half(model) == {"0.weight", "0.bias"}


def test_what_the_trace_did_not_reach_goes_by_its_class() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.taken = Conv1D(4, 4)
            self.left_out = nn.ModuleList([nn.Linear(4, 4), Conv1D(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.taken(x)  # type: ignore[no-any-return]

    model = Branches()
    Precision("mixed").prepare(model, sgd(model), ROWS)
    taken = {"taken.weight", "taken.bias"}
    assert in_half(model) == taken | {"left_out.0.weight", "left_out.0.bias"}


@pytest.mark.parametrize(
    ("example", "given"),
    [
        (ROWS, {"x": ROWS}),
        ((ROWS, LINE), {"x": ROWS, "y": LINE}),
        ({"y": LINE, "x": ROWS}, {"x": ROWS, "y": LINE}),
    ],
)
def test_what_an_example_may_be(example: Any, given: dict[str, Tensor]) -> None:
    seen: dict[str, Any] = {}

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            seen.update(x=x, y=y)
            return self.layer(x)  # type: ignore[no-any-return]

    model = Takes()
    Precision("mixed").prepare(model, sgd(model), example)
    assert {name: value for name, value in seen.items() if value is not None} == given


class TestPins:
    def test_an_op_computes_under_the_pin_of_the_module_that_calls_it(self) -> None:
        model = nn.Sequential(Borrows(), Conv1D(3, 4))
        ops = OpLists(allow=frozenset({"linear", "addmm"}), modules={"0": "fp32"})
        Precision("mixed", ops=ops).prepare(model, sgd(model), ROWS)
        assert in_half(model) == {"1.weight", "1.bias"}

    def test_a_reader_elsewhere_pinned_to_fp32_keeps_the_weight_in_fp32(self) -> None:
        class Reads(nn.Module):
            def forward(self, x: Tensor, weight: Tensor) -> Tensor:
                return F.linear(x, weight)

        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4, bias=False)
                self.reads = Reads()

            def forward(self, x: Tensor) -> Tensor:
                return self.reads(self.layer(x), self.layer.weight)  # type: ignore[no-any-return]

        for pins, expected in (({}, {"layer.weight"}), ({"reads": "fp32"}, set())):
            model = Two()
            ops = OpLists(allow=frozenset({"linear"}), modules=pins)
            Precision("mixed", ops=ops).prepare(model, sgd(model), ROWS)
            assert in_half(model) == expected

    def test_a_pin_of_its_own_module_comes_first(self) -> None:
        """Also where it is only the storage that is pinned: `mul` follows its inputs."""
        model = nn.Sequential(Conv1D(4, 4), nn.LayerNorm(4), Listed())
        pins = {"0": "fp32", "1": "half", "2": "half"}
        ops = replace(OpLists.named(), modules=pins)
        Precision("mixed", ops=ops).prepare(model, sgd(model), ROWS)
        assert in_half(model) == {"1.weight", "1.bias", "2.own.0", "2.own.1"}


class TestNothingElseMoves:
    def test_buffers_random_numbers_and_gradients(self) -> None:
        class Noisy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
                self.register_buffer("last", None)
                self.register_buffer("same", torch.zeros(1).expand(3))

            def forward(self, x: Tensor) -> Tensor:
                self.last = x * random.random() * np.random.rand()
                self.register_buffer("more", x)
                return self.layers(x)  # type: ignore[no-any-return]

        model = Noisy()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
        precision = Precision("mixed")
        precision.trace(model, ROWS)
        assert torch.equal(state, torch.get_rng_state())
        assert python == random.getstate()
        assert np.array_equal(numpy, np.random.get_state()[1])
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert model.last is None
        assert all(p.grad is None for p in model.parameters())
        assert not any(module._forward_hooks for module in model.modules())

    def test_a_model_that_fails_is_left_as_it_was(self) -> None:
        class Fails(nn.BatchNorm1d):
            def forward(self, x: Tensor) -> Tensor:
                super().forward(x)
                raise ValueError("inside")

        model = Fails(4)
        with pytest.raises(ValueError, match="inside"):
            Precision("mixed").prepare(model, sgd(model), ROWS)
        assert torch.equal(model.running_mean, torch.zeros(4))
        assert not model._forward_hooks

    @pytest.mark.parametrize("mode", ["fp32", "amp"])
    def test_modes_that_store_fp32_do_not_run_the_model(self, mode: str) -> None:
        class Fails(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                raise AssertionError

        model = Fails(4, 4)
        Precision(mode).prepare(model, sgd(model), ROWS)
        assert in_half(model) == set()


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: its weight is a complex matrix in two real ones."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, 3, 2))
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(x.float().view(2, 4, -1))
        product = torch.einsum("bix,iox->box", frequencies, self.cast(self.w))
        return torch.fft.irfft(product).flatten(1)


@pytest.mark.parametrize(
    "cast",
    [
        torch.view_as_complex,
        lambda w: torch.complex(*w.unbind(-1)),
        lambda w: w[..., 0].to(torch.complex64),
    ],
    ids=["view", "complex", "to"],
)
@pytest.mark.parametrize("half", HALVES)
def test_weights_of_complex_products_stay_fp32(half: str, cast: Callable[[Tensor], Tensor]) -> None:
    """No input of such a product is cast, so `mixed` gives the numbers of `amp`."""
    outputs = []
    x = torch.randn(2, 4 * 4)
    for mode in ("amp", "mixed"):
        torch.manual_seed(0)
        model, precision = nn.Sequential(nn.Linear(16, 16), Spectral(cast)), Precision(mode, half)
        precision.prepare(model, sgd(model), x)
        with precision.cast():
            outputs.append(model(x))
    assert in_half(model) == {"0.weight", "0.bias"}
    assert torch.equal(*outputs)


def test_the_share_names_a_complex_product_and_no_pin() -> None:
    model, precision = nn.Sequential(Spectral(torch.view_as_complex)), Precision("mixed")
    precision.prepare(model, sgd(model), torch.randn(2, 16))
    last = describe(precision, model).splitlines()[-1]
    assert last == "  100 %: uncast einsum is in no list: 0"


def test_two_optimizers_trace_once() -> None:
    model = nn.Sequential(Conv1D(4, 4), Conv1D(4, 4))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    precision = Precision("mixed")
    for part in model:
        precision.prepare(model, sgd(part), ROWS)
    assert len(in_half(model)) == 4
    assert len(calls) == 1


def test_several_examples_are_put_together() -> None:
    """As the losses of a GAN, each of which calls another part."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Conv1D(4, 4), Conv1D(4, 4)

        def forward(self, x: Tensor, part: str) -> Tensor:
            return getattr(self, part)(x)  # type: ignore[no-any-return]

    model = Parts()
    precision = Precision("mixed")
    for name in ("one", "two"):
        precision.trace(model, (ROWS, name))
    precision.prepare(model, sgd(model))
    assert len(in_half(model)) == 4


def test_a_compiled_model_is_traced_as_it_is_written() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Conv1D(4, 4))
    compiled = torch.compile(model, backend="aot_eager")
    Precision("mixed").prepare(compiled, sgd(model), ROWS)  # type: ignore[arg-type]
    assert len(in_half(model)) == 4


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_script_is_looked_into_by_nobody() -> None:
    """It takes no hooks, and its ops are not seen: its weights go by their class."""
    script = torch.jit.script(nn.BatchNorm1d(4))
    model = nn.Sequential(Conv1D(4, 4), script)
    precision = Precision("mixed")
    precision.prepare(model, sgd(model), ROWS)
    assert in_half(model) == {"0.weight", "0.bias"}
    assert torch.equal(script.running_mean, torch.zeros(4))
    assert "never called" not in describe(precision, model)


class TestLazyLayers:
    TEXT = (
        "model: parameter '1.weight' is lazy, it has no shape before the first forward pass; run "
        "the model once first, or prepare it with an example"
    )

    @staticmethod
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Dropout())

    @pytest.mark.parametrize("mode", ["mixed", "amp"])
    def test_are_refused_before_anything_changed(self, mode: str) -> None:
        model = self.model()
        with pytest.raises(ConfigError) as error:
            Precision(mode).prepare(model, sgd(model))
        assert str(error.value) == self.TEXT
        assert model[0].weight.dtype == FP32
        assert not model[0]._forward_pre_hooks

    @pytest.mark.parametrize("mode", ["mixed", "amp"])
    def test_are_taken_once_the_model_ran(self, mode: str) -> None:
        model = self.model()
        model(ROWS)
        Precision(mode).prepare(model, sgd(model))

    @pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
    def test_get_their_shapes_from_an_example(self, mode: str) -> None:
        model = self.model()
        precision = Precision(mode)
        model, optimizer = precision.prepare(model, sgd(model), ROWS)
        assert model[1].weight.shape == (3, 4)
        assert torch.equal(model[2].running_mean, torch.zeros(3))
        assert model[2].num_batches_tracked == 0
        assert all(module.training for module in model.modules())
        linear = {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert in_half(model) == (linear if mode == "mixed" else set())
        before = optimizer.master_of(model[1].weight).clone()
        gradients(model, precision, ROWS)
        optimizer.step()
        assert not torch.equal(optimizer.master_of(model[1].weight), before)
