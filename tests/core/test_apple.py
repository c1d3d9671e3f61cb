"""Apple's GPUs (MPS): they have no float64, and their fused optimizers step whatever they are told.

Here the CPU, or a fake GPU, counts as one.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary import tensors

from mpframe import Backoff, LogMax, MasterWeights, Precision, checkpoint
from mpframe.checkpoint.state import RandomState
from mpframe.core import tree
from mpframe.core.objective import supervised
from mpframe.data import Loader
from mpframe.data.metrics import RMSE, Accuracy, IoU, Perplexity
from mpframe.lab.exponents import Limits, count_exponents
from mpframe.training.callbacks.ema import Ema
from mpframe.training.evaluation import Evaluator
from mpframe.training.plan import Plan
from mpframe.training.trainer import Trainer


class NoFloat64(TorchDispatchMode):
    """Raises as MPS does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = {t.device.type for t in tensors(out) if t.dtype == torch.float64}
        assert not made & tree.APPLE, func
        return out


@pytest.fixture
def cpu(monkeypatch) -> None:
    monkeypatch.setattr(tree, "APPLE", {"cpu"})
    with NoFloat64():
        yield


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
def test_steps_and_a_validation(mode) -> None:
    """A window of two batches, the last shorter, clipped, averaged, with a scaler."""
    model, precision = nn.Linear(4, 3), Precision(mode)
    _, masters = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    averages = Ema(model, {p: masters.master_of(p) for p in model.parameters()}, 0.9)
    trainer = Trainer(
        *(model, masters, supervised(nn.CrossEntropyLoss()), precision, Backoff()),
        plan=Plan(epochs=2, accumulate=2, clip_norm=1.0),
        evaluator=Evaluator({"accuracy": Accuracy, "perplexity": Perplexity}),
    )
    data = [(torch.full((4,), row / 7), row % 3) for row in range(7)]
    trainer.fit(Loader(data, 4, shuffle=True))
    averages.update(torch.tensor(False))
    before = trainer.evaluate(Loader(data, 4, shuffle=False))
    assert 0 < before.loss < 3
    assert before.metrics["perplexity"] > 1


@pytest.mark.usefixtures("cpu")
def test_metrics_and_counts_of_exponents() -> None:
    rmse, overlap = RMSE(), IoU()
    rmse.update(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    overlap.update(torch.randn(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.int64))
    assert (rmse.compute(), overlap.compute().dtype) == (2**0.5, torch.float32)
    row = count_exponents(torch.tensor([1.0, 0.0]), Limits.of(torch.float16))
    assert row[:2].tolist() == [2.0, 1.0]


@pytest.mark.usefixtures("waited_for")
def test_a_fused_optimizer_is_not_asked_to_skip(monkeypatch) -> None:
    for apple in (frozenset(), {"cpu"}):
        monkeypatch.setattr(tree, "APPLE", apple)
        weight = nn.Parameter(torch.ones(2))
        optimizer = MasterWeights(torch.optim.AdamW([weight], fused=True))
        weight.grad = torch.ones(2)
        optimizer.step()
        assert optimizer.skips_on_device == (not apple)


def test_a_bad_micro_batch_is_left_out(monkeypatch) -> None:
    """As elsewhere, in the same numbers: weights and gradients are small whole ones."""
    results = []
    for apple in (frozenset(), {"cpu"}):
        monkeypatch.setattr(tree, "APPLE", apple)
        weight = nn.Parameter(torch.zeros(3, 2))
        optimizer = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        for value in (2.0, torch.inf, 6.0):
            weight.grad = torch.full((3, 2), value)
            optimizer.accumulate()
        assert optimizer.step().dropped == 1
        results.append(weight.detach())
    assert torch.equal(*results)
    assert results[0].unique().tolist() == [-4.0]


@pytest.mark.parametrize("kind", [Backoff, LogMax])
def test_scalers(kind, monkeypatch) -> None:
    monkeypatch.setattr(tree, "APPLE", {"cuda"})
    with FakeTensorMode(allow_non_fake_inputs=True), NoFloat64():
        scaler = kind(init_scale="probe").to("cuda")
        scaler.start_from(torch.ones((), device="cuda"))
        scaler.update(torch.ones((), device="cuda"))
    assert {value.dtype for value in scaler.state.values()} <= {torch.float32, torch.int32}


def test_the_random_state_is_saved_and_restored(monkeypatch) -> None:
    kept = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device="mps": torch.ones(3))
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda new, device="mps": kept.append(new))
    state = checkpoint.rng_state()
    checkpoint.restore_rng(state)
    device = torch.device("mps")
    RandomState.now(device).restore(device)
    assert [tensor.tolist() for tensor in kept] == [[1, 1, 1]] * 2
    checkpoint.restore_rng({k: v for k, v in state.items() if k != "mps"})  # an older one
    assert len(kept) == 2
