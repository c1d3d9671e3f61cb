"""What lives from step to step stays where it is, as a CUDA graph needs it, and is nothing more.

All tensors that Python knows are looked at after each step, by the address of their memory.
"""

import gc
import warnings

import pytest
import torch
from torch import Tensor, nn

from mpframe import Backoff, LogMax, Precision
from mpframe.core.objective import StepOutput
from mpframe.core.trainer import StepOptions, StepTrainer

WIDTH = 512  # Of smaller weights masters keep a copy, to notice writes, and not row sums.
PARAMETERS = 2 * (WIDTH * WIDTH + 3 * WIDTH)


def living() -> dict[int, int]:
    """The bytes of each memory on the CPU, by address."""
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # Deprecated names are asked for their type.
        tensors = [t for t in gc.get_objects() if isinstance(t, Tensor)]
    stored = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
    return {memory.data_ptr(): memory.nbytes() for memory in stored if memory.device.type == "cpu"}


def objective(model: nn.Module, batch: Tensor) -> StepOutput:
    return StepOutput(model(batch).float().square().mean(), len(batch))


CASES = {
    ("fp32", "float16", None, 1): 12,
    ("amp", "bfloat16", None, 1): 12,
    ("amp", "float16", Backoff, 1): 12,
    ("amp", "float16", LogMax, 3): 12,
    ("mixed", "bfloat16", None, 3): 14,  # Weights of 2 bytes, masters of 4, two moments.
    ("mixed", "float16", Backoff, 1): 14,
    ("mixed", "float16", LogMax, 1): 14,
}


@pytest.mark.usefixtures("only_new_tensors")
@pytest.mark.parametrize(("case", "bytes_each"), CASES.items(), ids=str)
def test_nothing_moves_or_is_left_behind_in_20_steps(case, bytes_each) -> None:
    mode, half, scaler, window = case
    batch = torch.randn(4, WIDTH)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)]
    precision, made = Precision(mode, half=half), scaler and scaler()
    optimizer = torch.optim.AdamW((model := nn.Sequential(*layers)).parameters(), fused=True)
    model, optimizer = precision.prepare(model, optimizer)
    options = StepOptions(clip_norm=1.0)
    trainer = StepTrainer(model, optimizer, objective, precision, made, plan=options)
    for _ in range(3):
        trainer.train_step(*[batch] * window)
    optimizer.zero_grad()
    first = living()
    for _ in range(20):
        trainer.train_step(*[batch] * window)
        # A scaler's numbers are new after each step, because the result keeps the scale it used.
        numbers = made.state.values() if made else ()
        scale = {value.untyped_storage().data_ptr() for value in numbers}
        assert not living().keys() - first.keys() - scale
    held = sum(first.values()) - batch.nbytes
    # Counts of steps, numbers of a scaler, sums of rows, copies of vectors: a hundredth.
    assert 0 <= held / PARAMETERS - bytes_each <= 0.1
