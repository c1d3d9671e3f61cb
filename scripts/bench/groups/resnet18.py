"""A train step of ResNet-18 in every dtype mode, beside plain torch and torch.autocast.

Images of 32 x 32, the stem for small images, SGD with momentum as in experiment=cifar10_resnet18,
fused for everybody. torch.autocast in float16 takes many seconds a step on a CPU: few rounds.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import Competitor, Times, race, threads, timed
from bench.table import Claim, Table
from mpframe.core.loss_scaling import Backoff
from mpframe.core.objective import supervised
from mpframe.core.policy import has_native_half
from mpframe.core.precision import Precision
from mpframe.models import resnet18
from mpframe.training.trainer import Trainer

THREADS = 2
EMULATED_FLOAT16 = 1.4  # times the fp32 step
AUTOCAST_FLOAT16 = 1 / 20  # of torch.autocast("cpu", torch.float16)
NATIVE_BFLOAT16 = 1 / 1.7  # of the fp32 step, if the CPU multiplies bfloat16
PLAIN = "torch fp32"
SLOW = "torch.autocast float16"

_MODES = ("mixed", "amp")

Batch = tuple[Tensor, Tensor]
Step = Callable[[], Any]


def tables(
    rounds: int, folder: Path, batches: Sequence[int] = (128, 32), width: int = 64
) -> list[Table]:
    """The step in every mode, a table for each size of a batch.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: nothing is written.
        batches: images in a batch; the first is the experiment's.
        width: channels of the first stage.
    """
    return [_table(rounds, batch, width) for batch in batches]


def _table(rounds: int, batch: int, width: int) -> Table:
    data = _batch(batch)
    with threads(THREADS):
        times = race(_competitors(data, width), rounds)
    setting = (
        f"Width {width}, images 3 x 32 x 32, fused SGD with momentum, {THREADS} "
        "threads; float16 with Backoff."
    )
    return Table(f"ResNet-18, {batch} images", setting, PLAIN, times, _claims(times))


def _competitors(data: Batch, width: int) -> list[Competitor]:
    steps = {
        PLAIN: torch_step(data, None, width),
        "torch.autocast bfloat16": torch_step(data, torch.bfloat16, width),
        "mpframe fp32": mpframe_step(data, Precision("fp32"), width),
    }
    for mode, half in product(_MODES, ("float16", "bfloat16")):
        steps[f"mpframe {mode} {half}"] = mpframe_step(data, Precision(mode, half), width)
    slow = Competitor(SLOW, timed(torch_step(data, torch.float16, width)), rounds=2)
    return [*(Competitor(name, timed(step)) for name, step in steps.items()), slow]


def _claims(times: Times) -> list[Claim]:
    limits = [("float16", PLAIN, EMULATED_FLOAT16), ("float16", SLOW, AUTOCAST_FLOAT16)]
    if has_native_half("bfloat16"):
        limits.append(("bfloat16", PLAIN, NATIVE_BFLOAT16))
    return [
        Claim.between(times, f"mpframe {mode} {half}", other, most)
        for half, other, most in limits
        for mode in _MODES
    ]


def torch_step(data: Batch, half: torch.dtype | None, width: int) -> Step:
    """One step by hand, in torch.autocast if `half` is given."""
    model, optimizer = _parts(width)
    loss_function = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", half) if half else nullcontext():
            loss = loss_function(model(data[0]).float(), data[1])
        loss.backward()
        optimizer.step()

    return step


def mpframe_step(data: Batch, precision: Precision, width: int) -> Step:
    """One step of the trainer; float16 with loss scaling."""
    model, optimizer = precision.prepare(*_parts(width))
    scaled = precision.policy.mode != "fp32" and precision.policy.half == "float16"
    scaler = Backoff() if scaled else None
    trainer = Trainer(model, optimizer, supervised(nn.CrossEntropyLoss()), precision, scaler=scaler)
    return lambda: trainer.train_step(data)


def _parts(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = resnet18(classes=10, width=width)
    weights = model.parameters()
    return model, torch.optim.SGD(weights, lr=1e-3, momentum=0.9, weight_decay=5e-4, fused=True)


def _batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (size,), generator=generator)
