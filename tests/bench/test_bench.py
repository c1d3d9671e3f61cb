"""The benchmarks: their statistics and tables; everybody trains the same; each group's rows run."""

import copy
import json
import logging
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bench import groups, program, rivals
from bench.child import run_python
from bench.groups import devices, overhead, programs, steps
from bench.groups.steps import COMPARISONS, Comparison, compare
from bench.measure import Competitor, Spread, Stopwatch, race, ratio, timed
from bench.step import one_turn
from bench.step import workloads as stepped
from bench.step.competitors import STEPS
from bench.step.laps import Laps
from bench.table import Claim, Table, as_json
from bench.whole import one_run, ours, trainers
from bench.whole.workloads import WORKLOADS, Workload
from fixtures import Patch, Shown
from in_process import differing, scalars

from mpframe.config.command_line import compose_named, without_hydra
from mpframe.core.errors import MpframeError
from mpframe.run.run import train
from mpframe.training.trainers.step_record import StepRecord


def test_every_round_has_a_turn_of_everybody_in_another_order_and_warm_up_does_not_count() -> None:
    turns: list[str] = []
    noted = [Competitor(n, lambda n=n: float(turns.append(n) or len(turns))) for n in "abcd"]
    times = race(noted, rounds=12, warmup=2)
    rounds = ["".join(turns[start : start + 4]) for start in range(0, len(turns), 4)]
    assert (len(rounds), {"".join(sorted(taken)) for taken in rounds}) == (14, {"abcd"})
    assert min(min(seconds) for seconds in times.values()) == 9.0  # eight turns of warm-up
    # Everybody follows everybody else.
    assert len({order[i : i + 2] for order in rounds[2:] for i in range(3)}) == 12
    slow = count()
    few = Competitor("slow", lambda: float(next(slow)), rounds=2)
    times = race([few, Competitor("fast", lambda: 0.5)], rounds=5, warmup=3)
    assert times == {"slow": [0.0, 1.0], "fast": [0.5] * 5}
    assert ratio(times, "slow", "fast").count == 2


def test_times_are_of_steps_alone_and_ratios_within_a_round() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(2.0, 3.0, 4.0, 5)
    # The machine is four times slower from the third round on, for everybody: no ratio moves.
    times = {"a": [1.0, 1.0, 4.0, 4.0], "b": [2.0, 2.0, 8.0, 8.0]}
    assert ratio(times, "b", "a") == Spread(2.0, 2.0, 2.0, 4)
    done, ticks = count(), count()
    assert timed(lambda: next(done), 10, clock=lambda: next(ticks) * 5.0)() == 0.5
    assert next(done) == 10
    now = [0.0]
    watch = Stopwatch(list("abcdef"), skipped=2, clock=lambda: now[0])
    now[0] += 100.0  # set-up
    for number, _ in enumerate(watch):
        now[0] += 50.0 if number < 2 else 3.0
    now[0] += 100.0  # tidying
    assert watch.seconds == 3.0


def table(limit: float = 1.2) -> Table:
    times = {"plain": [0.001, 0.001, 0.002], "ours": [0.0011, 0.0011, 0.0022]}
    claim = Claim("ours / plain", ratio(times, "ours", "plain"), limit)
    return Table("Steps", "One thread.", "plain", times, [claim], ["Other: skipped, not there"])


def test_a_table_as_markdown_and_as_json() -> None:
    assert table().markdown() == (
        "## Steps\n\nOne thread.\n\n"
        "| | ms, median (quartiles) | ratio to plain (quartiles) | rounds |\n"
        "|---|---|---|---|\n"
        "| plain | 1.00 (1.00 to 1.50) | 1 | 3 |\n"
        "| ours | 1.10 (1.10 to 1.65) | 1.10 (1.10 to 1.10) | 3 |\n\n"
        "- ours / plain: 1.10 (1.10 to 1.10), at most 1.2: holds\n"
        "- Other: skipped, not there\n"
    )
    assert str(table(1.05).claims[0]).endswith("at most 1.05: does not hold")
    for seconds, shown in ((0.0000123, "0.0123"), (0.45678, "457"), (12.3456, "12346")):
        assert f"| a | {shown} (" in Table("", "", "a", {"a": [seconds]}).markdown()
    content = json.loads(as_json({"CPU": "some"}, [table()]))
    (read,) = content["tables"]
    assert (content["machine"], read["times"]) == ({"CPU": "some"}, table().times)
    assert read["ratios"]["ours"]["median"] == pytest.approx(1.1)


