"""apex.amp's tests (run_amp, each file named here), by behaviour: O1 is our `amp`, O2 `mixed`."""

import copy
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary import HALVES, INF, scales_after

from mpframe import Backoff, MasterWeights, Precision, Static
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer

FP32 = torch.float32
differs = pytest.mark.differs


@pytest.fixture(params=[*product(HALVES, ["native", "emulated"])], ids=lambda p: "-".join(p))
def amp(request: pytest.FixtureRequest) -> Precision:
    half, compute = request.param
    return Precision("amp", half, compute=compute)


ONES, SQUARE, ROWS, PICTURES = torch.ones(8, 8), (8, 8), (4, 8), (2, 4, 8, 8)
LAYERS: dict[str, tuple[Callable[[Tensor], Tensor], str, tuple[int, ...]]] = {
    "Linear": (nn.Linear(8, 8), "half", ROWS),
    "linear": (lambda x: F.linear(x, ONES, ONES[0]), "half", ROWS),
    "Conv2d": (nn.Conv2d(4, 4, 3), "half", PICTURES),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3)), "half", PICTURES),
    "Softmax": (nn.Softmax(dim=1), "fp32", ROWS),
    "softmax": (lambda x: F.softmax(x, dim=1), "fp32", ROWS),
    "GroupNorm": (nn.GroupNorm(2, 4), "fp32", PICTURES),
    "MSELoss": (lambda x: nn.MSELoss()(x, ONES[:4]), "fp32", ROWS),
    "mse_loss": (lambda x: F.mse_loss(x, ONES[:4]), "fp32", ROWS),
    "ReLU": (nn.ReLU(), "input", ROWS),
    "relu": (F.relu, "input", ROWS),
    "BatchNorm2d": (nn.BatchNorm2d(4), "input", PICTURES),
    "BatchNorm2d in evaluation": (nn.BatchNorm2d(4).eval(), "input", PICTURES),
    "matmul, left": (lambda x: x.matmul(ONES), "half", SQUARE),
    "matmul, right": (lambda x: ONES.matmul(x), "half", SQUARE),
    "@, left": (lambda x: x @ ONES, "half", SQUARE),
    "@, right": (lambda x: ONES @ x, "half", SQUARE),
    "pow": (lambda x: x.pow(2.0), "fp32", ROWS),
    "**": (lambda x: x**2.0, "fp32", ROWS),
    "sum": (lambda x: x.sum(), "fp32", ROWS),
    "BCELoss": (lambda x: nn.BCELoss()(x.sigmoid(), torch.ones(4)), "fp32", (4,)),
    "bce": (lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(4)), "fp32", (4,)),
}
BANNED = differs("apex refuses binary_cross_entropy in half; here it runs in fp32")


@pytest.mark.parametrize(
    "name", [*[*LAYERS][:-2], *(pytest.param(name, marks=BANNED) for name in [*LAYERS][-2:])]
)
def test_basic_casts(name: str, amp: Precision) -> None:
    """test_basic_casts: layers, functions, methods, operators, and what apex bans."""
    function, rule, shape = LAYERS[name]
    half = amp.policy.half_dtype
    for dtype in (FP32, half):
        x = torch.randn(shape).to(dtype).requires_grad_()
        with amp.cast():
            y = function(x)
        y.float().sum().backward()
        assert (y.dtype, x.grad.dtype) == ({"half": half, "fp32": FP32}.get(rule, dtype), dtype)


PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "atan2": torch.atan2,
    "x.atan2": lambda x, y: x.atan2(y),
    "mul": torch.mul,
    "x.mul": lambda x, y: x.mul(y),
    "x.add_": lambda x, y: x.clone().add_(y),
}


@pytest.mark.parametrize("name", PAIRS)
def test_promotion(name: str, amp: Precision) -> None:
    """test_promotion: of two formats the widest, but x.add_(y) is as x; the gradient is as x."""
    half = amp.policy.half_dtype
    for first, second in product((FP32, half), repeat=2):
        x, y = torch.rand(4).to(first).requires_grad_(), torch.rand(4).to(second)
        with amp.cast():
            out = PAIRS[name](x, y)
        out.float().sum().backward()
        wide = first if name == "x.add_" or first == second else FP32
        assert (out.dtype, x.grad.dtype) == (wide, first)


