"""The benchmark's large models: their steps, one at a time, each in a new process."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.groups import devices, steps
from bench.groups.steps import BYTES, COMPARISONS, Comparison, claims_of, compare
from bench.step import on_ranks, one_turn
from bench.step.competitors import STEPS
from bench.step.laps import Laps
from bench.step.workloads import WORKLOADS, Workload
from fixtures import Patch
from ranks import Ranks

TINY = {
    "linear": {"width": 4, "layers": 2, "batch": 3},
    "transformer": {"vocab_size": 9, "context": 4, "depth": 1, "width": 4, "batch": 2},
    "recommender": {"tables": 2, "rows": 5, "width": 4, "batch": 3},
    "tiny_bert": {"width": 4, "layers": 1, "tokens": 3, "batch": 2},
    "resnet18": {"width": 8, "batch": 2},
    "unet": {"width": 2, "side": 8, "batch": 2},
}
LINEAR = COMPARISONS["large"][0]


def made(workload: str) -> Workload:
    if workload == "tiny_bert":
        pytest.importorskip("transformers")
    return WORKLOADS[workload](**TINY[workload])


def native(yes: bool) -> Callable[[object], bool]:
    return lambda half: yes


def test_laps_add_up_by_name() -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 14.0, 22.0])
    laps = Laps(clock=lambda: next(times))
    for names in (("forward", "backward"), ("forward", "step")):
        laps.start()
        for name in names:
            laps.end(name)
    assert laps.seconds == {"forward": 5.0, "backward": 2.0, "step": 8.0}
    laps.clear()
    assert laps.seconds == {"forward": 0.0, "backward": 0.0, "step": 0.0}


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
        before = {key: value.clone() for key, value in work.model.state_dict().items()}
        step()
        weights.append(work.model.state_dict())
        assert any(not torch.equal(weights[-1][key], before[key]) for key in before)
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


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
    """Lets turns run in this process, and notes their arguments."""
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


def test_large_rows(asked: list[dict[str, Any]]) -> None:
    measured = compare(small(LINEAR), 1)
    assert len(asked) == len(LINEAR.rows) == 11
    assert (measured.title, measured.baseline) == ("Linear layers, 40 parameters", "torch fp32")
    assert measured.setting.startswith("2 linear layers of 4, batch 3, fused AdamW, gradients clip")
    assert list(measured.times) == list(LINEAR.rows)
    assert list(measured.details) == ["forward, ms", "backward, ms", "step, ms", BYTES]


def test_product_rows(asked: list[dict[str, Any]]) -> None:
    tiny = {"width": 32, "layers": 1, "batch": 32}
    measured = compare(small(COMPARISONS["products"][0], sizes=tiny), 1)
    recipes = ["mpframe fp8_tensorwise", "mpframe mxfp8", "mpframe nvfp4"]
    torchao = ["torchao mxfp8"] if find_spec("torchao") else []
    assert list(measured.times) == ["mpframe mixed float16", *recipes, *torchao]
    assert all(own["keep_memory"] for own in asked)
    assert list(measured.notes) == (
        [] if torchao else ["torchao mxfp8: skipped, torchao is not installed"]
    )


@pytest.mark.parametrize("option", COMPARISONS["options"], ids=lambda option: option.title)
def test_options_rows(option: Comparison, asked: list[dict[str, Any]]) -> None:
    words = option.title.partition(",")[0].removesuffix(": ")
    rows = ["amp bfloat16", f"amp bfloat16, {words}"]
    measured = compare(small(option, rows={row: option.rows[row] for row in rows}), 1)
    assert list(measured.times) == rows
    plain, chosen = sorted(asked, key=len)
    assert chosen == {**plain, **option.rows[rows[1]]}
    assert len(set(chosen) - set(plain)) == 1


def test_the_marks_of_large_models(monkeypatch: Patch) -> None:
    def limits(workload: str) -> dict[str, float]:
        (found,) = (one for one in COMPARISONS["large"] if one.workload == workload)
        times = {name: [1.0, 2.0] for name in STEPS}
        return {claim.text: claim.limit for claim in claims_of(found, times, {BYTES: times})}

    monkeypatch.setattr(steps, "has_native_half", native(True))
    amp, autocast = "mpframe amp bfloat16", "torch.autocast bfloat16"
    assert limits("recommender") == {f"{amp} / {autocast}": 1.02}
    assert limits("linear") == {
        f"{amp} / {autocast}": 1.02,
        "mpframe mixed float16 / torch fp32": 1.4,
        f"mpframe mixed bfloat16 / {autocast}": 0.9,
        f"bytes per parameter, mpframe mixed bfloat16 / {autocast}": 0.8,
        f"bytes per parameter, mpframe mixed bfloat16, split masters / {autocast}": 0.7,
    }
    monkeypatch.setattr(steps, "has_native_half", native(False))
    assert (list(limits("linear").values()), limits("transformer")) == ([1.4, 0.8, 0.7], {})


@pytest.mark.parametrize("fast", [True, False])
def test_small_rows(fast: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr(steps, "has_native_half", native(fast))
    bert, unet = COMPARISONS["small"]
    measured = compare(small(unet), 1)
    names = ["torch.autocast bfloat16", "mpframe amp bfloat16", "mpframe mixed bfloat16"]
    assert list(measured.times) == names
    assert [claim.limit for claim in measured.claims] == [1.1] * fast
    monkeypatch.setattr(steps, "find_spec", lambda package: None)
    assert "\n\n- skipped, transformers is not installed; pip" in compare(bert, 1).markdown()


def test_growth_rows_and_the_power_that_time_grows_with() -> None:
    deeper = steps._growth("depth", "linear", "layers", (1, 2), width=4, batch=3)
    measured = compare(replace(deeper, threads=1, steps=1), 2)
    assert (measured.title, list(measured.times)) == ("Growth with depth", ["layers 1", "layers 2"])
    assert measured.notes[0].startswith("slope: ")
    found = steps.slope({"a": [1.0, 5.0], "b": [4.0, 10.0], "c": [16.0, 20.0]}, [1, 2, 4])
    assert [found.count, found.low, found.median, found.high] == pytest.approx([2, 1.25, 1.5, 1.75])


def test_rows_of_two_processes(two: Ranks, tmp_path: Path, monkeypatch: Patch) -> None:
    asked: list[list[str]] = []

    def on_these_ranks(words: list[str], folder: Path, name: str) -> str:
        asked.append(words)
        return json.dumps(two(_measured, json.loads(words[-1]))[0])

    monkeypatch.setattr(devices, "run_python", on_these_ranks)
    monkeypatch.setattr(devices, "has_native_half", native(True))
    (measured,) = devices.distributed_tables(1, tmp_path, {"linear": TINY["linear"]}, steps=1)
    assert asked[0][1:4] == ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert list(measured.times) == list(on_ranks.STEPS)
    assert [claim.limit for claim in measured.claims] == [1.03] * 2


def _measured(arguments: dict[str, Any]) -> Any:
    return on_ranks.measure(**arguments)


def test_resnet18_rows(monkeypatch: Patch) -> None:
    monkeypatch.setattr(steps, "has_native_half", native(False))
    measured = compare(replace(steps._resnet18(3, width=4), threads=1), 1)
    limits = {claim.text: claim.limit for claim in measured.claims}
    assert limits["mpframe mixed float16 / torch fp32"] == 1.4
    assert limits["mpframe amp float16 / torch.autocast float16"] == 1 / 20
    assert not any("bfloat16" in text for text in limits)  # Claimed where the CPU has it.
