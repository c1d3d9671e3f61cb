"""Model and casts compiled into one graph: the same steps as without."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary import HALVES, same_bits

from mpframe import OpLists, Precision, Static

MODES = [("fp32", "float16"), *((m, h) for m in ("mixed", "amp") for h in HALVES)]
STEPS = 20


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A convolution with BatchNorm, then products, a norm and a softmax: every list has a part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.batch_norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.hidden, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.batch_norm(self.conv(x))), 2).flatten(1)
        x = x + F.gelu(self.norm(self.hidden(x)))
        return self.head(x * x.softmax(-1))


class Attends(nn.Module):
    """What is hidden in Python functions of torch: attention, normalize, `1 / x`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(F.gelu(self.first(x)))
        x = 1 / (x * x + 1) + F.normalize(x, dim=-1) + torch.cat([x, x], -1)[..., :8]
        return self.head(x).softmax(-1)


def losses(precision: Precision, compiled: bool) -> list[float]:
    model: Any = Net()
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with precision.cast():
            return F.cross_entropy(model(x), y)

    run = torch.compile(forward, fullgraph=True) if compiled else forward
    generator, scaler, found = torch.Generator().manual_seed(1), Static(2.0**8), []
    for _ in range(STEPS):
        y = torch.randint(0, 4, (8,), generator=generator)
        x = torch.randn(8, 1, 6, 6, generator=generator) + y.view(8, 1, 1, 1)
        loss = run(x, y)
        (loss * scaler.scale).backward()
        optimizer.step(scaler)
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_twenty_steps_are_those_of_eager(mode: str, half: str) -> None:
    """A compiler may leave out the rounding between two fused element-wise ops, and add in another
    order. Per step that is at most R roundings of relative size u along the way to the loss, each
    of which changes the loss, and by its gradient the next weights, by a share u of themselves:

        |difference after n steps| <= n R u max|loss|

    R = 16 element-wise ops, products and sums between input and loss (of Net); u is half a unit in
    the last place of the run's format.
    """
    precision = Precision(mode, half)
    eager, compiled = losses(precision, False), losses(Precision(mode, half), True)
    u = torch.finfo(torch.float32 if mode == "fp32" else HALVES[half]).eps / 2
    bounds = [(n + 1) * 16 * u * max(eager) for n in range(STEPS)]
    differences = [abs(a - b) for a, b in zip(eager, compiled, strict=True)]
    assert all(d <= bound for d, bound in zip(differences, bounds, strict=True))
    assert eager[-1] < 0.8 * eager[0]  # and it learns


@pytest.mark.parametrize("modules", [{}, {"encoder": "fp32", "head": "half"}])
@pytest.mark.parametrize(("mode", "half"), MODES[1:3])
def test_one_graph_without_a_first_run(mode: str, half: str, modules: dict[str, str]) -> None:
    """Traced cold: no plan of an op has been made before."""
    lists, model = OpLists.named(), Attends()
    ops = OpLists(lists.allow, lists.deny, lists.infer, modules)
    precision = Precision(mode, half, ops=ops)
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    x = torch.rand(2, 3, 8)

    def forward(x: Tensor) -> Tensor:
        with precision.cast():
            return model(x)

    traced = torch.compile(forward, fullgraph=True, backend="eager")(x)
    assert same_bits([traced], [forward(x)])


def test_blocks_nest_in_a_graph() -> None:
    amp, full = Precision("amp"), Precision("fp32")
    x = torch.rand(4, 4)

    def forward(x: Tensor) -> tuple[torch.dtype, ...]:
        with amp.cast():
            first = x @ x
            with full.cast():
                second = x @ x
            with amp.cast():
                third = x @ x
        return first.dtype, second.dtype, third.dtype, (x @ x).dtype

    expected = (torch.float16, torch.float32, torch.float16, torch.float32)
    assert forward(x) == expected
    assert torch.compile(forward, fullgraph=True, backend="eager")(x) == expected


def test_the_roundings_of_emulation_survive_the_compiler() -> None:
    """Inductor drops a cast to half and back. 1 + 2^-12 must be 1, and 300 * 300 must be inf."""
    precision = Precision("amp", compute="emulated")

    def forward(a: Tensor, b: Tensor) -> Tensor:
        with precision.cast():
            return F.relu(a @ b) @ a

    compiled = torch.compile(forward, fullgraph=True)
    fine, large = torch.full((4, 4), 1 + 2.0**-12), torch.full((4, 4), 300.0)
    assert compiled(fine, large)[0, 0].item() == 4800
    assert compiled(large, large).isinf().all()
    fine.requires_grad_()
    compiled(fine, large).float().sum().backward()
    compiled_gradient, fine.grad = fine.grad, None
    forward(fine, large).float().sum().backward()
    assert same_bits([compiled_gradient], [fine.grad])  # type: ignore[list-item]


def test_a_compiled_model_inside_a_block() -> None:
    """The block may stand around the compiled call as well: kernels are not cast a second time."""
    for compute in ("emulated", "native"):
        precision = Precision("amp", "bfloat16", compute=compute)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.rand(4, 8)
        with precision.cast():
            expected = model(x)
            result = torch.compile(model, fullgraph=True)(x)
        # tanh between the products is rounded in eager and need not be when fused: half a unit in
        # the last place of each of 8 terms of size <= 1.
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=9 * 2.0**-9)
