"""Replays, what is kept as evidence, what is said, what is advised to type; runs in trouble."""

import copy
import json
import math
import re
from collections import UserDict, namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fixtures import Log, Patch, Shown, refused
from in_process import composed, train
from test_diagnosis import case_of, net, times
from torch import nn
from vocabulary import differing

from mpframe import checkpoint
from mpframe.checkpoint.saving import save_as
from mpframe.checkpoint.state import RandomState
from mpframe.cli.commands import autopsy as autopsy_command
from mpframe.config.command_line import check_config, prepare
from mpframe.config.overrides import deny_words, pin_words
from mpframe.config.schema import Config
from mpframe.core.errors import CheckpointError, DivergedError, MpframeError
from mpframe.data.fetching import named_tensors
from mpframe.lab.autopsy import evidence
from mpframe.lab.autopsy.diagnosis import Culprit, Diagnosis, Kind, diagnose
from mpframe.lab.autopsy.evidence import Evidence
from mpframe.lab.autopsy.replay import Pass, Replay, Setting, replay
from mpframe.lab.autopsy.report import Report, remedy_words, report_on
from mpframe.lab.autopsy.watch import OpCall, Trace
from mpframe.precision.op_lists import OpLists
from mpframe.precision.policy import Policy
from mpframe.run.parts import build_precision, build_scaler

CPU = torch.device("cpu")


def test_nothing_is_left_changed() -> None:
    middle = nn.Sequential(times(1e6), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
    model = (case := case_of(net(middle), random=RandomState.now(CPU))).model.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    torch.rand(5)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), hooks()
    diagnose(case)
    assert differing((model.state_dict(), torch.get_rng_state(), hooks()), before) == []
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_the_random_numbers_of_the_step_are_drawn() -> None:
    case = case_of(net(nn.Dropout(0.5)), "fp32", scale=1.0, random=RandomState.now(CPU))
    inputs, targets = case.batches[0]
    loss = float(nn.functional.cross_entropy(case.model(inputs), targets).detach())
    torch.rand(7)
    assert replay(case, Setting()).loss == replay(case, Setting(fp32=True)).loss == loss


Pair = namedtuple("Pair", "left right")
IDS = torch.arange(6).reshape(2, 3)


def test_a_batch_is_saved_without_classes_and_comes_back_like_an_example_a_view_by_itself(
    tmp_path: Path,
) -> None:
    plain = {"name": ["a", "b"], "share": 0.5, "none": None}
    batches: list[Any] = [
        {**plain, "file": Path("a.png"), "size": np.float32(0.5), "box": np.arange(4)},
        ([IDS.bfloat16()], [{"boxes": torch.zeros(0, 4)}, {"boxes": torch.ones(2, 4)}]),
        UserDict(input_ids=IDS, inner={"a": torch.zeros(2**20)[:2]}),
        (IDS, [Pair(IDS, "a"), Pair(IDS + 1, "b")]),
    ]
    step = Evidence(3, "asked", batches, [[4, 5]], 0, 2, {"": 1.0}, {}, "none")
    folder = evidence.save(tmp_path, step, {"weight": torch.ones(1)}, "a: 1")
    assert sum(file.stat().st_size for file in folder.glob("*.pt")) < 2**16
    first, *read = evidence.load(folder)[0].batches
    assert [type(batch) for batch in read] == [tuple, dict, tuple]
    assert {name: first[name] for name in plain} == plain
    assert (first["file"], first["size"], first["box"].tolist()) == ("a.png", 0.5, [0, 1, 2, 3])
    for found, batch in zip(read, batches[1:], strict=True):
        kept = replace(step, batches=[found])
        (restored,) = kept.like(batch).batches
        assert type(restored) is type(batch)
        for own in (found, restored):
            assert differing(dict(named_tensors(own)), dict(named_tensors(batch))) == []
        (other,) = kept.like({"left": IDS}).batches  # An example of another form changes nothing.
        assert type(other) is type(found)
    assert [type(pair) for pair in restored[1]] == [Pair, Pair]


