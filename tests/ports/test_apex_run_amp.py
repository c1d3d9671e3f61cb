"""apex.amp's tests (run_amp, each file named here), by behaviour: O1 is our `amp`, O2 `mixed`."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary import HALVES, INF

from mpframe import MasterWeights, Precision, Static

FP32 = torch.float32
differs, each = pytest.mark.differs, pytest.mark.parametrize


@pytest.fixture(params=[*product(HALVES, ["native", "emulated"])], ids=lambda p: "-".join(p))
def amp(request: pytest.FixtureRequest) -> Precision:
    half, compute = request.param
    return Precision("amp", half, compute=compute)


BANNED = differs("apex refuses binary_cross_entropy in half; here it runs in fp32")
ONES = torch.ones(8, 8)
# What is run on a matrix, and the format of its result: half, fp32, or that of the matrix.
CASTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "Linear": (nn.Linear(8, 8), "half"),
    "linear": (lambda x: F.linear(x, ONES, ONES[0]), "half"),
    "Conv1d": (nn.Conv1d(8, 8, 3), "half"),
    "conv2d": (lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 3, 3)), "half"),
    "matmul, left": (lambda x: x.matmul(ONES), "half"),
    "matmul, right": (lambda x: ONES.matmul(x), "half"),
    "@, left": (lambda x: x @ ONES, "half"),
    "@, right": (lambda x: ONES @ x, "half"),
    "Softmax": (nn.Softmax(dim=1), "fp32"),
    "GroupNorm": (nn.GroupNorm(2, 8), "fp32"),
    "MSELoss": (lambda x: nn.MSELoss()(x, ONES), "fp32"),
    "mse_loss": (lambda x: F.mse_loss(x, ONES), "fp32"),
    "pow": (lambda x: x.pow(2.0), "fp32"),
    "**": (lambda x: x**2.0, "fp32"),
    "sum": (lambda x: x.sum(), "fp32"),
    "BCELoss": (lambda x: nn.BCELoss()(x.sigmoid(), ONES), "fp32"),
    "ReLU": (nn.ReLU(), "input"),
    "BatchNorm1d": (nn.BatchNorm1d(8), "input"),
    "BatchNorm1d in evaluation": (nn.BatchNorm1d(8).eval(), "input"),
    # test_promotion: of two formats the widest, but x.add_(y) is as x.
    "atan2": (lambda x: torch.atan2(x, ONES), "fp32"),
    "x.atan2": (lambda x: x.atan2(ONES), "fp32"),
    "mul, half": (lambda x: torch.mul(x, ONES.to(x.dtype)), "input"),
    "cat": (lambda x: torch.cat([x, x.detach(), ONES]), "fp32"),
    "cat, half": (lambda x: torch.cat([x, x.detach()]), "input"),
    "x.add_": (lambda x: x.clone().add_(ONES), "input"),
}


@each("name", [pytest.param(n, marks=[BANNED] if n == "BCELoss" else ()) for n in CASTS])
def test_basic_casts_and_promotion(name: str, amp: Precision) -> None:
    """test_basic_casts: layers, functions, methods and operators; gradients are as their tensor."""
    function, rule = CASTS[name]
    half = amp.policy.half_dtype
    for dtype in (FP32, half):
        x = torch.rand(8, 8).to(dtype).requires_grad_()
        with amp.cast():
            y = function(x)
        y.float().sum().backward()
        assert (y.dtype, x.grad.dtype) == ({"half": half, "fp32": FP32}.get(rule, dtype), dtype)


USES: list[tuple[int, Callable[[Tensor, Tensor], Tensor]]] = [
    (8, lambda x, w: x.mm(w).mm(w).sum()),
    (2, lambda x, w: (x + torch.pow(w, 2) + torch.pow(w, 2)).sum()),
    (2, lambda x, w: ((x * w) * w).sum()),
]


@each("kept", ["fp32", "half"])
@each(("rows", "use"), USES, ids=["allow", "deny", "infer"])
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


@each("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell, nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent(kind: Any, amp: Precision) -> None:
    """test_rnn: cells, stacks, both directions, packed: outputs are half, gradients as inputs."""
    half, cell, pack = amp.policy.half_dtype, "Cell" in kind.__name__, nn.utils.rnn.pack_sequence
    model = kind(8, 8) if cell else kind(8, 8, num_layers=2, bidirectional=True)
    amp.attach(nn.ModuleList([] if cell else [model]))
    for dtype, packed in product((FP32, half), (False, not cell)):
        x = torch.randn(3, 8).to(dtype).requires_grad_()
        with amp.cast():
            output = model(pack([x]) if packed else x)
        while not isinstance(output, Tensor):
            output = output[0]
        output.float().sum().backward()
        assert (output.dtype, x.grad.dtype) == (half, dtype)


@differs("apex O2's state_dict is fp32; here it holds what is stored, masters_by_name fp32")
@each("half", HALVES)
def test_state_dict_formats(half: str) -> None:
    """test_checkpointing: no half tensor in what is saved."""
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    _, optimizer = Precision("mixed", half).prepare(model, sgd)
    assert model.state_dict()["weight"].dtype == HALVES[half]
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


@each(("mode", "half"), [("fp32", "float16"), *product(("amp", "mixed"), HALVES)])
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


@each("size", [1, 55, 70_001])
@each("where", [0, -1])
@each("dtype", [FP32, torch.float16, torch.bfloat16])
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