def test_overhead_rows(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(overhead, "_has_compiler", lambda: True)
    monkeypatch.setattr(StepRecord, "compile", lambda record, inputs: None)
    logged, silent, scalers, parts, calls = overhead.tiny_tables(1, tmp_path, steps=10)
    counts = dict(note.split(": ") for note in calls.notes)
    assert 0 < int(counts["fp32"]) < int(counts["mixed"])  # test_costs.py has limits.
    names = ["by hand", "by hand, gradients checked", "mpframe"]
    assert list(silent.times) == names
    compiled = ["by hand, compiled", "mpframe, compiled", "mpframe, the step compiled"]
    there = [name for name, (package, _) in rivals._RIVALS.items() if find_spec(package)]
    assert {*logged.times} == {*names, *compiled, *there}
    assert list(scalers.times) == ["Static", "Backoff", "LogMax"]
    (whole,), *rest = parts.times.values()
    assert whole == pytest.approx(sum(seconds for (seconds,) in rest))


CONSTANT = {"_target_": "mpframe.training.callbacks.schedules.constant"}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_input_rows(tmp_path: Path, monkeypatch: Patch) -> None:
    for options in programs.INPUTS.values():
        config = programs._config(options, tmp_path)
        assert (config.data.workers, config.scheduler) == (0, CONSTANT)
    monkeypatch.setattr(programs, "_PHOTOGRAPHS", 16)
    options = (*programs.INPUTS[programs.DECODED], "dataset.batch_size=2", "model.width=2")
    chosen = {"decoded": options}
    (measured,) = programs.input_tables(1, tmp_path, chosen, workers=(0, 1), steps=1)
    assert measured.title == "Input, decoded"
    assert list(measured.times) == [programs.THERE, "workers=0", "workers=1"]
    rows = [(c.text, c.ratio.count, 0 < c.ratio.median < 1, c.limit) for c in measured.claims]
    assert rows == [(f"the input's share of a step, workers={n}", 1, True, 0.05) for n in (0, 1)]


@pytest.mark.parametrize("name", [name for name in programs._COMMANDS if "torch" not in name])
def test_startup_rows(name: str, tmp_path: Path) -> None:
    assert programs._competitor(name, tmp_path).turn() > 0


def test_rows_of_two_processes(tmp_path: Path) -> None:
    tables = devices.distributed_tables(1, tmp_path, {"linear": TINY["linear"]}, steps=1)
    assert {*tables[0].times} >= {"DistributedDataParallel fp32", "mpframe mixed float16"}
    assert [claim.limit for claim in tables[0].claims][:1] == [1.03]
    assert "scaling efficiency, mpframe fp32" in tables[0].notes[0]


def test_an_error_of_a_rank_is_shown(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("raise ValueError('what it says')")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "rank.py"]
    with pytest.raises(MpframeError, match=r"x ended with .*: .*what it says"):
        run_python(torchrun, tmp_path, "x")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_rows(tmp_path: Path) -> None:
    (measured,) = devices.cuda_tables(rounds=1, folder=tmp_path, batch=4, width=8, steps=2)
    assert list(measured.times) == [devices.HAND, "mpframe amp float16", "mpframe mixed float16"]
    assert len(measured.notes) == 3


def test_all_groups_run_or_those_chosen(tmp_path: Path, monkeypatch: Patch, capsys: Shown) -> None:
    made = {name: Mock(return_value=[table()]) for name in ("tiny", "cuda")}
    benchmarks = {name: groups.Benchmark(tables, rounds=3) for name, tables in made.items()}
    monkeypatch.setattr(groups, "GROUPS", benchmarks)
    program.main(["cuda", "repeats=7", f"out={tmp_path}"])
    assert not (tmp_path / "tiny.md").exists()
    program.main([f"out={tmp_path}"])
    rounds = {name: [call.args[0] for call in own.call_args_list] for name, own in made.items()}
    assert rounds == {"tiny": [3], "cuda": [7, 3]}
    assert (tmp_path / "cuda.md").read_text() in capsys.readouterr().out
    assert json.loads((tmp_path / "tiny.json").read_text())["tables"][0]["title"] == "Steps"
    assert logging.root.manager.disable == logging.NOTSET  # Quiet while it measures alone.


SMALL: dict[str, dict[str, int]] = {
    "digits_mlp": {"epochs": 2},
    "fashion_cnn": {"batch_size": 1000, "max_steps": 2, "width": 2},
    "resnet18": {"count": 13, "batch_size": 4, "width": 2},
    "tiny_bert": {"count": 21, "batch_size": 4, "width": 4},
}


def whole(name: str) -> Workload:
    if name == "tiny_bert":
        pytest.importorskip("transformers")
    work = WORKLOADS[name](**SMALL[name])
    if name == "fashion_cnn" and not Path(work.data.keywords["root"]).is_dir():
        pytest.skip("Fashion-MNIST is not here")
    return work


@pytest.mark.parametrize("name", WORKLOADS)
def test_by_hand_and_by_mpframe_it_is_the_same_training(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    work, ended = whole(name), Mock(side_effect=ours.LoopClock.teardown)
    monkeypatch.setattr(ours.LoopClock, "teardown", lambda *given: ended(*given))
    torch.manual_seed(0)
    before = work.model().state_dict()
    by_hand = trainers.by_hand(work, tmp_path / "hand")
    train(without_hydra(compose_named(ours.options(work))[1]), tmp_path / "ours")
    weights = ended.call_args.args[1].weights()
    assert differing(by_hand.model.state_dict(), weights) == []
    assert differing(weights, before)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [name for name in trainers.TRAINERS if name != trainers.BY_HAND])
def test_all_others_train_the_same_weights(name: str, tmp_path: Path) -> None:
    package, trainer = trainers.TRAINERS[name]
    pytest.importorskip(package)
    by_hand = trainers.by_hand(whole("digits_mlp"), tmp_path / "hand").model.state_dict()
    other = tmp_path / "other"
    other.mkdir()
    done = trainer(whole("digits_mlp"), other)
    assert min(done.time.seconds, done.time.cpu_seconds) > 0
    assert differing(done.model.state_dict(), by_hand) == []
    logged = {tag for file in other.rglob("events.out.tfevents.*") for tag in scalars(file)}
    assert {"loss/train", "grad/norm", "loss/val", "metric/accuracy/val"} <= logged


def test_a_table_of_runs_in_processes_of_their_own(tmp_path: Path) -> None:
    one_epoch = {"digits_mlp": {"epochs": 1}}
    (measured,) = programs.run_tables(1, tmp_path, one_epoch, [trainers.BY_HAND])
    assert list(measured.times) == [one_run.OURS, trainers.BY_HAND]
    (own, by_hand), claim = measured.times.values(), measured.claims[0]
    assert (claim.text, claim.ratio.median) == ("mpframe / by hand", own[0] / by_hand[0])
    assert 0 < own[0] * 1e3 < measured.details["whole process, ms"][one_run.OURS][0]


TINY = {
    "linear": {"width": 4, "layers": 2, "batch": 3},
    "transformer": {"vocab_size": 9, "context": 4, "depth": 1, "width": 4, "batch": 2},
    "recommender": {"tables": 2, "rows": 5, "width": 4, "batch": 3},
    "tiny_bert": {"width": 4, "layers": 1, "tokens": 3, "batch": 2},
    "resnet18": {"width": 8, "batch": 2},
    "unet": {"width": 2, "side": 8, "batch": 2},
}


@pytest.mark.parametrize("workload", stepped.WORKLOADS)
def test_by_hand_and_by_the_trainer_it_is_the_same_training(workload: str) -> None:
    weights: list[Any] = []
    if workload == "tiny_bert":
        pytest.importorskip("transformers")
    for name in ("torch fp32", "mpframe fp32"):
        work = stepped.WORKLOADS[workload](**TINY[workload])
        step = STEPS[name](work, Laps())
        before = copy.deepcopy(work.model.state_dict())
        step()
        weights.append(work.model.state_dict())
        assert differing(weights[-1], before)
    assert differing(*weights) == []


@pytest.mark.parametrize(("comparison", "sizes"), [
    (COMPARISONS["large"][0], TINY["linear"]),
    (COMPARISONS["products"][0], {"width": 32, "layers": 1, "batch": 32}),
    (COMPARISONS["small"][1], TINY["unet"]),
    *((option, TINY[option.workload]) for option in COMPARISONS["options"]),
])  # fmt: skip
def test_rows(comparison: Comparison, sizes: dict[str, int], monkeypatch: Patch) -> None:
    def in_this_process(words: list[str], folder: Path, name: str) -> str:
        return json.dumps(asdict(one_turn.measure(**json.loads(words[2]))))

    monkeypatch.setattr(steps, "run_python", in_this_process)
    monkeypatch.setattr(steps, "has_native_half", lambda half: True)
    monkeypatch.setattr(one_turn, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(one_turn, "status_bytes", {"VmRSS": 0, "VmHWM": 1000}.get)
    measured = compare(replace(comparison, sizes=sizes, threads=1, steps=1), 1)
    here = [row for row in comparison.rows if find_spec("torchao") or "torchao" not in row]
    assert list(measured.times) == here
    assert all(claim.limit > 0 for claim in measured.claims)
