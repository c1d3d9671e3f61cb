"""The probe before step 1: it finds the scale the first steps can bear, and leaves no trace."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpframe import Backoff, LogMax, OpLists, Precision, Trainer
from mpframe.core.objective import supervised
from mpframe.training.objectives import model_loss
from mpframe.training.probe import probe_amax

MODES = [(m, h) for m in ("mixed", "amp") for h in ("float16", "bfloat16")]


def make_trainer(mode: str, half: str, scaler: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(144, 10),
    )  # fmt: skip
    precision = Precision(mode, half)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    objective = supervised(nn.CrossEntropyLoss())
    return Trainer(model, optimizer, objective, precision=precision, scaler=scaler)


def batch(factor: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 1, 8, 8, generator=generator)
    return inputs * factor, torch.randint(0, 10, (8,), generator=generator)


@pytest.mark.parametrize("make", [Backoff, LogMax])
@pytest.mark.parametrize(("mode", "half"), MODES)
def test_the_first_step_is_not_skipped_and_the_scale_is_as_high_as_it_can_be(
    mode: str, half: str, make: Any
) -> None:
    dtype = getattr(torch, half)
    bounds = {"min_scale": 2.0**-20, "max_scale": 2.0**100}
    trainer = make_trainer(mode, half, make(init_scale="probe", half=dtype, **bounds))
    trainer.probe(batch())
    scale = float(trainer.scaler.scale)
    assert not trainer.scaler.wants_probe
    result = trainer.train_step(batch())
    assert not bool(result.skipped)
    # The largest parameter gradient is no larger than what the probe saw, so it stays in range.
    assert float(result.amax) * scale <= torch.finfo(dtype).max
    higher = make_trainer(
        mode, half, make(init_scale=min(scale * 2.0**6, 2.0**100), half=dtype, **bounds)
    )
    if half == "float16":
        assert bool(higher.train_step(batch()).skipped)


def test_gradients_of_activations_count() -> None:
    """A loss with a gradient of 64 on its input and of 2^-10 on the only weight."""

    class Weak(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    model = nn.Sequential(Weak(), nn.Identity())
    precision = Precision("amp")
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    scaler = Backoff(init_scale="probe")
    objective = supervised(lambda y, _: 64.0 * y.sum())
    trainer = Trainer(model, optimizer, objective, precision=precision, scaler=scaler)
    trainer.probe((torch.tensor([2.0**-16]), None))
    # 2^9 is the largest power of two with 2^9 * 64 <= 65504 / 2.
    assert float(scaler.scale) == 2.0**8 or float(scaler.scale) == 2.0**9
    assert float(scaler.scale) * 64.0 <= 65504.0 / 2.0


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_a_probe_leaves_no_trace(mode: str, half: str) -> None:
    """Steps after a probe are bit for bit those without it, at the same scale."""
    probed = make_trainer(mode, half, Backoff(init_scale="probe", min_scale=1.0))
    before = copy.deepcopy(probed.state_dict()["weights"])
    torch.manual_seed(5)
    probed.probe(batch())
    after = probed.state_dict()["weights"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in probed.model.parameters())
    scale = float(probed.scaler.scale)
    first = [float(probed.train_step(batch()).loss) for _ in range(3)]
    plain = make_trainer(mode, half, Backoff(init_scale=scale))
    torch.manual_seed(5)
    second = [float(plain.train_step(batch()).loss) for _ in range(3)]
    assert first == second


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("ops", ["none", "default"])
def test_half_weights_are_probed_as_the_fp32_numbers_they_are(ops: str, half: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    precision = Precision("mixed", half, ops=OpLists.named(ops), compute="emulated")
    narrow, full = model(), model()
    precision.prepare(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1))
    full.load_state_dict(narrow.state_dict())  # The same rounded weights, stored in fp32.
    batch, loss = (torch.randn(4, 8), torch.tensor([0, 1, 2, 0])), supervised(nn.CrossEntropyLoss())
    formats = [p.dtype for p in narrow.parameters()]
    probed = probe_amax(narrow, loss, precision, batch)
    assert torch.equal(probed, probe_amax(full, loss, Precision(), batch))
    assert [p.dtype for p in narrow.parameters()] == formats
    pairs = zip(narrow.parameters(), full.parameters(), strict=True)
    assert all(torch.equal(a.float(), b) for a, b in pairs)


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_a_model_that_returns_its_loss_is_probed_as_one_beside_a_loss(mode: str, half: str) -> None:
    class OwnLoss(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": nn.functional.cross_entropy(super().forward(x), labels)}

    inputs, targets = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    amaxes = []
    for kind, objective, given in (
        (nn.Linear, supervised(nn.CrossEntropyLoss()), (inputs, targets)),
        (OwnLoss, model_loss, {"x": inputs, "labels": targets}),
    ):
        torch.manual_seed(0)
        model, precision = kind(8, 3), Precision(mode, half)
        precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        amaxes.append(probe_amax(model, objective, precision, given))
    # The probe sees the gradient of every module's output: the second model's is its loss, 1.
    assert amaxes[0] < 1 == amaxes[1]
