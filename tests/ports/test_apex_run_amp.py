"""apex.amp's own tests (run_amp), by behaviour: O1 is our `amp`, O2 our `mixed`.

Each test names the file of that suite whose cases it stands for. float16 there; both formats here,
computed natively and emulated.
"""

import copy
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpframe import Backoff, MasterWeights, Precision, Static
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer

INF = float("inf")
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
Function = Callable[[Tensor], Tensor]


@pytest.fixture(params=[*product(HALVES, ["native", "emulated"])], ids=lambda p: "-".join(p))
def amp(request: pytest.FixtureRequest) -> Precision:
    half, compute = request.param
    return Precision("amp", half, compute=compute)


def formats(precision: Precision, function: Function, shape: tuple[int, ...]) -> list[torch.dtype]:
    """What `function` gives for an fp32 and for a half input; gradients come in the input's."""
    given = []
    for dtype in (torch.float32, precision.policy.half_dtype):
        x = torch.randn(shape).to(dtype).requires_grad_()
        with precision.cast():
            y = function(x)
        y.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        given.append(y.dtype)
    return given


def expected(precision: Precision, rule: str) -> list[torch.dtype]:
    half = precision.policy.half_dtype
    rules = {"half": [half, half], "fp32": [torch.float32] * 2, "input": [torch.float32, half]}
    return rules[rule]


