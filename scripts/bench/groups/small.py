"""Steps of a few milliseconds, in bfloat16: what the casts cost where an op costs little."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from bench.measure import Competitor, race, threads, timed
from bench.step.competitors import MAX_NORM, STEPS
from bench.step.laps import Laps
from bench.step.workloads import WORKLOADS
from bench.table import Claim, Table
from mpframe.core.policy import has_native_half

THREADS = 1
HAND = "torch.autocast bfloat16"
NAMES = (HAND, "mpframe amp bfloat16", "mpframe mixed bfloat16")
MOST = 1.1  # times HAND

SIZES: dict[str, dict[str, int]] = {"tiny_bert": {}, "unet": {}}
"""The models, each with its own sizes."""

_NEEDS = {"tiny_bert": "transformers"}


def tables(
    rounds: int,
    folder: Path,
    workloads: Mapping[str, Mapping[str, int]] = SIZES,
    steps: int = 20,
) -> list[Table]:
    """A table for each workload.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: nothing is written.
        workloads: the sizes of each, by its name.
        steps: per turn.
    """
    with threads(THREADS):
        return [_table(name, sizes, rounds, steps) for name, sizes in workloads.items()]


def _table(workload: str, sizes: Mapping[str, int], rounds: int, steps: int) -> Table:
    package = _NEEDS.get(workload)
    if package is not None and find_spec(package) is None:
        note = f"skipped, {package} is not installed; pip install 'mpframe[text]'"
        return Table(workload, "", HAND, {}, notes=[note])
    works = {name: WORKLOADS[workload](**sizes) for name in NAMES}
    competing = {name: STEPS[name](work, Laps()) for name, work in works.items()}
    times = race([Competitor(name, timed(step, steps)) for name, step in competing.items()], rounds)
    setting = (
        f"{works[HAND].sizes}, fused AdamW, gradients clipped to {MAX_NORM}, {THREADS} thread."
    )
    mine = NAMES[1]
    claims = [Claim.between(times, mine, HAND, MOST)]
    # Where bfloat16 is emulated, torch's own kernels are several times slower: no comparison.
    claims = claims if has_native_half("bfloat16") else []
    return Table(works[HAND].title, setting, HAND, times, claims)
