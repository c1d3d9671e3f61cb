"""A real GPU: the numbers of a step, that the host never waits in it, and its CUDA graph.

REHEARSE=1 runs on a CPU what can be shown there, as scripts/on_a_gpu.sh does without a GPU.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpframe import Backoff, LogMax, Precision
from mpframe.core.objective import supervised
from mpframe.core.trainer import StepOptions, StepTrainer

HERE = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HERE, reason="needs a CUDA device")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HERE and "REHEARSE" not in os.environ, reason="needs a CUDA device, or REHEARSE=1"
    ),
]
GPU = torch.device("cuda" if HERE else "cpu")
FP16, BF16 = torch.float16, torch.bfloat16
SCALE = 2.0**16
Batch = tuple[Tensor, Tensor]
MODES = [
    ("fp32", "float16", None),
    ("amp", "float16", Backoff),
    ("amp", "float16", LogMax),
    ("amp", "bfloat16", None),
    ("mixed", "float16", Backoff),
    ("mixed", "float16", LogMax),
    ("mixed", "bfloat16", None),
]
in_modes = pytest.mark.parametrize(("mode", "half", "scaler"), MODES, ids=str)


@pytest.fixture(autouse=True)
def _one_algorithm_for_each_convolution() -> Iterator[None]:
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    yield
    torch.backends.cudnn.deterministic = before


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.Flatten()
    return nn.Sequential(*convolutions, nn.Linear(1024, 64), nn.LayerNorm(64), nn.Linear(64, 10))


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))


def batches(count: int, size: int = 32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        images = torch.randn(size, 3, 8, 8, generator=generator)
        made.append((images.to(GPU), torch.randint(0, 10, (size,), generator=generator).to(GPU)))
    return made


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, **options)


def trainer_of(
    model: nn.Module,
    mode: str,
    half: str,
    scaler: Any = None,
    optimizer: Any = adamw,
    compute: str = "auto",
    **plan: Any,
) -> StepTrainer:
    precision = Precision(mode, half=half, compute=compute)
    model, wrapped = precision.prepare(model.to(GPU), optimizer(model))
    objective = supervised(nn.CrossEntropyLoss())
    scaler = None if scaler is None else scaler.to(GPU)
    options = StepOptions(**{"clip_norm": 1.0, **plan})
    return StepTrainer(model, wrapped, objective, precision, scaler, plan=options)


def everything(trainer: StepTrainer) -> list[Tensor]:
    """Weights, buffers, masters and the optimizer's state, copied."""
    masters = trainer.optimizer.masters_by_name(trainer.model)
    state = trainer.optimizer.inner_state_dict()["state"]
    tensors = [*trainer.model.state_dict().values(), *masters.values()]
    tensors += [value for of_one in state.values() for value in of_one.values()]
    return [tensor.clone() for tensor in tensors]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@needs_cuda
@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
def test_amp_steps_are_those_of_autocast_and_grad_scaler(half: torch.dtype) -> None:
    """The first scales overflow."""
    data, first = batches(8), 2.0**36
    hand = network().to(GPU)
    optimizer = adamw(hand)
    scaling = torch.amp.GradScaler("cuda", first, growth_interval=3, enabled=half == FP16)
    skipped = []
    for images, labels in data:
        optimizer.zero_grad()
        with torch.autocast("cuda", half):
            loss = F.cross_entropy(hand(images), labels)
        scaling.scale(loss).backward()
        scaling.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
        before = scaling.get_scale()
        scaling.step(optimizer)
        scaling.update()
        skipped.append(scaling.get_scale() < before)
    scaler = Backoff(first, growth_interval=3, max_scale=2.0**40) if half == FP16 else None
    trainer = trainer_of(network(), "amp", str(half).removeprefix("torch."), scaler)
    results = [trainer.train_step(batch) for batch in data]
    assert [bool(result.skipped) for result in results] == skipped
    assert same([*hand.parameters()], [*trainer.model.parameters()])
    assert half == BF16 or (scaler and scaler.scale.item() == scaling.get_scale())
    assert any(skipped) == (half == FP16)
    assert not all(skipped)


@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
def test_mixed_steps_are_those_of_masters_by_hand(half: torch.dtype) -> None:
    """By torch's own half kernels, where a rehearsal on a CPU would emulate."""
    data, scale = batches(8), SCALE if half == FP16 else 1.0
    hand = perceptron().to(GPU)
    masters = [weight.detach().clone() for weight in hand.parameters()]
    hand.to(half)
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    for images, labels in data:
        (F.cross_entropy(hand(images.to(half)).float(), labels) * scale).backward()
        for master, weight in zip(masters, hand.parameters(), strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float() / scale, None
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, hand.parameters(), strict=True):
                weight.copy_(master)
    name = str(half).removeprefix("torch.")
    scaler = Backoff(SCALE) if half == FP16 else None
    trainer = trainer_of(perceptron(), "mixed", name, scaler, compute="native", clip_norm=None)
    for batch in data:
        trainer.train_step(batch)
    assert same([*hand.parameters()], [*trainer.model.parameters()])
    assert same(masters, [trainer.optimizer.master_of(p) for p in trainer.model.parameters()])


