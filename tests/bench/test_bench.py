"""How the benchmark measures, shows and runs; no test looks at how long anything took."""

import json
import logging
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import groups, program, rivals
from bench.groups import devices, overhead, programs
from bench.hand_loop import hand_loop
from bench.measure import Competitor, Spread, Stopwatch, race, ratio, timed
from bench.step.parts import Parts
from bench.table import Claim, Table, as_json
from torch import Tensor

from mpframe.core.errors import MpframeError
from mpframe.data import Loader, loading
from mpframe.lab.ranges import read_ranges

# --- measuring


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(2.0, 3.0, 4.0, 5)
    # Three of nine rounds beside somebody else's work: the mean triples, the median stays.
    assert Spread.of([1.0] * 6 + [7.0] * 3).median == 1.0


def test_everybody_takes_one_turn_per_round_and_warm_up_does_not_count() -> None:
    turns: list[str] = []

    def competitor(name: str) -> Competitor:
        return Competitor(name, lambda: float(turns.append(name) or len(turns)))

    times = race([competitor(name) for name in "abc"], rounds=4, warmup=2)
    rounds = [turns[start : start + 3] for start in range(0, len(turns), 3)]
    assert len(rounds) == 6
    assert all(sorted(taken) == ["a", "b", "c"] for taken in rounds)
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert min(min(seconds) for seconds in times.values()) == 7.0  # six turns of warm-up


def test_the_order_changes_and_is_the_same_in_every_race() -> None:
    def orders() -> list[str]:
        turns: list[str] = []
        competitors = [Competitor(n, lambda n=n: float(turns.append(n) or 0)) for n in "abcd"]
        race(competitors, rounds=12, warmup=0)
        return ["".join(turns[start : start + 4]) for start in range(0, 48, 4)]

    first = orders()
    assert first == orders()
    followers = {order[i : i + 2] for order in first for i in range(3)}
    assert len(followers) == 12  # everybody has followed everybody else


def test_the_very_slow_take_part_in_few_rounds_and_no_warm_up() -> None:
    slow = count()
    times = race(
        [Competitor("slow", lambda: float(next(slow)), rounds=2), Competitor("fast", lambda: 0.5)],
        rounds=5,
        warmup=3,
    )
    assert times == {"slow": [0.0, 1.0], "fast": [0.5] * 5}
    assert ratio(times, "slow", "fast").count == 2


def test_ratios_are_taken_within_a_round() -> None:
    """The machine is four times slower from the third round on, for everybody: no ratio moves."""
    times = {"a": [1.0, 1.0, 4.0, 4.0], "b": [2.0, 2.0, 8.0, 8.0]}
    assert ratio(times, "b", "a") == Spread(2.0, 2.0, 2.0, 4)


def test_a_turn_is_divided_by_its_steps() -> None:
    done: list[None] = []
    times = count()
    turn = timed(lambda: done.append(None), 10, clock=lambda: next(times) * 5.0)
    assert turn() == 0.5
    assert len(done) == 10


def test_the_stopwatch_leaves_out_set_up_tidying_and_the_first_steps() -> None:
    now = [0.0]
    watch = Stopwatch(list("abcdef"), skipped=2, clock=lambda: now[0])
    now[0] += 100.0  # set-up
    for number, _ in enumerate(watch):
        now[0] += 50.0 if number < 2 else 3.0
    now[0] += 100.0  # tidying
    assert watch.seconds == 3.0
    assert len(watch) == 6


# --- showing

TIMES = {"plain": [0.001, 0.001, 0.002], "ours": [0.0011, 0.0011, 0.0022]}


def table(limit: float = 1.2) -> Table:
    claim = Claim("ours / plain", ratio(TIMES, "ours", "plain"), limit)
    return Table("Steps", "One thread.", "plain", TIMES, [claim], ["Other: skipped, not there"])


def test_the_table_in_markdown() -> None:
    assert table().markdown() == (
        "## Steps\n\nOne thread.\n\n"
        "| | ms, median (quartiles) | ratio to plain (quartiles) | rounds |\n"
        "|---|---|---|---|\n"
        "| plain | 1.00 (1.00 to 1.50) | 1 | 3 |\n"
        "| ours | 1.10 (1.10 to 1.65) | 1.10 (1.10 to 1.10) | 3 |\n\n"
        "- ours / plain: 1.10 (1.10 to 1.10), at most 1.2: holds\n"
        "- Other: skipped, not there\n"
    )


def test_a_claim_says_whether_it_holds() -> None:
    (claim,) = table(1.05).claims
    assert str(claim).endswith("at most 1.05: does not hold")
    assert not claim.holds


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0000123, "0.0123"), (0.45678, "457"), (12.3456, "12346")]
)
def test_times_have_three_digits_or_whole_milliseconds(seconds: float, shown: str) -> None:
    assert f"| a | {shown} (" in Table("", "", "a", {"a": [seconds]}).markdown()