LAYERS: dict[str, tuple[Function, str, tuple[int, ...]]] = {
    "Linear": (nn.Linear(8, 8), "half", (4, 8)),
    "linear": (lambda x: F.linear(x, torch.ones(8, 8), torch.ones(8)), "half", (4, 8)),
    "Conv2d": (nn.Conv2d(4, 4, 3), "half", (2, 4, 8, 8)),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3)), "half", (2, 4, 8, 8)),
    "Softmax": (nn.Softmax(dim=1), "fp32", (4, 8)),
    "softmax": (lambda x: F.softmax(x, dim=1), "fp32", (4, 8)),
    "GroupNorm": (nn.GroupNorm(2, 4), "fp32", (2, 4, 8, 8)),
    "MSELoss": (lambda x: nn.MSELoss()(x, torch.ones(4, 8)), "fp32", (4, 8)),
    "mse_loss": (lambda x: F.mse_loss(x, torch.ones(4, 8)), "fp32", (4, 8)),
    "ReLU": (nn.ReLU(), "input", (4, 8)),
    "relu": (F.relu, "input", (4, 8)),
    "BatchNorm2d": (nn.BatchNorm2d(4), "input", (2, 4, 8, 8)),
    "BatchNorm2d in evaluation": (nn.BatchNorm2d(4).eval(), "input", (2, 4, 8, 8)),
    "matmul, left": (lambda x: x.matmul(torch.ones(8, 8)), "half", (8, 8)),
    "matmul, right": (lambda x: torch.ones(8, 8).matmul(x), "half", (8, 8)),
    "@, left": (lambda x: x @ torch.ones(8, 8), "half", (8, 8)),
    "@, right": (lambda x: torch.ones(8, 8) @ x, "half", (8, 8)),
    "pow": (lambda x: x.pow(2.0), "fp32", (4, 8)),
    "**": (lambda x: x**2.0, "fp32", (4, 8)),
    "sum": (lambda x: x.sum(), "fp32", (4, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_basic_casts(name: str, amp: Precision) -> None:
    """test_basic_casts: layers, functions, methods and operators."""
    function, rule, shape = LAYERS[name]
    assert formats(amp, function, shape) == expected(amp, rule)


@pytest.mark.differs("apex refuses binary_cross_entropy in half; here it runs in fp32")
@pytest.mark.parametrize("function", [nn.BCELoss(), F.binary_cross_entropy])
def test_banned_functions(function: Any, amp: Precision) -> None:
    """test_basic_casts: what apex does with allow_banned."""
    assert formats(amp, lambda x: function(x.sigmoid(), torch.ones(4)), (4,)) == expected(
        amp, "fp32"
    )


PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "atan2": torch.atan2,
    "x.atan2": lambda x, y: x.atan2(y),
    "mul": torch.mul,
    "x.mul": lambda x, y: x.mul(y),
}


@pytest.mark.parametrize("name", PAIRS)
def test_promotion(name: str, amp: Precision) -> None:
    """test_promotion: of two formats the widest; the gradient is as its input."""
    half = amp.policy.half_dtype
    for first, second in product((torch.float32, half), repeat=2):
        x, y = torch.rand(4).to(first).requires_grad_(), torch.rand(4).to(second)
        with amp.cast():
            out = PAIRS[name](x, y)
        wide = torch.float32 if torch.float32 in (first, second) else half
        assert out.dtype == wide
        out.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == first


def test_promotion_of_many(amp: Precision) -> None:
    """test_promotion: cat of halves is half, of halves and one fp32 fp32."""
    half = amp.policy.half_dtype
    halves = [torch.rand(4).to(half) for _ in range(5)]
    with amp.cast():
        assert torch.cat([*halves, torch.rand(4)]).dtype == torch.float32
        assert torch.cat(halves).dtype == half


def test_in_place_sums_keep_their_format(amp: Precision) -> None:
    """test_promotion: x.add_(y) is as x."""
    half = amp.policy.half_dtype
    for first, second in product((torch.float32, half), repeat=2):
        leaf = torch.rand(4).to(first).requires_grad_()
        with amp.cast():
            out = leaf.clone().add_(torch.rand(4).to(second))
        assert out.dtype == first
        out.float().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == first


class OfOneWeight(nn.Module):
    """Uses its weight twice; values small enough for bfloat16's eight bits to hold every sum."""

    def __init__(self, rows: int, use: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype):
        super().__init__()
        values = (torch.arange(rows * 8) % 3).view(rows, 8)
        self.weight, self.use = nn.Parameter(values.to(dtype)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


USES: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
    "allow": (8, lambda x, w: x.mm(w).mm(w).sum()),
    "deny": (2, lambda x, w: (x + torch.pow(w, 2) + torch.pow(w, 2)).sum()),
    "infer": (2, lambda x, w: ((x * w) * w).sum()),
}


@pytest.mark.parametrize("kept", ["fp32", "half"])
@pytest.mark.parametrize("name", USES)
def test_cache(name: str, kept: str, amp: Precision) -> None:
    """test_cache: train, evaluate without gradients, change the weight, train: no stale cast."""
    rows, use = USES[name]
    dtype = torch.float32 if kept == "fp32" else amp.policy.half_dtype
    model, x = OfOneWeight(rows, use, dtype), torch.ones(2, 8)
    for _ in range(2):
        model.weight.grad = None
        with amp.cast():
            loss = model(x)
        (4.0 * loss).backward()
        twin = model.weight.detach().float().requires_grad_()
        use(x, twin).backward()
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == dtype
        assert twin.grad is not None
        assert torch.equal(model.weight.grad.float() / 4.0, twin.grad)
        with torch.no_grad(), amp.cast():
            model(x)
        model.weight.data -= 1


CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
LAYERED = (nn.RNN, nn.GRU, nn.LSTM)


@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_cells(kind: type[nn.Module], amp: Precision) -> None:
    """test_rnn: every output of an unrolled cell is half, gradients as their inputs."""
    cell, half = kind(8, 8), amp.policy.half_dtype
    for dtype in (torch.float32, half):
        xs = [torch.randn(2, 8).to(dtype).requires_grad_() for _ in range(3)]
        zeros = torch.zeros(2, 8, dtype=dtype)
        hidden: Any = (zeros, zeros) if kind is nn.LSTMCell else zeros
        with amp.cast():
            for x in xs:
                hidden = cell(x, hidden)
        output = hidden[0] if kind is nn.LSTMCell else hidden
        assert output.dtype == half
        output.float().sum().backward()
        assert [x.grad.dtype for x in xs if x.grad is not None] == [dtype] * 3


@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", LAYERED)
def test_recurrent_layers(kind: type[nn.RNNBase], layers: int, both: bool, amp: Precision) -> None:
    """test_rnn: the same of whole layers, stacked and in both directions."""
    model = nn.ModuleList([kind(8, 8, num_layers=layers, bidirectional=both)])
    half = amp.policy.half_dtype
    amp.attach(model)
    for dtype in (torch.float32, half):
        x = torch.randn(5, 2, 8).to(dtype).requires_grad_()
        zeros = torch.zeros(layers * (1 + both), 2, 8, dtype=dtype)
        with amp.cast():
            output, _ = model[0](x, (zeros, zeros) if kind is nn.LSTM else zeros)
        assert output.dtype == half
        output[-1].float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype


def test_packed_sequences(amp: Precision) -> None:
    """test_rnn: the same of a packed sequence."""
    model = nn.ModuleList([nn.RNN(8, 8, num_layers=2)])
    amp.attach(model)
    for dtype in (torch.float32, amp.policy.half_dtype):
        x = torch.randn(5, 3, 8).to(dtype).requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 3]))
        with amp.cast():
            output, _ = model[0](packed, torch.zeros(2, 3, 8, dtype=dtype))
        assert output.data.dtype == amp.policy.half_dtype
        output.data.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype


