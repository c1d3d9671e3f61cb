"""The benchmark's large models: their steps, one at a time, each in a new process."""

import json
from copy import deepcopy
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bench.groups import devices, steps
from bench.groups.steps import COMPARISONS, Comparison, compare
from bench.step import on_ranks, one_turn
from bench.step.competitors import STEPS
from bench.step.laps import Laps
from bench.step.workloads import WORKLOADS, Workload
from fixtures import Patch
from in_process import differing
from ranks import Ranks

TINY = {
    "linear": {"width": 4, "layers": 2, "batch": 3},
    "transformer": {"vocab_size": 9, "context": 4, "depth": 1, "width": 4, "batch": 2},
    "recommender": {"tables": 2, "rows": 5, "width": 4, "batch": 3},
    "tiny_bert": {"width": 4, "layers": 1, "tokens": 3, "batch": 2},
    "resnet18": {"width": 8, "batch": 2},
    "unet": {"width": 2, "side": 8, "batch": 2},
}


def made(workload: str) -> Workload:
    if workload == "tiny_bert":
        pytest.importorskip("transformers")
    return WORKLOADS[workload](**TINY[workload])


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_everybody_has_three_laps(name: str) -> None:
    laps = Laps()
    STEPS[name](made("linear"), laps)()
    assert all(seconds > 0 for seconds in laps.seconds.values())


@pytest.mark.parametrize("workload", WORKLOADS)
def test_by_hand_and_by_the_trainer_it_is_the_same_training(workload: str) -> None:
    weights: list[Any] = []
    for name in ("torch fp32", "mpframe fp32"):
        work = made(workload)
        step = STEPS[name](work, Laps())
        before = deepcopy(work.model.state_dict())
        step()
        weights.append(work.model.state_dict())
        assert differing(weights[-1], before)
    assert differing(*weights) == []


def test_a_turn_tells_seconds_laps_and_memory_here_and_from_a_process(monkeypatch: Patch) -> None:
    arguments = {"workload": "linear", "sizes": TINY["linear"], "name": "torch fp32"}
    turn = steps.Turn("plain", {**arguments, "threads": 1, "steps": 1})
    assert [turn()] == [own.seconds for own in turn.turns]
    peaks = iter([1000, 1000 + 40 * 19])  # two layers of 4 x 4 weights and 4 biases
    monkeypatch.setattr(one_turn, "status_bytes", lambda key: next(peaks))
    monkeypatch.setattr(one_turn, "keep_freed_memory", lambda: None)
    tiny = "linear", TINY["linear"], "mpframe mixed float16"
    told = one_turn.measure(*tiny, threads=1, steps=2, keep_memory=True)
    assert told.bytes_per_parameter == 19.0
    assert set(told.laps) == {"forward", "backward", "step"}
    assert told.seconds >= sum(told.laps.values()) > 0


@pytest.fixture
def asked(monkeypatch: Patch) -> list[dict[str, Any]]:
    arguments: list[dict[str, Any]] = []

    def in_this_process(words: list[str], folder: Path, name: str) -> str:
        arguments.append(json.loads(words[2]))
        return json.dumps(asdict(one_turn.measure(**arguments[-1])))

    monkeypatch.setattr(steps, "run_python", in_this_process)
    monkeypatch.setattr(one_turn, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(one_turn, "status_bytes", {"VmRSS": 0, "VmHWM": 1000}.get)
    return arguments


def small(comparison: Comparison, **more: Any) -> Comparison:
    sizes = TINY[comparison.workload]
    return replace(comparison, **{"sizes": sizes, "threads": 1, "steps": 1, **more})


@pytest.mark.parametrize("option", COMPARISONS["options"], ids=lambda option: option.title)
def test_options_rows(option: Comparison, asked: list[dict[str, Any]]) -> None:
    words = option.title.partition(",")[0].removesuffix(": ")
    rows = ["amp bfloat16", f"amp bfloat16, {words}"]
    measured = compare(small(option, rows={row: option.rows[row] for row in rows}), 1)
    assert list(measured.times) == rows
    plain, chosen = sorted(asked, key=len)
    assert chosen == {**plain, **option.rows[rows[1]]}
    assert len(set(chosen) - set(plain)) == 1


@pytest.mark.parametrize(("comparison", "sizes"), [
    (COMPARISONS["large"][0], {}),
    (COMPARISONS["products"][0], {"sizes": {"width": 32, "layers": 1, "batch": 32}}),
    (COMPARISONS["small"][1], {}),
])  # fmt: skip
@pytest.mark.usefixtures("asked")
def test_rows(comparison: Comparison, sizes: dict[str, Any], monkeypatch: Patch) -> None:
    monkeypatch.setattr(steps, "has_native_half", lambda half: True)
    measured = compare(small(comparison, **sizes), 1)
    here = [row for row in comparison.rows if find_spec("torchao") or "torchao" not in row]
    assert list(measured.times) == here
    assert all(claim.limit > 0 for claim in measured.claims)


def test_what_is_not_installed_is_a_note(monkeypatch: Patch) -> None:
    monkeypatch.setattr(steps, "find_spec", lambda package: None)
    shown = compare(COMPARISONS["small"][0], 1).markdown()
    assert "\n\n- skipped, transformers is not installed; pip" in shown


def test_rows_of_two_processes(two: Ranks, tmp_path: Path, monkeypatch: Patch) -> None:
    asked: list[list[str]] = []

    def on_these_ranks(words: list[str], folder: Path, name: str) -> str:
        asked.append(words)
        return json.dumps(two(_measured, json.loads(words[-1]))[0])

    monkeypatch.setattr(devices, "run_python", on_these_ranks)
    monkeypatch.setattr(devices, "has_native_half", lambda half: True)
    (measured,) = devices.distributed_tables(1, tmp_path, {"linear": TINY["linear"]}, steps=1)
    assert asked[0][1:4] == ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert list(measured.times) == list(on_ranks.STEPS)
    assert [claim.limit for claim in measured.claims] == [1.03] * 2


def _measured(arguments: dict[str, Any]) -> Any:
    return on_ranks.measure(**arguments)