def test_json_holds_every_time_and_the_machine() -> None:
    content = json.loads(as_json({"CPU": "some"}, [table()]))
    assert content["machine"] == {"CPU": "some"}
    (read,) = content["tables"]
    assert read["times"] == TIMES
    assert read["claims"][0]["holds"] is True
    assert read["ratios"]["ours"]["median"] == pytest.approx(1.1)


# --- the rows, one round each at their smallest


@pytest.fixture
def without_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {name: ("no_such_package", rival) for name, (_, rival) in rivals._RIVALS.items()}
    monkeypatch.setattr(rivals, "_RIVALS", missing)


@pytest.mark.usefixtures("without_rivals")
def test_overhead_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(overhead, "_has_compiler", lambda: True)
    logged, silent, scalers, parts, calls = overhead.tiny_tables(1, tmp_path, steps=10)
    counts = dict(note.split(": ") for note in calls.notes)
    assert list(counts) == ["fp32", "mixed"]
    assert 0 < int(counts["fp32"]) <= 46, counts
    assert 0 < int(counts["mixed"]) <= 52, counts
    names = ["by hand", "by hand, gradients checked", "mpframe"]
    assert list(silent.times) == names
    assert list(logged.times) == [*names, "by hand, compiled", "mpframe, compiled"]
    assert [claim.limit for claim in logged.claims] == [1.05, 1.05, 1.0]
    assert list(scalers.times) == ["Static", "Backoff", "LogMax"]
    assert [claim.text for claim in scalers.claims] == ["LogMax / Backoff"]
    (whole,), *rest = parts.times.values()
    assert all(seconds > 0 for (seconds,) in rest)
    assert whole == pytest.approx(sum(seconds for (seconds,) in rest))
    assert logged.notes == [
        f"{name}: skipped, no_such_package is not installed; pip install 'mpframe[bench]'"
        for name in ("Lightning Fabric", "Accelerate", "Lightning")
    ]


def test_a_part_is_without_what_another_part_takes() -> None:
    class Nested:
        def outer(self) -> str:
            clock.now += 1.0
            self.inner()
            clock.now += 2.0
            return "done"

        def inner(self) -> None:
            clock.now += 4.0
            raise_once()

    def raise_once() -> None:
        if not failures:
            failures.append(1)
            raise KeyError

    clock, failures, nested = Clockwork(0.0), list[int](), Nested()
    parts = Parts(clock)
    parts.watch(nested, "inner", "within")
    parts.watch(nested, "outer", "around")
    with pytest.raises(KeyError):
        nested.outer()
    clock.now += 100.0  # between two calls
    assert nested.outer() == "done"
    assert parts.seconds == {"within": 8.0, "around": 4.0}


def test_all_train_the_same_weights(tmp_path: Path) -> None:
    """What is compared must be the same training: bit for bit, by hand and by the trainer."""
    parts: list[Any] = []

    def remembered() -> Any:
        parts.append(original())
        return parts[-1]

    original, data = overhead._parts, overhead._data(10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overhead, "_parts", remembered)
        patch.setattr(overhead, "LR", 1e-3)
        hand_loop(*remembered(), data, None)()
        hand_loop(*remembered(), data, None, checked=True)()
        overhead.trainer_loop(data)()
    by_hand, checked, ours = [model.state_dict() for model, _ in parts]
    for name, weight in by_hand.items():
        assert torch.equal(weight, checked[name])
        assert torch.equal(weight, ours[name])
    assert not torch.equal(by_hand["0.weight"], original()[0].state_dict()["0.weight"])


def test_the_checked_loop_leaves_a_bad_step_out() -> None:
    model, optimizer = overhead._parts()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batch = (torch.full((64, 64), torch.nan), torch.zeros(64, dtype=torch.int64))
    hand_loop(model, optimizer, [batch], None, checked=True)()
    assert all(torch.equal(weight, before[n]) for n, weight in model.state_dict().items())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", list(rivals._RIVALS))
def test_rivals_run(name: str, tmp_path: Path) -> None:
    package, rival = rivals._RIVALS[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    data = overhead._data(10)
    loop = rival(*overhead._parts(), data, tmp_path)
    for _ in range(2):
        loop()
        assert data.seconds > 0


def test_ranges_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "THREADS", 1)
    tiny, large = overhead.range_tables(rounds=1, folder=tmp_path, batch=2, width=4)
    assert (tiny.title, large.title) == ("Ranges, MLP 64-128-128-10", "Ranges, ResNet-18")
    assert list(tiny.times) == list(large.times) == ["step", "step with a report"]
    assert len(read_ranges(tmp_path / "ResNet-18")) == 2  # one warm-up round and one that counts