def test_promotion_of_many(amp: Precision) -> None:
    """test_promotion: cat of halves is half, of halves and one fp32 fp32."""
    halves = [torch.rand(4).to(amp.policy.half_dtype) for _ in range(5)]
    with amp.cast():
        assert torch.cat([*halves, torch.rand(4)]).dtype == FP32
        assert torch.cat(halves).dtype == amp.policy.half_dtype


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
    dtype = FP32 if kept == "fp32" else amp.policy.half_dtype
    # Small enough for bfloat16's eight bits to hold every sum.
    weight = nn.Parameter((torch.arange(rows * 8) % 3).view(rows, 8).to(dtype))
    x = torch.ones(2, 8)
    for _ in range(2):
        weight.grad = None
        with amp.cast():
            loss = use(x, weight)
        (4.0 * loss).backward()
        twin = weight.detach().float().requires_grad_()
        use(x, twin).backward()
        assert weight.grad.dtype == dtype
        assert torch.equal(weight.grad.float() / 4.0, twin.grad)
        with torch.no_grad(), amp.cast():
            use(x, weight)
        weight.data -= 1


STACKS = [(1, False, False), (2, False, False), (2, True, False)]
RECURRENT = [
    *product((nn.RNNCell, nn.GRUCell, nn.LSTMCell), STACKS[:1]),
    *product((nn.RNN, nn.GRU, nn.LSTM), STACKS),
    (nn.RNN, (2, False, True)),
]


@pytest.mark.parametrize(("kind", "how"), RECURRENT)
def test_recurrent(kind: Any, how: tuple[int, bool, bool], amp: Precision) -> None:
    """test_rnn: cells, stacks, both directions, packed: outputs are half, gradients as inputs."""
    (layers, both, packed), half = how, amp.policy.half_dtype
    cell = kind.__name__.endswith("Cell")
    model = kind(8, 8) if cell else kind(8, 8, num_layers=layers, bidirectional=both)
    if not cell:
        amp.attach(nn.ModuleList([model]))
    for dtype in (FP32, half):
        x = torch.randn(5, 3, 8).to(dtype).requires_grad_()
        start = torch.zeros((3, 8) if cell else (layers * (1 + both), 3, 8), dtype=dtype)
        hidden = (start, start) if "LSTM" in kind.__name__ else start
        with amp.cast():
            if packed:
                given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 3]))
                output = model(given, hidden)[0].data
            elif cell:
                for step in x:
                    hidden = model(step, hidden)
                output = hidden[0] if isinstance(hidden, tuple) else hidden
            else:
                output = model(x, hidden)[0][-1]
        output.float().sum().backward()
        assert (output.dtype, x.grad.dtype) == (half, dtype)


