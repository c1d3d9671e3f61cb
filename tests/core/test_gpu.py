"""A real GPU: the numbers of a step, that the host never waits in it, and its CUDA graph.

REHEARSE=1 runs on a CPU what can be shown there, as scripts/on_a_gpu.sh does without a GPU.
"""

import copy
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vocabulary import HALVES, same_bits

from mpframe import Backoff, LogMax, Precision
from mpframe.core.objective import supervised
from mpframe.core.trainer import StepOptions, StepTrainer

HERE = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HERE, reason="needs a CUDA device")
away = not HERE and "REHEARSE" not in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(away, reason="needs a CUDA device, or REHEARSE=1"),
]
GPU = torch.device("cuda" if HERE else "cpu")
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
adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)


@pytest.fixture(autouse=True)
def _one_algorithm_for_each_convolution(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def network():
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.Flatten()
    return nn.Sequential(*convolutions, nn.Linear(1024, 64), nn.LayerNorm(64), nn.Linear(64, 10))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(32, 3, 8, 8, generator=generator) for _ in range(count)]
    labels = [torch.randint(0, 10, (32,), generator=generator) for _ in range(count)]
    return [(i.to(GPU), own.to(GPU)) for i, own in zip(images, labels, strict=True)]


def trainer_of(model, mode, half, scaler=None, optimizer=adamw, compute="auto", clip=1.0):
    precision = Precision(mode, half=half, compute=compute)
    model, wrapped = precision.prepare(model.to(GPU), optimizer(model.parameters()))
    objective, options = supervised(nn.CrossEntropyLoss()), StepOptions(clip_norm=clip)
    scaler = scaler and scaler.to(GPU)
    return StepTrainer(model, wrapped, objective, precision, scaler, plan=options)


def everything(trainer):
    """Weights, buffers, masters and the optimizer's state, copied."""
    masters = trainer.optimizer.masters_by_name(trainer.model)
    state = trainer.optimizer.inner_state_dict()["state"]
    tensors = [*trainer.model.state_dict().values(), *masters.values()]
    tensors += [value for of_one in state.values() for value in of_one.values()]
    return [tensor.clone() for tensor in tensors]


@needs_cuda
@pytest.mark.parametrize("half", HALVES)
def test_amp_steps_are_those_of_autocast_and_grad_scaler(half) -> None:
    """The first scales overflow."""
    data, first, scales = batches(8), 2.0**36, half == "float16"
    hand = network().to(GPU)
    optimizer = adamw(hand.parameters())
    scaling = torch.amp.GradScaler("cuda", first, growth_interval=3, enabled=scales)
    skipped = []
    for images, labels in data:
        optimizer.zero_grad()
        with torch.autocast("cuda", HALVES[half]):
            loss = F.cross_entropy(hand(images), labels)
        scaling.scale(loss).backward()
        scaling.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
        before = scaling.get_scale()
        scaling.step(optimizer)
        scaling.update()
        skipped.append(scaling.get_scale() < before)
    scaler = Backoff(first, growth_interval=3, max_scale=2.0**40) if scales else None
    trainer = trainer_of(network(), "amp", half, scaler)
    assert [bool(trainer.train_step(batch).skipped) for batch in data] == skipped
    assert same_bits(hand.parameters(), trainer.model.parameters())
    assert not scales or scaler.scale.item() == scaling.get_scale()
    assert any(skipped) == scales
    assert not all(skipped)


@pytest.mark.parametrize(("half", "scale"), [("float16", 2.0**16), ("bfloat16", 1.0)])
def test_mixed_steps_are_those_of_masters_by_hand(half, scale) -> None:
    """By torch's own half kernels, where a rehearsal on a CPU would emulate."""

    def perceptron():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))

    data, hand = batches(8), perceptron().to(GPU)
    masters = [weight.detach().clone() for weight in hand.parameters()]
    hand.to(HALVES[half])
    pairs = [*zip(masters, hand.parameters(), strict=True)]
    optimizer = adamw(masters)
    for images, labels in data:
        (F.cross_entropy(hand(images.to(HALVES[half])).float(), labels) * scale).backward()
        for master, weight in pairs:
            master.grad, weight.grad = weight.grad.float() / scale, None
        optimizer.step()
        for master, weight in pairs:
            weight.data.copy_(master)
    scaler = Backoff(scale) if half == "float16" else None
    trainer = trainer_of(perceptron(), "mixed", half, scaler, compute="native", clip=None)
    for batch in data:
        trainer.train_step(batch)
    assert same_bits(hand.parameters(), trainer.model.parameters())
    assert same_bits(masters, map(trainer.optimizer.master_of, trainer.model.parameters()))