FOUND = Culprit(OpCall("0", "linear"), "forward", 1e5, "result", 65504.0, "float16")
STEP = Evidence(
    12, "the loss is nan", [], [range(100, 120)], 2, 5, {"": 1024.0}, {"": 1.0}, "Backoff"
)
REPLAYS = (Replay(Setting(fp32=True), [Pass(0, "", 1.0, 1e7, Trace(), True)]),)


def report(
    kind: Kind, scaling: str = "Backoff", floor: float = 1.0, step: Evidence = STEP, **more: object
) -> Report:
    case = case_of(nn.Sequential(nn.Linear(2, 2)), "amp", batches=[])
    case = replace(case, floors={"": floor}, scaling=scaling)
    diagnosis = Diagnosis(kind, **{"culprit": FOUND, "replays": REPLAYS, **more})
    return report_on(diagnosis, case, replace(step, first_loss=2.0))


def advice(made: Report) -> str:
    return dict(made.facts)["do"]


def test_a_remedy_is_given_as_words_and_one_that_does_not_help_is_not_sold_as_one() -> None:
    remedy = Setting(pins=("fc", "0"), denied=("mul",))
    words = "'ops.modules={fc:fp32}' ops.modules.0=fp32 'ops.deny+=[mul]'"
    proven = f"add to the command line: {words}   (replayed with it: finite)"
    assert advice(report(Kind.BEYOND_FORMAT, remedy=remedy, proven=True)) == proven
    culprit = replace(FOUND, objective="generator")
    made = report(Kind.BEYOND_FORMAT, remedy=Setting(pins=("fc",)), culprit=culprit)
    assert dict(made.facts)["loss"] == "generator"
    assert made.title == "autopsy of step 12: activation beyond float16 in 0"
    tried = "; 'ops.modules={fc:fp32}' alone does not help"
    assert advice(made) == f"train with dtype=fp32 or dtype.half=bfloat16{tried}"


ADD = "add to the command line: "
STATIC = f"{ADD}loss_scaling=static loss_scaling.scale"
LOWER = f"{ADD}loss_scaling=Backoff loss_scaling.init_scale=8"


def test_a_scale_that_is_too_high_or_too_low() -> None:
    for scaling, floor, said in (
        ("Backoff", 1.0, "nothing: the scale goes from 1024 to 16 by itself, in about 6 skipped"),
        ("Backoff", 64.0, f"{LOWER} loss_scaling.min_scale=8; at scale 16 the step is finite"),
        ("static", 1024.0, f"{STATIC}=8; or loss_scaling=Backoff, which finds a scale"),
    ):
        made = report(Kind.SCALE_TOO_HIGH, scaling, floor, octaves=-6)
        normal = " (normal)" if floor == 1.0 else ", and the scaler does not go lower"
        assert made.title == f"autopsy of step 12: scale too high{normal}"
        assert advice(made).startswith(said)
    shares = {"underflow": 0.9, "underflow_then": 0.02}
    for scaling, option in (
        ("static", STATIC),
        ("none", f"{ADD}loss_scaling=Backoff loss_scaling.init_scale"),
        ("LogMax", f"{ADD}loss_scaling=LogMax loss_scaling.init_scale"),
    ):
        made = report(Kind.UNDERFLOW, scaling, octaves=3, **shares)
        below = "90% of the gradients are below float16's normal range (2% at 8192)"
        assert advice(made) == f"{option}=8192; {below}"


def test_a_default_run_takes_the_words_for_a_scale() -> None:
    case = case_of(nn.Linear(2, 2), "amp", batches=[])
    for scaling, kind, octaves, scale in (
        ("Backoff", Kind.SCALE_TOO_HIGH, -12, 2.0**-3),
        ("static", Kind.SCALE_TOO_HIGH, -12, 2.0**-3),
        ("Mine", Kind.UNDERFLOW, 3, 2.0**13),
        ("LogMax", Kind.UNDERFLOW, 17, 2.0**27),
        ("none", Kind.UNDERFLOW, 17, 2.0**27),
    ):
        diagnosis = Diagnosis(kind, FOUND, octaves=octaves)
        words = remedy_words(diagnosis, replace(case, scaling=scaling))
        assert float(build_scaler(given(*words)).scale) == scale


