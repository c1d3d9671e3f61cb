"""apex.amp's tests (run_amp, each file named here), by behaviour: O1 is our `amp`, O2 `mixed`."""

import copy
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ported import cases
from torch import Tensor, nn
from vocabulary import HALVES, INF

from mpframe import Backoff, MasterWeights, Precision, Static

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
BANNED = "apex refuses binary_cross_entropy in half; here it runs in fp32"


@pytest.mark.parametrize("name", cases(LAYERS, dict.fromkeys(["BCELoss", "bce"], BANNED)))
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


USES: list[tuple[int, Callable[[Tensor, Tensor], Tensor]]] = [
    (8, lambda x, w: x.mm(w).mm(w).sum()),
    (2, lambda x, w: (x + torch.pow(w, 2) + torch.pow(w, 2)).sum()),
    (2, lambda x, w: ((x * w) * w).sum()),
]


@pytest.mark.parametrize("kept", ["fp32", "half"])
@pytest.mark.parametrize(("rows", "use"), USES, ids=["allow", "deny", "infer"])
def test_cache(rows: int, use: Any, kept: str, amp: Precision) -> None:
    """test_cache: train, evaluate without gradients, change the weight, train: no stale cast."""
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
            if cell:
                for step in x:
                    hidden = model(step, hidden)
                output = hidden[0] if isinstance(hidden, tuple) else hidden
            else:
                pack = nn.utils.rnn.pack_padded_sequence
                output = model(pack(x, torch.tensor([5, 4, 3])) if packed else x, hidden)[0]
                output = output.data if packed else output[-1]
        output.float().sum().backward()
        assert (output.dtype, x.grad.dtype) == (half, dtype)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6)
        self.gain = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.conv(x * self.gain)))


MODES = [("fp32", "float16"), *product(("amp", "mixed"), HALVES)]
EACH = pytest.mark.parametrize(("mode", "half"), MODES)


@EACH
def test_training_lowers_the_loss(mode: str, half: str) -> None:
    """test_checkpointing: ten steps on one batch, each with a smaller loss."""
    torch.manual_seed(0)
    model, precision, scaler = ConvNet(), Precision(mode, half), Backoff(init_scale=2.0**8)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    _, optimizer = precision.prepare(model, sgd)
    x, losses = torch.randn(4, 3, 8, 8), []
    for _ in range(10):
        with precision.cast():
            losses.append(F.mse_loss(model(x), torch.ones(4, 6, 8, 8)))
        (losses[-1] * scaler.scale).backward()
        optimizer.step(scaler)
        optimizer.zero_grad()
    assert all(later < earlier for earlier, later in pairwise(losses))


@differs("apex O2's state_dict is fp32; here it holds what is stored, masters_by_name fp32")
@pytest.mark.parametrize("half", HALVES)
def test_state_dict_formats(half: str) -> None:
    """test_checkpointing: no half tensor in what is saved."""
    model = ConvNet()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    _, optimizer = Precision("mixed", half).prepare(model, sgd)
    assert model.state_dict()["conv.weight"].dtype == HALVES[half]
    assert {t.dtype for t in optimizer.masters_by_name(model).values()} == {FP32}


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