class Pair(nn.Module):
    """A weight kept in fp32 and one kept in half, as run_amp's models have."""

    def __init__(self, start: float, half: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.wide = nn.Parameter(start + torch.arange(2.0))
        self.narrow = nn.Parameter((1 + start + torch.arange(2.0)).to(half))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.wide.float() * self.narrow.float()).sum()


X = torch.ones(2)


def clear(how: str, models: list[nn.Module], optimizer: Any) -> None:
    """The three ways of forgetting gradients that run_amp tries."""
    if how == "optimizer":
        optimizer.zero_grad()
    for model in models if how != "optimizer" else []:
        if how == "model":
            model.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("how", ["none", "model", "optimizer"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_add_param_group(how: str, before: bool, twice: bool, half: str) -> None:
    """test_add_param_group: a second model joins after a step; momentum, scale, accumulation.

    The reference is the bare optimizer over fp32 copies. All values are small dyadic numbers, which
    the half formats hold at first; later gradients are rounded there, hence 2^-6 in bfloat16's
    eight bits and 2^-9 in float16's eleven, at numbers around 4.
    """

    def run(models: list[nn.Module], optimizer: Any, scaler: Static | None) -> list[Tensor]:
        scale = 1.0 if scaler is None else scaler.scale
        step = optimizer.step if scaler is None else lambda: optimizer.step(scaler)
        (models[0](X) * scale).backward()
        step()
        if before:
            clear(how, models, optimizer)
        optimizer.add_param_group({"params": list(models[1].parameters()), "lr": 0.0625})
        if not before:
            clear(how, models, optimizer)
        for _ in range(2):
            loss = (models[0](X) + models[1](X)) * scale
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
            step()
            clear(how, models, optimizer)
        return [p.detach().float() for model in models for p in model.parameters()]

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": model.parameters(), "lr": 0.03125}], momentum=0.125)

    plain: list[nn.Module] = [Pair(1.0).float(), Pair(2.0).float()]
    reference = run(plain, sgd(plain[0]), None)
    models: list[nn.Module] = [Pair(1.0, HALVES[half]), Pair(2.0, HALVES[half])]
    found = run(models, MasterWeights(sgd(models[0])), Static(4.0))
    tolerance = 2.0**-4 if half == "bfloat16" else 2.0**-8
    for ours, theirs in zip(found, reference, strict=True):
        assert torch.allclose(ours, theirs, rtol=0.0, atol=tolerance)


class TwoLosses:
    """Two models with a loss each, in one joint optimizer, and fp32 twins with plain ones."""

    def __init__(self, skip: str, own_scalers: bool) -> None:
        self.models = {"0": Pair(1.0), "1": Pair(2.0)}
        self.twins = {"0": Pair(1.0).float(), "1": Pair(2.0).float()}
        self.plain = {name: self.sgd(name, twin) for name, twin in self.twins.items()}
        parts = {n: MasterWeights(self.sgd(n, model)) for n, model in self.models.items()}
        self.joint = MultiOptimizer(parts, skip=skip, own_losses=True)
        one = Backoff(init_scale=4.0)
        self.scalers = {"0": one, "1": Backoff(init_scale=16.0) if own_scalers else one}
        self.told: Any = self.scalers if own_scalers else one

    def sgd(self, name: str, model: nn.Module) -> torch.optim.Optimizer:
        lr = {"0": 0.03125, "1": 0.0625}[name]
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.125)

    def backward(self) -> None:
        """Gradients on both sides; the twins get the same ones in fp32."""
        for name, model in self.models.items():
            scale = self.scalers[name].scale
            (model(X) * scale).backward()
            for ours, theirs in zip(model.parameters(), self.twins[name].parameters(), strict=True):
                assert ours.grad is not None
                theirs.grad = ours.grad.float() / scale

    def step(self, skipping: list[str]) -> None:
        self.joint.step(self.told)
        self.joint.zero_grad()
        for name in self.plain.keys() - skipping:
            self.plain[name].step()

    def agree(self) -> bool:
        return all(
            torch.equal(self.joint.master_of(ours), theirs)
            for name, model in self.models.items()
            for ours, theirs in zip(model.parameters(), self.twins[name].parameters(), strict=True)
        )


@pytest.mark.parametrize("spoilt", [None, "wide", "narrow"])
@pytest.mark.parametrize("at", ["0", "1"])
@pytest.mark.parametrize("own_scalers", [True, False])
@pytest.mark.parametrize("skip", ["all", "each"])
def test_two_models_two_losses(skip: str, own_scalers: bool, at: str, spoilt: str | None) -> None:
    """test_multiple_models_optimizers_losses: one or two optimizers, one or two scalers, an inf.

    With one optimizer an inf anywhere skips the whole step (`all`); with two, only the one that has
    it (`each`).
    """
    run = TwoLosses(skip, own_scalers)
    for step in range(3):
        run.backward()
        skipping: list[str] = []
        if step == 1 and spoilt is not None:
            getattr(run.models[at], spoilt).grad[0] = INF
            skipping = ["0", "1"] if skip == "all" else [at]
        run.step(skipping)
        assert run.agree()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6)
        self.gain = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.conv(x * self.gain)))