@in_modes
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_changes_nothing_but_the_scale(
    mode: str, half: str, scaler: Any, window: int, fused: bool
) -> None:
    scaling = scaler() if scaler else None
    model = network().insert(1, nn.BatchNorm2d(16))
    kind = adamw if fused else lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trainer, data = trainer_of(model, mode, half, scaling, kind), batches(3)
    for batch in data:
        trainer.train_step(*[batch] * window)
    before, scale = everything(trainer), scaling and scaling.scale.clone()
    bad = torch.full_like(data[0][0], torch.inf), data[0][1]
    result = trainer.train_step(*[bad] * window)
    assert bool(result.skipped)
    assert same(everything(trainer), before)
    assert scaling is None or scaling.scale < scale
    assert not bool(trainer.train_step(*[data[0]] * window).skipped)
    assert not same(everything(trainer), before)


@needs_cuda
@in_modes
@pytest.mark.parametrize("window", [1, 3])
def test_the_host_never_waits(mode: str, half: str, scaler: Any, window: int) -> None:
    """The first steps make the optimizer's state and compare values that nobody reports."""
    model = network().insert(1, nn.BatchNorm2d(16))
    trainer, data = trainer_of(model, mode, half, scaler and scaler()), batches(window)
    for _ in range(5):
        trainer.train_step(*data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            results = [trainer.train_step(*data) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(bool(result.skipped) for result in results)


@needs_cuda
@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
def test_an_emulated_product_is_that_of_a_tensor_core(half: torch.dtype) -> None:
    """Both round once from a sum in fp32, which they take in another order.

    Sums of k products differ by at most 2 k 2^-24 of the sum of magnitudes. Tensor cores keep
    fewer bits of an addend than fp32 has: 2^-22 of the largest one. Then one rounding to half.
    """
    torch.manual_seed(0)
    left, right = torch.randn(64, 256).to(half), torch.randn(256, 32).to(half)
    name = str(half).removeprefix("torch.")
    with Precision("amp", half=name, compute="emulated").cast():
        emulated = left.float() @ right.float()
    with Precision("amp", half=name).cast():
        native = (left.to(GPU).float() @ right.to(GPU).float()).cpu()
    assert emulated.dtype == native.dtype == half
    magnitudes = left.float().abs() @ right.float().abs()
    bound = 256 * 2.0**-22 * magnitudes + torch.finfo(half).eps * emulated.float().abs()
    assert ((emulated.float() - native.float()).abs() <= bound).all()
    assert (emulated == native).float().mean() > 0.9


@in_modes
def test_a_run_goes_on_bit_for_bit_from_its_state(mode: str, half: str, scaler: Any) -> None:
    def made() -> StepTrainer:
        return trainer_of(network(), mode, half, scaler and scaler(growth_interval=2)
                          if scaler is Backoff else scaler and scaler())  # fmt: skip

    data, whole, first, second = batches(6), made(), made(), made()
    for batch in data:
        whole.train_step(batch)
    for batch in data[:3]:
        first.train_step(batch)
    second.optimizer.load_masters(second.model, first.optimizer.masters_by_name(first.model))
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.inner_state_dict()))
    if scaler:
        second.scaler.load_state_dict(first.scaler.state_dict())  # type: ignore[union-attr]
    for batch in data[3:]:
        second.train_step(batch)
    assert same(everything(whole), everything(second))


def on_a_side_stream(function: Callable[[], Any]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)


@needs_cuda
@in_modes
@pytest.mark.parametrize("window", [1, 2])
def test_a_step_can_be_captured_and_replayed(
    mode: str, half: str, scaler: Any, window: int
) -> None:
    model, data = network().insert(1, nn.BatchNorm2d(16)), batches(8)
    kind = lambda model: adamw(model, capturable=True)  # noqa: E731
    eager = trainer_of(copy.deepcopy(model), mode, half, scaler and scaler(), kind)
    captured = trainer_of(model, mode, half, scaler and scaler(), kind)
    held = tuple(torch.empty_like(tensor) for tensor in data[0])

    def step(trainer: StepTrainer, batch: Batch) -> Any:
        return trainer.train_step(*[batch] * window)

    def warm_up() -> None:
        for batch in data[:5]:
            step(captured, batch)

    on_a_side_stream(warm_up)
    graph, scaling = torch.cuda.CUDAGraph(), captured.scaler
    state = dict(scaling.state)  # type: ignore[union-attr]
    with torch.cuda.graph(graph):
        result = step(captured, held)  # type: ignore[arg-type]
        for name, tensor in state.items():
            tensor.copy_(scaling.state[name])  # type: ignore[union-attr]
    scaling.state = state  # type: ignore[union-attr]
    losses = []
    for batch in data[5:]:
        for place, tensor in zip(held, batch, strict=True):
            place.copy_(tensor)
        graph.replay()
        losses.append(result.loss.clone())
    expected = [step(eager, batch).loss for batch in data][5:]
    assert same(losses, expected)
    assert same(everything(captured), everything(eager))