class Clockwork:
    """A clock, a dataset and a trainer; time passes only where they say so."""

    def __init__(self, load: float) -> None:
        self.now, self.load = 0.0, load

    def __call__(self) -> float:
        return self.now

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        self.now += self.load
        return float(index)

    def train_step(self, batch: Tensor) -> None:
        self.now += 1.0

    def read_verdicts(self) -> None:
        """It waits for no device."""


@pytest.mark.parametrize(("load", "share"), [(0.0, 0.0), (0.25, 0.2)])
def test_a_slow_dataset_is_a_large_share_of_the_step(
    load: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: Any = Clockwork(load)
    monkeypatch.setattr(loading, "perf_counter", slow)
    own = Loader(slow, batch_size=1, shuffle=True)
    turn = programs.Turn(slow, programs._endless(own), own, 4, slow)
    assert [turn(), turn()] == [1.0 + load] * 2
    assert turn.shares == [share] * 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_input_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_PHOTOGRAPHS", 16)
    options = (*programs.INPUTS[programs.DECODED], "dataset.batch_size=2", "model.width=2")
    chosen = {"decoded": options}
    (measured,) = programs.input_tables(1, tmp_path, chosen, workers=(0, 1), steps=1)
    assert measured.title == "Input, decoded"
    assert measured.setting == "Batch 2, fp32, one thread for the model."
    assert list(measured.times) == [programs.THERE, "workers=0", "workers=1"]
    rows = [(c.text, c.ratio.count, 0 < c.ratio.median < 1, c.limit) for c in measured.claims]
    assert rows == [(f"the input's share of a step, workers={n}", 1, True, 0.05) for n in (0, 1)]


def test_the_workloads_of_the_input_are_shipped_ones(tmp_path: Path) -> None:
    for options in programs.INPUTS.values():
        assert programs._config(options, tmp_path).data.workers == 0


@pytest.mark.parametrize("name", [name for name in programs._COMMANDS if "torch" not in name])
def test_startup_rows(name: str, tmp_path: Path) -> None:
    assert programs._competitor(name, tmp_path).turn() > 0


def test_startup_claims() -> None:
    times = {programs._STEP: [2.0], programs._RUN: [3.2], programs._TYPO: [0.2]}
    assert [str(claim) for claim in programs._startup_claims(times)] == [
        "a refused typo, seconds: 0.200 (0.200 to 0.200), at most 0.3: holds",
        "default run, to the end of its first step / import torch, one step of AdamW: "
        "1.60 (1.60 to 1.60), at most 1.5: does not hold",
    ]


def test_a_command_that_fails_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_COMMANDS", {"broken": (["-c", "raise SystemExit('why')"], 0)})
    with pytest.raises(MpframeError) as error:
        programs._competitor("broken", tmp_path).turn()
    assert str(error.value) == (
        "startup: 'broken' ended with exit code 1, expected 0: why; run it by itself to see more"
    )


def test_without_a_gpu_its_rows_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (measured,) = devices.cuda_tables(rounds=1, folder=tmp_path)
    assert measured.markdown().endswith("\n\n- skipped: no CUDA device\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_rows(tmp_path: Path) -> None:
    (measured,) = devices.cuda_tables(rounds=1, folder=tmp_path, batch=4, width=8, steps=2)
    assert list(measured.times) == [devices.HAND, "mpframe amp float16", "mpframe mixed float16"]
    assert len(measured.notes) == 3


# --- the command line


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[tuple[str, int]]:
    """The groups that were measured, with their rounds."""
    done: list[tuple[str, int]] = []

    def group(name: str) -> groups.Benchmark:
        def tables(rounds: int, folder: Path) -> list[Table]:
            assert folder.is_dir()
            done.append((name, rounds))
            return [table()]

        return groups.Benchmark(tables, rounds=3)

    monkeypatch.setattr(groups, "GROUPS", {name: group(name) for name in ("tiny", "cuda")})
    program.main(list(arguments))
    return done


def test_all_groups_run_and_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, f"out={tmp_path}") == [("tiny", 3), ("cuda", 3)]
    assert (tmp_path / "cuda.md").read_text() in capsys.readouterr().out
    assert json.loads((tmp_path / "tiny.json").read_text())["tables"][0]["title"] == "Steps"
    assert logging.root.manager.disable == logging.NOTSET  # Quiet while it measures alone.


def test_groups_and_rounds_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "cuda", "repeats=7", f"out={tmp_path}") == [("cuda", 7)]
    assert not (tmp_path / "tiny.md").exists()


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("tinny", "tinny: no such option; nearest: tiny"),
        ("--repeats", "--repeats: no such option; nearest: repeats"),
        ("repeats=x", "repeats=x: must be a whole number >= 1"),
    ],
)
def test_a_mistake_is_refused(word: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        program.main([word])
    assert (stop.value.code, capsys.readouterr().err) == (1, f"mpframe: {reason}\n")