MODES = [("fp32", "float16"), *product(("amp", "mixed"), HALVES)]


def prepared(mode: str, half: str, lr: float = 1e-2) -> tuple[Precision, nn.Module, MasterWeights]:
    torch.manual_seed(0)
    model, precision = ConvNet(), Precision(mode, half)
    _, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    return precision, model, optimizer


def conv_step(
    precision: Precision, model: nn.Module, optimizer: MasterWeights, scaler: Any, factor: float
) -> Tensor:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * factor
    with precision.cast():
        output = model(x)
        loss = F.mse_loss(output, torch.ones(4, 6, 8, 8))
    (loss * scaler.scale).backward()
    optimizer.step(scaler)
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_restore(mode: str, half: str) -> None:
    """test_checkpointing: a run restored from its state goes on as the one that never stopped."""
    precision, model, optimizer = prepared(mode, half)
    scaler = Backoff(init_scale=2.0**8, growth_interval=2)
    for _ in range(3):
        conv_step(precision, model, optimizer, scaler, 1.0)
    again_precision, again, again_optimizer = prepared(mode, half)
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    again_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again_scaler = Backoff(init_scale=2.0**4, growth_interval=2)
    again_scaler.load_state_dict(scaler.state_dict())
    for _ in range(3):
        first = conv_step(precision, model, optimizer, scaler, 1.0)
        second = conv_step(again_precision, again, again_optimizer, again_scaler, 1.0)
        assert torch.equal(first, second)
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.master_of(ours), again_optimizer.master_of(theirs))


@pytest.mark.parametrize("overflows", [0, 1, 2])
@pytest.mark.parametrize("mode", ["amp", "mixed"])
def test_the_scale_falls_with_every_overflow(mode: str, overflows: int) -> None:
    """test_checkpointing: inputs of 2^17 overflow float16, and halve the scale each time."""
    precision, model, optimizer = prepared(mode, "float16")
    scaler = Backoff(init_scale=2.0**8)
    for _ in range(overflows):
        conv_step(precision, model, optimizer, scaler, 2.0**17)
    assert scaler.scale == 2.0 ** (8 - overflows)


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_training_lowers_the_loss(mode: str, half: str) -> None:
    """test_checkpointing: ten steps on one batch, each with a smaller loss."""
    precision, model, optimizer = prepared(mode, half)
    scaler = Backoff(init_scale=2.0**8)
    losses = [conv_step(precision, model, optimizer, scaler, 1.0) for _ in range(10)]
    assert all(later < earlier for earlier, later in pairwise(losses))


