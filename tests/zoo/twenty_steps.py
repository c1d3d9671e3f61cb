"""Trains a model of each of twelve libraries twenty steps in every mode, beside torch.autocast.

python tests/zoo/twenty_steps.py                     each library that is installed
python tests/zoo/twenty_steps.py peft transformers   some

fp32 must give torch's losses bit for bit. In the other modes the losses may be as far from fp32 as
torch's own are, as in comparison.py:

    rms(loss - loss_fp32)  <=  4 max(under torch.autocast bfloat16, with weights rounded to it)

over the steps. Exit code 1 where one of them is further away, or raises. `pip install -e ".[zoo]"`
for the libraries; nothing is downloaded.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from comparison import FACTOR, MODES
from other_libraries import LIBRARIES, STEPS, Case
from training import Steps, by_mpframe, by_torch, round_weights


def main() -> int:
    """Train what the command line names."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the libraries' own
    failed = 0
    for name in sys.argv[1:] or LIBRARIES:
        if find_spec(name) is None:
            print(f"{name}: not installed, left out")
            continue
        failures = differences(name)
        failed += len(failures)
        print(f"{name}: {'; '.join(failures) or 'agrees'}", flush=True)
    return 1 if failed else 0


def differences(name: str) -> list[str]:
    """Return a line for each mode in which the library's model does not train as torch does."""
    plain = _by_torch(_made(name), nullcontext)
    allowed = FACTOR * max(_torchs_own(name, plain))
    found = []
    for mode, (kind, half) in MODES.items():
        case = _made(name)
        try:
            losses = by_mpframe(_steps(case), kind, half, partial(_forward, case)).losses
        except Exception as error:
            found.append(f"{mode}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        size = _distance(losses, plain)
        if kind == "fp32" and losses != plain:
            found.append("fp32 is not bit for bit torch's")
        elif not size <= allowed:
            found.append(f"{mode}: {size:.2g} from fp32, allowed {allowed:.2g}")
    return found


def _torchs_own(name: str, plain: list[float]) -> Iterator[float]:
    """Yield how far torch is from fp32 with rounded weights, and under autocast if that runs."""
    rounded = _made(name)
    round_weights(rounded.model)
    yield _distance(_by_torch(rounded, nullcontext), plain)
    with suppress(RuntimeError):
        autocast = partial(torch.autocast, "cpu", torch.bfloat16)
        yield _distance(_by_torch(_made(name), autocast), plain)


def _made(name: str) -> Case:
    torch.manual_seed(0)
    return LIBRARIES[name]()


def _by_torch(case: Case, context: Callable[[], Any]) -> list[float]:
    return by_torch(_steps(case), context).losses


def _steps(case: Case) -> Steps:
    return Steps(case.model, partial(_forward, case), STEPS, case.after_step)


def _forward(case: Case, model: Any, step: int = 0) -> Any:
    torch.manual_seed(step)
    return case.loss(model, step)


def _distance(losses: list[float], plain: list[float]) -> float:
    """Return the root mean square of the differences."""
    squares = [(a - b) ** 2 for a, b in zip(losses, plain, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


if __name__ == "__main__":
    raise SystemExit(main())
