"""A train step of ResNet-18 in every dtype mode, beside plain torch and torch.autocast.

Images of 32 x 32, the stem for small images, SGD with momentum as in experiment=cifar10_resnet18.
torch.autocast in float16 takes minutes for such a batch on a CPU, so it runs a second, smaller one
beside the same competitors.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.bench.measure import Competitor, Times, race, ratio, threads, timed
from mpframe.bench.table import Claim, Table
from mpframe.loss_scaling import Backoff
from mpframe.models.resnet18 import resnet18
from mpframe.precision import Precision
from mpframe.precision.policy import has_native_half
from mpframe.trainer import Trainer

THREADS = 2
EMULATED_FLOAT16 = 1.4  # times the fp32 step
AUTOCAST_FLOAT16 = 1 / 20  # of torch.autocast("cpu", torch.float16)
NATIVE_BFLOAT16 = 1 / 1.7  # of the fp32 step, where the CPU multiplies bfloat16
PLAIN = "torch fp32"

Batch = tuple[Tensor, Tensor]


def tables(
    rounds: int, folder: Path, batch: int = 32, slow_batch: int = 2, width: int = 64
) -> list[Table]:
    """All modes at `batch`; float16 beside torch.autocast's at `slow_batch`.

    Args:
        rounds: measured rounds of the first table, >= 1.
        folder: not used: nothing is written.
        batch, slow_batch: images.
        width: channels of the first stage.
    """
    with threads(THREADS):
        return [_all_modes(rounds, batch, width), _beside_autocast_float16(slow_batch, width)]


def _all_modes(rounds: int, batch: int, width: int) -> Table:
    data = _batch(batch)
    steps: dict[str, Callable[[], Any]] = {
        PLAIN: torch_step(data, None, width),
        "torch.autocast bfloat16": torch_step(data, torch.bfloat16, width),
        "mpframe fp32": mpframe_step(data, Precision("fp32"), width),
    }
    for half in ("float16", "bfloat16"):
        for mode in ("mixed", "amp"):
            name = f"mpframe {mode} {half}"
            steps[name] = mpframe_step(data, Precision(mode, half), width)
    times = race([Competitor(name, timed(step)) for name, step in steps.items()], rounds)
    return Table("ResNet-18", _setting(batch, width), PLAIN, times, _claims(times))


def _beside_autocast_float16(batch: int, width: int) -> Table:
    data = _batch(batch)
    slow, fast = "torch.autocast float16", "mpframe mixed float16"
    steps = {
        PLAIN: torch_step(data, None, width),
        fast: mpframe_step(data, Precision("mixed", "float16"), width),
    }
    competitors = [Competitor(name, timed(step)) for name, step in steps.items()]
    slow_turn = timed(torch_step(data, torch.float16, width))
    times = race([*competitors, Competitor(slow, slow_turn, rounds=1)], rounds=5)
    claim = Claim(f"{fast} / {slow}", ratio(times, fast, slow), AUTOCAST_FLOAT16)
    return Table(
        "ResNet-18, float16 by torch.autocast", _setting(batch, width), PLAIN, times, [claim]
    )


def _claims(times: Times) -> list[Claim]:
    limits = {"float16": EMULATED_FLOAT16}
    if has_native_half("bfloat16"):
        limits["bfloat16"] = NATIVE_BFLOAT16
    names = [(f"mpframe {mode} {h}", limit) for h, limit in limits.items() for mode in _MODES]
    return [Claim(f"{name} / {PLAIN}", ratio(times, name, PLAIN), limit) for name, limit in names]


_MODES = ("mixed", "amp")


def torch_step(data: Batch, half: torch.dtype | None, width: int) -> Callable[[], Any]:
    """One step by hand, in torch.autocast where `half` is given."""
    model, optimizer = _parts(width)
    loss_function = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", half) if half else nullcontext():
            loss = loss_function(model(data[0]).float(), data[1])
        loss.backward()
        optimizer.step()

    return step


def mpframe_step(data: Batch, precision: Precision, width: int) -> Callable[[], Any]:
    """One step of the trainer; float16 with loss scaling."""
    model, optimizer = precision.prepare(*_parts(width))
    scaled = precision.policy.mode != "fp32" and precision.policy.half == "float16"
    scaler = Backoff() if scaled else None
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), precision, scaler=scaler)
    return lambda: trainer.train_step(data)


def _parts(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = resnet18(classes=10, width=width)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)


def _batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (size,), generator=generator)


def _setting(batch: int, width: int) -> str:
    return (
        f"Batch {batch}, width {width}, images 3 x 32 x 32, SGD with momentum, {THREADS} threads, "
        "Backoff for float16."
    )