class Pair(nn.Module):
    def __init__(self, start: float, half: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.wide = nn.Parameter(start + torch.arange(2.0))
        self.narrow = nn.Parameter((1 + start + torch.arange(2.0)).to(half))

    def forward(self) -> Tensor:
        return (self.wide.float() * self.narrow.float()).sum()


def clear(how: str, models: list[Pair], optimizer: Any) -> None:
    """The three ways of forgetting gradients that run_amp tries."""
    if how == "none":
        for parameter in (p for model in models for p in model.parameters()):
            parameter.grad = None
    for own in {"model": models, "optimizer": [optimizer]}.get(how, []):
        own.zero_grad()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("how", ["none", "model", "optimizer"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_add_param_group(how: str, before: bool, twice: bool, half: str) -> None:
    """test_add_param_group: a second model joins after a step; the reference is plain and fp32.

    Small dyadic numbers, which half holds at first; later gradients are rounded there, hence 2^-6
    in bfloat16's eight bits and 2^-9 in float16's eleven, at numbers around 4.
    """

    def run(models: list[Pair], wrap: Callable[..., Any], *scalers: Static) -> list[Tensor]:
        first = {"params": models[0].parameters()}
        optimizer = wrap(torch.optim.SGD([first], lr=0.03125, momentum=0.125))
        scale = scalers[0].scale if scalers else 1.0
        (models[0]() * scale).backward()
        optimizer.step(*scalers)
        if before:
            clear(how, models, optimizer)
        optimizer.add_param_group({"params": list(models[1].parameters()), "lr": 0.0625})
        if not before:
            clear(how, models, optimizer)
        for _ in range(2):
            loss = (models[0]() + models[1]()) * scale
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
            optimizer.step(*scalers)
            clear(how, models, optimizer)
        return [p.detach().float() for model in models for p in model.parameters()]

    reference = run([Pair(1.0).float(), Pair(2.0).float()], lambda plain: plain)
    found = run([Pair(1.0, HALVES[half]), Pair(2.0, HALVES[half])], MasterWeights, Static(4.0))
    tolerance = 2.0**-4 if half == "bfloat16" else 2.0**-8
    for ours, theirs in zip(found, reference, strict=True):
        assert torch.allclose(ours, theirs, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("spoilt", [None, "wide", "narrow"])
@pytest.mark.parametrize("at", ["0", "1"])
@pytest.mark.parametrize("own_scalers", [True, False])
@pytest.mark.parametrize("skip", ["all", "each"])
def test_two_models_two_losses(skip: str, own_scalers: bool, at: str, spoilt: str | None) -> None:
    """test_multiple_models_optimizers_losses: an inf skips all of one optimizer, or one of two."""

    starts = {"0": 1.0, "1": 2.0}
    models = {name: Pair(start) for name, start in starts.items()}
    twins = {name: Pair(start).float() for name, start in starts.items()}
    plain, inner = (
        {
            n: torch.optim.SGD(m.parameters(), lr=starts[n] / 32, momentum=0.125)
            for n, m in own.items()
        }
        for own in (twins, models)
    )
    parts = {name: MasterWeights(sgd) for name, sgd in inner.items()}
    joint = MultiOptimizer(parts, skip=skip, own_losses=True)
    one = Backoff(init_scale=4.0)
    scalers = {"0": one, "1": Backoff(init_scale=16.0) if own_scalers else one}
    pairs = [
        (name, *pair)
        for name, model in models.items()
        for pair in zip(model.parameters(), twins[name].parameters(), strict=True)
    ]
    for step in range(3):
        for name, model in models.items():
            (model() * scalers[name].scale).backward()
        for name, ours, theirs in pairs:
            theirs.grad = ours.grad.float() / scalers[name].scale
        skipping: list[str] = []
        if step == 1 and spoilt is not None:
            getattr(models[at], spoilt).grad[0] = INF
            skipping = ["0", "1"] if skip == "all" else [at]
        joint.step(scalers if own_scalers else one)
        joint.zero_grad()
        for name in plain.keys() - skipping:
            plain[name].step()
        assert all(torch.equal(joint.master_of(ours), theirs) for _, ours, theirs in pairs)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6)
        self.gain = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.conv(x * self.gain)))


class Trained:
    def __init__(self, mode: str, half: str, init_scale: float = 2.0**8, **rules: Any) -> None:
        torch.manual_seed(0)
        self.model, self.precision = ConvNet(), Precision(mode, half)
        plain = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        _, self.optimizer = self.precision.prepare(self.model, plain)
        self.scaler = Backoff(init_scale=init_scale, **rules)

    def step(self, factor: float = 1.0) -> Tensor:
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * factor
        with self.precision.cast():
            loss = F.mse_loss(self.model(x), torch.ones(4, 6, 8, 8))
        (loss * self.scaler.scale).backward()
        self.optimizer.step(self.scaler)
        self.optimizer.zero_grad()
        return loss.detach()


MODES = [("fp32", "float16"), *product(("amp", "mixed"), HALVES)]
EACH = pytest.mark.parametrize(("mode", "half"), MODES)


@EACH
def test_restore(mode: str, half: str) -> None:
    """test_checkpointing: a run restored from its state goes on as the one that never stopped."""
    run, again = (Trained(mode, half, scale, growth_interval=2) for scale in (2.0**8, 2.0**4))
    for _ in range(3):
        run.step()
    for part in ("model", "optimizer", "scaler"):
        getattr(again, part).load_state_dict(copy.deepcopy(getattr(run, part).state_dict()))
    assert all(torch.equal(run.step(), again.step()) for _ in range(3))
    for ours, theirs in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(run.optimizer.master_of(ours), again.optimizer.master_of(theirs))


@pytest.mark.parametrize("overflows", [0, 1, 2])
@pytest.mark.parametrize("mode", ["amp", "mixed"])
def test_the_scale_falls_with_every_overflow(mode: str, overflows: int) -> None:
    """test_checkpointing: inputs of 2^17 overflow float16, and halve the scale each time."""
    run = Trained(mode, "float16")
    for _ in range(overflows):
        run.step(2.0**17)
    assert run.scaler.scale == 2.0 ** (8 - overflows)


@EACH
def test_training_lowers_the_loss(mode: str, half: str) -> None:
    """test_checkpointing: ten steps on one batch, each with a smaller loss."""
    run = Trained(mode, half)
    assert all(later < earlier for earlier, later in pairwise([run.step() for _ in range(10)]))


@differs("apex O2's state_dict is fp32; here it holds what is stored, masters_by_name fp32")
@pytest.mark.parametrize("half", HALVES)
def test_state_dict_formats(half: str) -> None:
    """test_checkpointing: no half tensor in what is saved."""
    run = Trained("mixed", half)
    assert run.model.state_dict()["conv.weight"].dtype == HALVES[half]
    assert {t.dtype for t in run.optimizer.masters_by_name(run.model).values()} == {FP32}


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


@EACH
def test_larc(mode: str, half: str) -> None:
    """test_larc: a wrapper around the optimizer runs in every mode; it sees fp32 masters."""
    torch.manual_seed(0)
    model, precision = nn.Linear(3, 2), Precision(mode, half)
    twin = copy.deepcopy(model)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.25, momentum=0.125) for m in (model, twin)]
    larc, plain = map(TrustRatio, sgd)
    _, optimizer = precision.prepare(model, larc)
    pairs = [*zip(model.parameters(), twin.parameters(), strict=True)]
    for _ in range(2):
        with precision.cast():
            loss = model(torch.ones(4, 3)).float().square().sum()
        loss.backward()
        for ours, theirs in pairs:
            theirs.grad = ours.grad.to(FP32, copy=True)
        assert not optimizer.step().skipped
        optimizer.zero_grad()
        plain.step()
    assert all(torch.equal(optimizer.master_of(ours), theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("size", [1, 55, 4096, 70_001])
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("dtype", [FP32, torch.float16, torch.bfloat16])
def test_norm_and_overflow_of_any_size(size: int, where: int, dtype: torch.dtype) -> None:
    """test_multi_tensor_scale, _l2norm, _unscale_l2norm: the first and the last value count."""
    weights = [nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in range(3)]
    optimizer = MasterWeights(torch.optim.SGD(weights, lr=1.0))
    for bad in (False, True):
        for weight in weights:
            weight.grad = torch.full_like(weight, 4.0)
        if bad:
            weights[1].grad[where] = INF
        result = optimizer.step(Static(4.0))
        assert bool(result.skipped) == bad
        wanted = torch.ones(3 * size).double().norm()
        # Three fp32 sums of equal squares, in blocks: a few units in the last of 24 bits.
        assert bad or abs(result.grad_norm / wanted - 1) < 2.0**-20


KEPT = differs("apex forgets earlier overflows at a clean step, Megatron and we only at a growth")


@pytest.mark.parametrize("clean", [0, pytest.param(9, marks=KEPT)])
@pytest.mark.parametrize("hysteresis", [2, 10])
def test_hysteresis(hysteresis: int, clean: int) -> None:
    """test_update_scale_hysteresis: that many overflows lower the scale, and each one after it."""
    scaler = Backoff(init_scale=2.0**20, growth_interval=10, hysteresis=hysteresis)
    scales = scales_after(scaler, [INF] * (hysteresis - 1) + [1.0] * clean + [INF] * 4)
    assert scales == [2.0**20] * (hysteresis - 1 + clean) + [2.0**k for k in (19, 18, 17, 16)]