ZERO = "look for a division by zero, a logarithm of zero, or first weights that are too large"


@pytest.mark.parametrize(
    ("step", "calm"),
    [
        (STEP, "lower optimizer.lr or set a lower trainer.clip_norm"),
        (replace(STEP, updates=0), ZERO),
    ],
)
def test_the_learning_rate_is_not_blamed_before_any_update(step: Evidence, calm: str) -> None:
    cause, earlier = "model, data or learning rate", "lower optimizer.lr; or start from an earlier"
    if not step.updates:  # The weights never were finite.
        cause, earlier = "model or data", "start from a checkpoint whose weights are finite"
    for direction, said in (
        ("data", "correct or remove the samples"),
        ("weights", earlier),
        ("forward", f"no format helps: {calm}, and look at these samples and at this op's inputs"),
    ):
        culprit = replace(FOUND, direction=direction, value=math.nan, samples=(103, 104))
        made = report(Kind.NOT_FINITE_IN_FP32, culprit=culprit, step=step)
        assert made.title == f"autopsy of step 12: not finite in fp32 too: {cause}"
        assert advice(made).startswith(said)
        assert dict(made.facts)["samples"] == "103, 104 (2 of 20), epoch 2, batch 5"
    made = report(Kind.DIVERGING, step=step)
    loss = "in fp32 too the loss is 1e+07, and it was 2 at the first step"
    assert advice(made) == f"{calm}: {loss}"
    for word, sentence in made.facts:  # The terminal and the page say the same.
        assert f"- **{word}**: {sentence}" in made.markdown()
        assert re.search(rf"^  {word} +{re.escape(sentence)}$", made.text(), re.M)


NAMES = ["", "fc", "head", "0", "05", "2", "2.1", "2.10", "2.1.1", "layer4.1.conv2", "layer4.11"]


def given(*words: str) -> Config:
    return check_config(composed(*prepare(["dtype=mixed", *words])))


def test_the_named_modules_are_pinned_and_no_others_and_ops_are_denied() -> None:
    for modules in (["fc", "layer4.1"], ["0", "2.10", "2.1.1"], [""]):
        pins = given(*pin_words(modules)).ops.modules
        policy = Policy("mixed", "float16", OpLists(modules=pins))
        inside = [n for n in NAMES if any(not m or f"{n}.".startswith(f"{m}.") for m in modules)]
        assert [name for name in NAMES if policy.pin_of(name)] == inside
    moved = {"mul", "linear"}
    before, after = (build_precision(given(*w)).policy.ops for w in ((), deny_words(moved)))
    assert after.deny == before.deny | moved
    assert not moved & (after.allow | after.infer)


OWN = "model._target_=planted.beyond"
SHORT = ["dataset=digits", "device=cpu", "dataset.batch_size=32", "trainer.max_steps=3"]
STOPS = "trainer.max_consecutive_skips=4"
HIGH = ["loss_scaling=Backoff", "loss_scaling.init_scale=16777216"]


def page_of(folder: Path, step: int = 1) -> str:
    return (evidence.folder_of(folder, step) / "report.md").read_text()