@in_modes
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", [adamw, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_a_skipped_step_changes_nothing_but_the_scale(mode, half, scaler, window, kind) -> None:
    scaling, model = scaler and scaler(), network().insert(1, nn.BatchNorm2d(16))
    trainer, data = trainer_of(model, mode, half, scaling, kind), batches(3)
    for batch in data:
        trainer.train_step(*[batch] * window)
    before, scale = everything(trainer), scaling and scaling.scale.clone()
    bad = torch.full_like(data[0][0], torch.inf), data[0][1]
    assert bool(trainer.train_step(*[bad] * window).skipped)
    assert same_bits(everything(trainer), before)
    assert scaling is None or scaling.scale < scale
    assert not bool(trainer.train_step(*[data[0]] * window).skipped)
    assert not same_bits(everything(trainer), before)


@needs_cuda
@in_modes
@pytest.mark.parametrize("window", [1, 3])
def test_the_host_never_waits(mode, half, scaler, window) -> None:
    """The first steps make the optimizer's state and compare values that nobody reports."""
    model = network().insert(1, nn.BatchNorm2d(16))
    trainer, data = trainer_of(model, mode, half, scaler and scaler()), batches(window)
    for _ in range(5):
        trainer.train_step(*data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [trainer.train_step(*data) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(bool(result.skipped) for result in results)


@needs_cuda
@pytest.mark.parametrize("half", HALVES)
def test_an_emulated_product_is_that_of_a_tensor_core(half) -> None:
    """Both round once from a sum in fp32, which they take in another order.

    Sums of k products differ by at most 2 k 2^-24 of the sum of magnitudes. Tensor cores keep
    fewer bits of an addend than fp32 has: 2^-22 of the largest one. Then one rounding to half.
    """
    torch.manual_seed(0)
    left, right = (torch.randn(s).to(HALVES[half]).float() for s in ((64, 256), (256, 32)))
    with Precision("amp", half=half, compute="emulated").cast():
        emulated = left @ right
    with Precision("amp", half=half).cast():
        native = (left.to(GPU) @ right.to(GPU)).cpu()
    assert emulated.dtype == native.dtype == HALVES[half]
    eps, magnitudes = torch.finfo(HALVES[half]).eps, left.abs() @ right.abs()
    bound = 256 * 2.0**-22 * magnitudes + eps * emulated.float().abs()
    assert ((emulated.float() - native.float()).abs() <= bound).all()
    assert (emulated == native).float().mean() > 0.9


@needs_cuda
@in_modes
@pytest.mark.parametrize("window", [1, 2])
def test_a_step_can_be_captured_and_replayed(mode, half, scaler, window) -> None:
    """The host never waits in it, because a capture refuses that. It ends in the state of one that
    is not captured."""
    model, data = network().insert(1, nn.BatchNorm2d(16)), batches(8)
    kind = partial(adamw, capturable=True)
    eager, captured = (
        trainer_of(copy.deepcopy(model), mode, half, scaler and scaler(), kind) for _ in range(2)
    )
    held = tuple(torch.empty_like(tensor) for tensor in data[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in data[:5]:
            captured.train_step(*[batch] * window)
    torch.cuda.current_stream().wait_stream(stream)
    graph, scaling, losses = torch.cuda.CUDAGraph(), captured.scaler, []
    state = dict(scaling.state)
    with torch.cuda.graph(graph):
        result = captured.train_step(*[held] * window)
        for name, tensor in state.items():
            tensor.copy_(scaling.state[name])
    scaling.state = state
    for batch in data[5:]:
        for place, tensor in zip(held, batch, strict=True):
            place.copy_(tensor)
        graph.replay()
        losses.append(result.loss.clone())
    expected = [eager.train_step(*[batch] * window).loss for batch in data]
    assert same_bits(losses, expected[5:])
    assert same_bits(everything(captured), everything(eager))
