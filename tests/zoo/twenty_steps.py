"""Trains a model of each of twelve libraries twenty steps in every mode, beside torch.autocast.

python tests/zoo/twenty_steps.py                     each library that is installed
python tests/zoo/twenty_steps.py peft transformers   some

fp32 must give torch's losses bit for bit. In the other modes the losses may be as far from fp32 as
torch's own are, as in comparison.py:

    rms(loss - loss_fp32)  <=  4 max(under torch.autocast bfloat16, with weights rounded to it)

over the steps. Exit code 1 where one of them is further away, or raises. `pip install -e ".[zoo]"`
for the libraries; nothing is downloaded.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from comparison import FACTOR, MODES
from other_libraries import LIBRARIES, STEPS, Case
from training import LEARNING_RATE, TRIES

from mpframe import Backoff, Precision

Context = Callable[[], AbstractContextManager[Any]]


def main() -> int:
    """Train what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="*", help="some of them; all if none is named")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the libraries' own
    failed = []
    for name in asked.libraries or LIBRARIES:
        if find_spec(name) is None:
            print(f"{name}: not installed, left out")
            continue
        failures = differences(name)
        failed += failures
        print(f"{name}: {'; '.join(failures) or 'agrees'}", flush=True)
    return 1 if failed else 0


def differences(name: str) -> list[str]:
    """Return a line for each mode in which the library's model does not train as torch does."""
    make = partial(_made, name)
    plain = _train_plain(make(), nullcontext)
    allowed = FACTOR * max(_torchs_own(make, plain))
    found = []
    for mode, (kind, half) in MODES.items():
        try:
            losses = _train(make(), kind, half)
        except Exception as error:
            found.append(f"{mode}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        size = _distance(losses, plain)
        if kind == "fp32" and losses != plain:
            found.append("fp32 is not bit for bit torch's")
        elif not size <= allowed:
            found.append(f"{mode}: {size:.2g} from fp32, allowed {allowed:.2g}")
    return found


def _torchs_own(make: Callable[[], Case], plain: list[float]) -> Iterator[float]:
    """Yield how far torch is from fp32 with rounded weights, and under autocast if that runs."""
    yield _distance(_train_plain(_rounded(make()), nullcontext), plain)
    with suppress(RuntimeError):
        autocast = partial(torch.autocast, "cpu", torch.bfloat16)
        yield _distance(_train_plain(make(), autocast), plain)


def _made(name: str) -> Case:
    torch.manual_seed(0)
    return LIBRARIES[name]()


def _rounded(case: Case) -> Case:
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.copy_(parameter.bfloat16())
    return case


def _train_plain(case: Case, context: Context) -> list[float]:
    """Steps by torch alone; the losses."""
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        with context():
            loss = case.loss(case.model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        case.after_step(case.model)
        losses.append(loss.item())
    return losses


def _train(case: Case, mode: str, half: str) -> list[float]:
    """Steps by mpframe, as a user's own loop takes them; the losses of those that were applied.

    Raises:
        OverflowError: a step was not applied within TRIES.
    """
    precision = Precision(mode, half)
    example = partial(_forward, case, 0)
    model, optimizer = precision.prepare(
        case.model, torch.optim.AdamW(case.model.parameters(), lr=LEARNING_RATE), example
    )
    scaler = Backoff() if half == "float16" and mode != "fp32" else None
    losses: list[float] = []
    for _ in range(STEPS + TRIES):
        step = len(losses)
        with precision.cast():
            loss = _forward(case, step, model)
        (loss if scaler is None else loss * scaler.scale).backward()
        skipped = optimizer.step(scaler).skipped
        optimizer.zero_grad()
        if not skipped:
            case.after_step(model)
            losses.append(loss.item())
        if len(losses) == STEPS:
            return losses
    raise OverflowError(f"beyond {half} at every scale")


def _forward(case: Case, step: int, model: Any) -> Any:
    torch.manual_seed(step)
    return case.loss(model, step)


def _distance(losses: list[float], plain: list[float]) -> float:
    """Return the root mean square of the differences."""
    squares = [(a - b) ** 2 for a, b in zip(losses, plain, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


if __name__ == "__main__":
    raise SystemExit(main())