def diverge(folder: Path, *words: str) -> str:
    """The text of the error that a run ends with."""
    return refused(DivergedError, train, folder, *SHORT, STOPS, *words)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that fails in its first step."""
    folder = tmp_path_factory.mktemp("failed")
    assert diverge(folder, OWN).endswith("step_00000001/report.md")
    return folder


def test_a_run_that_diverges_has_a_report(failed: Path, capsys: Shown) -> None:
    text = page_of(failed)
    assert text.startswith("# autopsy of step 1: activation beyond float16 in gain\n")
    assert "- **where**: gain, op mul, forward pass" in text
    assert "'ops.modules={gain:fp32}'   (replayed with it: finite)" in text
    assert "epoch 0, batch 0" in text
    _, weights, _ = evidence.load(evidence.folder_of(failed, 1))
    assert not weights["norm.running_mean"].any()  # As before the step.
    for folder in (failed, evidence.folder_of(failed, 1)):
        autopsy_command.main([f"run={folder}", OWN])
        assert capsys.readouterr().out.startswith(text.splitlines()[0][2:])
        assert page_of(failed) == text


def test_mistakes_are_one_line(failed: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for words, said in (
        ("", "run: must be given"),
        ("run=/nowhere", "run=/nowhere: holds no evidence of a failed step; try a step from"),
        (f"run={failed} step=7 {OWN}", "step=7: .* holds the evidence of 1"),
        (f"run={failed}", f"if you trust it, add {OWN}"),
    ):
        assert re.search(said, refused(MpframeError, autopsy_command.main, words.split()))


def test_evidence_that_is_none_or_of_another_model_is_refused(failed: Path, tmp_path: Path) -> None:
    snapshot = checkpoint.read(evidence.folder_of(failed, 1))
    for number, (entry, value) in enumerate((
        ("weights", {"": 1}), ("random", [1, None]), ("batches", 1), ("floors", 1),
        ("scales", {"": 0.0}), ("scales", {"": math.inf}), ("scales", {"": "1"}),
        ("batches", [(torch.zeros(4, 3), torch.zeros(4).long())]), ("batches", [[], {"a": 1}]),
    )):  # fmt: skip
        changed = replace(snapshot, state={**snapshot.state, entry: value})
        folder = save_as(evidence.folder_of(tmp_path, number), changed)
        wrong = "not the evidence of a step" if entry == "weights" else "does not run with this mo"
        assert wrong in refused(CheckpointError, autopsy_command.of_evidence, folder, [OWN])


@pytest.mark.parametrize(
    ("words", "title", "said"),
    [
        ("dtype.master_weights=false", "", "- **do**: set dtype.master_weights=true; or lower"),
        ("optimizer.lr=1e4 trainer.max_steps=200", "diverging, in fp32", "lower optimizer.lr"),
        ("dtype=fp32 optimizer=sgd optimizer.lr=1e30", "step 2: not finite in fp32 too", ""),
        ("loss_scaling=static loss_scaling.scale=16777216", "step 1: scale too high", "floor"),
        # The backward pass of sqrt at 0 is not finite in any format: no scale and no pin helps.
        ("model._target_=planted.Root", "not finite in fp32 too: model or data", ""),
    ],
)
def test_a_rate_is_told_from_a_format_also_by_the_last_line(
    words: str, title: str, said: str, tmp_path: Path
) -> None:
    model = [] if words.startswith("model.") else ["model=mlp"]
    error = diverge(tmp_path, *model, *words.split())
    (folder,) = evidence.all_in(tmp_path)
    first, text = (folder / "report.md").read_text().split("\n", 1)
    assert (title in first, said in text) == (True, True), first
    assert error == f"{STOPS} reached: {first.partition(': ')[2]}; see {folder / 'report.md'}"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("diverged", error)


def test_a_failing_autopsy_is_a_warning(tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    fail = Mock(side_effect=RuntimeError("out of memory\nand more"))
    monkeypatch.setattr("mpframe.lab.autopsy.report.diagnose", fail)
    diverge(tmp_path, OWN)
    assert "the autopsy of a failed step failed: out of memory" in caplog.text


def test_it_changes_no_bit_and_a_scale_on_its_way_down_is_normal(tmp_path: Path) -> None:
    options = [OWN, *SHORT, *HIGH, "ops.modules={gain:fp32}"]
    folders = [tmp_path / name for name in ("with", "without")]
    for folder, own in zip(folders, (".after=2", "=null"), strict=True):
        assert train(folder, *options, f"callbacks.autopsy{own}").steps == 3
    text = page_of(folders[0], 2)
    assert text.startswith("# autopsy of step 2: scale too high (normal)\n")
    assert "2 steps in a row were skipped" in text
    assert "nothing: the scale goes from 8.38861e+06 to" in text
    assert not differing(*(checkpoint.load(folder)["trainer"]["weights"] for folder in folders))