@pytest.mark.differs(
    "apex O2's state_dict is fp32; here it holds what is stored, masters_by_name fp32"
)
@pytest.mark.parametrize("half", HALVES)
def test_state_dict_formats(half: str) -> None:
    """test_checkpointing: no half tensor in what is saved."""
    _, model, optimizer = prepared("mixed", half)
    assert model.state_dict()["conv.weight"].dtype == HALVES[half]
    assert {t.dtype for t in optimizer.masters_by_name(model).values()} == {torch.float32}


class TrustRatio:
    """An optimizer around an optimizer, as LARC: scales gradients by |w| / |g|, then steps it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> None:
        for weight in (p for group in self.inner.param_groups for p in group["params"]):
            weight.grad.mul_(weight.norm() / weight.grad.norm().clamp(min=1e-6))
        self.inner.step(closure)


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_larc(mode: str, half: str) -> None:
    """test_larc: a wrapper around the optimizer runs in every mode; it sees fp32 masters."""
    torch.manual_seed(0)
    model, precision = nn.Linear(3, 2), Precision(mode, half)
    twin = copy.deepcopy(model)
    larc: Any = TrustRatio(torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.125))
    _, optimizer = precision.prepare(model, larc)
    plain = TrustRatio(torch.optim.SGD(twin.parameters(), lr=0.25, momentum=0.125))
    for _ in range(2):
        with precision.cast():
            loss = model(torch.ones(4, 3)).float().square().sum()
        loss.backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.to(torch.float32, copy=True)
        assert not optimizer.step().skipped
        optimizer.zero_grad()
        plain.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(optimizer.master_of(ours), theirs)


@pytest.mark.parametrize("size", [1, 55, 4096, 70_001])
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_and_overflow_of_any_size(size: int, where: int, dtype: torch.dtype) -> None:
    """test_multi_tensor_scale, _l2norm, _unscale_l2norm: the first and the last value count."""
    weights = [nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in range(3)]
    optimizer = MasterWeights(torch.optim.SGD(weights, lr=1.0))
    for weight in weights:
        weight.grad = torch.full_like(weight, 4.0)
    result = optimizer.step(Static(4.0))
    wanted = torch.full((3 * size,), 1.0).double().norm()
    # Three fp32 sums of equal squares, in blocks: a few units in the last of 24 bits.
    assert abs(result.grad_norm / wanted - 1) < 2.0**-20
    for weight in weights:
        weight.grad = torch.full_like(weight, 4.0)
    assert weights[1].grad is not None
    weights[1].grad[where] = INF
    assert optimizer.step(Static(4.0)).skipped


def overflows_until_backoff(hysteresis: int, clean: int) -> int:
    """How many overflows lower the scale, after hysteresis - 1 of them and `clean` clean steps."""
    scaler = Backoff(init_scale=1024.0, growth_interval=10, hysteresis=hysteresis)
    for amax in [INF] * (hysteresis - 1) + [1.0] * clean:
        scaler.update(torch.tensor(amax))
    count = 0
    while scaler.scale == 1024.0:
        scaler.update(torch.tensor(INF))
        count += 1
    return count


@pytest.mark.parametrize("hysteresis", [2, 10])
def test_hysteresis(hysteresis: int) -> None:
    """test_update_scale_hysteresis: fewer overflows than that leave the scale, that many do not."""
    assert overflows_until_backoff(hysteresis, clean=0) == 1
    scaler = Backoff(init_scale=2.0**20, hysteresis=hysteresis)
    for _ in range(hysteresis + 3):
        scaler.update(torch.tensor(INF))
    assert scaler.scale == 2.0 ** (20 - 4)


@pytest.mark.differs(
    "apex forgets earlier overflows at a clean step, Megatron and we only at a growth"
)
@pytest.mark.parametrize("hysteresis", [2, 10])
def test_hysteresis_after_clean_steps(hysteresis: int) -> None:
    """test_update_scale_hysteresis: after clean steps apex wants the full number again."""
    assert overflows_until_backoff(hysteresis, clean=9) == 1
