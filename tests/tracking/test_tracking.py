"""What the tracker writes is read back with TensorBoard's own reader."""

import math
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpframe.core.errors import MpframeError
from mpframe.files.durable import append_whole
from mpframe.tracking import event_file
from mpframe.tracking import tracker as tracking
from mpframe.tracking.environment import environment_text, format_command
from mpframe.tracking.tags import KINDS, PATTERNS, Tag, meaning_of, metric_tag
from mpframe.tracking.tracker import Tracker


def read(folder: Path) -> EventAccumulator:
    everything = {"scalars": 0, "tensors": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    events = read(folder).Tensors(tag)
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]


def hparams_data(folder: Path) -> dict[str, HParamsPluginData]:
    contents = read(folder).PluginTagToContent("hparams")
    return {tag: HParamsPluginData.FromString(content) for tag, content in contents.items()}


class CountedTransfers(TorchFunctionMode):
    """Counts the calls that wait for a device, each on the shape of what it reads."""

    WAITING = (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__float__)

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.WAITING:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


# --- scalars


def test_scalars_of_a_step_share_one_event_and_come_back(tmp_path: Path) -> None:
    values = {tag: float(i) for i, tag in enumerate(Tag) if not tag.startswith("text/")}
    with Tracker(tmp_path) as tracker:
        tracker.scalars(3, values)
    assert {tag: curve(tmp_path, tag) for tag in values} == {t: [(3, v)] for t, v in values.items()}
    walltimes = {read(tmp_path).Scalars(tag)[0].wall_time for tag in values}
    assert len(walltimes) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool],
)
def test_tensors_of_any_dtype_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.scalars(1, {"a": torch.ones((), dtype=dtype), "b": torch.ones(()), "c": 3})
    assert [curve(tmp_path, tag) for tag in "abc"] == [[(1, 1.0)], [(1, 1.0)], [(1, 3.0)]]


def test_a_half_beside_a_count_does_not_make_it_overflow(tmp_path: Path) -> None:
    """torch promotes float16 beside int64 to float16, whose largest number is 65504."""
    with Tracker(tmp_path) as tracker:
        tracker.scalars(1, {"half": torch.ones((), dtype=torch.half), "n": torch.tensor(100_000)})
    assert curve(tmp_path, "n") == [(1, 100_000.0)]


def test_a_loss_that_requires_grad_is_read_without_a_warning(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.scalars(1, {"a": torch.ones((), requires_grad=True) * 2})
    assert curve(tmp_path, "a") == [(1, 2.0)]


def test_all_tensors_are_read_in_one_transfer(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.float16, torch.float64]
    values = {f"t{i}": torch.tensor(i, dtype=dtypes[i % 3]) for i in range(9)}
    with Tracker(tmp_path) as tracker, CountedTransfers() as transfers:
        tracker.scalars(1, values | {"number": 1.0})
    assert transfers.shapes == [(9,)]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_values_that_are_not_finite_are_logged_as_they_are(tmp_path: Path, as_tensor: bool) -> None:
    wrap: Callable[[float], float | Tensor] = torch.tensor if as_tensor else float
    with Tracker(tmp_path) as tracker:
        tracker.scalars(1, {"n": wrap(math.nan), "p": wrap(math.inf), "m": wrap(-math.inf)})
    assert math.isnan(curve(tmp_path, "n")[0][1])
    assert [curve(tmp_path, tag) for tag in "pm"] == [[(1, math.inf)], [(1, -math.inf)]]


def test_numbers_keep_float32_precision(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.scalars(1, {"third": torch.tensor(1 / 3, dtype=torch.float64), "count": 2**24})
    assert curve(tmp_path, "third") == [(1, torch.tensor(1 / 3).item())]
    assert curve(tmp_path, "count") == [(1, 2.0**24)]


# --- tags


def description(folder: Path, tag: str) -> str:
    return str(read(folder).SummaryMetadata(tag).summary_description)


def test_every_tag_says_what_it_is_in_which_unit() -> None:
    meanings = [*(tag.meaning for tag in Tag), *PATTERNS.values()]
    assert all(own.title and own.text and own.unit for own in meanings)
    assert len({own.title for own in meanings}) == len(meanings)
    assert not [own for own in meanings if own.text.endswith(".")]


def test_the_page_says_what_every_tag_means() -> None:
    page = (ROOT / "docs" / "tensorboard.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \| (.+?) \|$", page, re.M)
    told = {tag: (title, text.replace("\\|", "|"), unit) for tag, title, text, unit in rows}
    known = {str(tag): tag.meaning for tag in Tag} | PATTERNS
    assert told == {tag: (own.title, own.text, own.unit) for tag, own in known.items()}
    assert set(re.findall(r"^\| `(\w+)` \| (.+?) \|$", page, re.M)) == set(KINDS.items())


def test_tags_are_the_published_names() -> None:
    published = """loss/train loss/val loss/test optim/lr grad/norm grad/amax loss_scale/scale
        loss_scale/log2_scale loss_scale/skipped_total loss_scale/log2_mean loss_scale/log2_std
        speed/samples_per_second speed/input_fraction memory/peak_bytes text/about text/config
        text/dtype_map text/environment text/profile"""
    assert sorted(Tag) == sorted(published.split())
    assert metric_tag("accuracy") == "metric/accuracy/val"
    assert metric_tag("accuracy", "test") == "metric/accuracy/test"


def test_names_are_filled_into_the_meaning_of_a_tag() -> None:
    def told(tag: str) -> str:
        meaning = meaning_of(tag)
        return meaning.markdown if meaning else ""

    assert told("metric/top5/val") == (
        "**Validation `top5`** (unit: its own): the metric `top5` over all validation samples."
    )
    assert told("loss/train/generator").startswith(
        "**Training loss of `generator`** (unit: loss): "
    )
    headroom = told("numerics/updates/headroom_bits/stage1.conv")
    assert headroom.startswith("**Headroom of `stage1.conv`** (unit: bits): from the largest value")
    assert headroom.endswith("Counted: what the step added to the master weights.")
    assert told("mine/anything") == told("numerics/mine/headroom_bits/a") == told("losses") == ""


def test_the_first_value_of_a_tag_carries_its_meaning(tmp_path: Path) -> None:
    tag = "numerics/weights/exponents/head"
    with Tracker(tmp_path) as tracker:
        for step in (1, 2):
            tracker.scalars(step, {Tag.LOSS_TRAIN: 1.0, "mine": 2.0})
            tracker.histogram(tag, [1.0], [0.0, 1.0], step)
    assert description(tmp_path, Tag.LOSS_TRAIN) == Tag.LOSS_TRAIN.meaning.markdown
    assert description(tmp_path, tag).startswith("**Exponents of `head`** (unit: values)")
    assert curve(tmp_path, "mine") == [(1, 2.0), (2, 2.0)]
    with pytest.raises(KeyError):
        description(tmp_path, "mine")


def test_a_run_resumed_elsewhere_carries_the_meaning_of_what_it_writes_again(
    tmp_path: Path,
) -> None:
    with Tracker(tmp_path / "first") as tracker:
        tracker.scalars(1, {Tag.LOSS_TRAIN: 1.0})
        tracker.scalars(2, {Tag.LOSS_TRAIN: 1.0})
        kept = tracker.last_step()
    with Tracker(tmp_path / "second", purge_step=2) as tracker:
        tracker.write_again(kept)
    assert description(tmp_path / "second", Tag.LOSS_TRAIN)


def test_a_step_that_is_not_hidden_is_not_written_again(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.scalars(2, {"mine": 1.0})
        kept = tracker.last_step()
        tracker.flush()
    with Tracker(tmp_path, purge_step=4) as tracker:  # resumed from step 4, which logged nothing
        tracker.write_again(kept)
        tracker.scalars(6, {"mine": 3.0})
    assert curve(tmp_path, "mine") == [(2, 1.0), (6, 3.0)]


def test_no_tag_is_the_start_of_another() -> None:
    """The charts match tags as regular expressions from their start."""
    assert not [(a, b) for a in Tag for b in Tag if a is not b and b.startswith(a)]


# --- text, hyperparameters, charts


def test_text_is_markdown_without_a_table_around_it(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.text(Tag.TEXT_CONFIG, "seed: **é**")
    (event,) = read(tmp_path).Tensors("text/config")
    assert texts(tmp_path, "text/config") == [(0, "seed: **é**")]
    assert len(event.tensor_proto.tensor_shape.dim) == 0
    assert read(tmp_path).SummaryMetadata("text/config").plugin_data.plugin_name == "text"


def test_hparams_are_in_the_runs_own_event_file(tmp_path: Path) -> None:
    config = {"lr": 0.1, "n": 3, "ema": None, "nesterov": True, "betas": [0.9, None], "name": "a"}
    with Tracker(tmp_path) as tracker:
        tracker.hparams(config, [Tag.LOSS_VAL, metric_tag("accuracy")])
    data = hparams_data(tmp_path)
    start = data["_hparams_/session_start_info"].session_start_info.hparams
    numbers = {key: start[key].number_value for key in ("lr", "n")}
    strings = {key: start[key].string_value for key in ("ema", "nesterov", "betas", "name")}
    assert numbers == {"lr": 0.1, "n": 3}
    assert strings == {"ema": "none", "nesterov": "true", "betas": "[0.9, none]", "name": "a"}
    experiment = data["_hparams_/experiment"].experiment
    assert {info.name for info in experiment.hparam_infos} == set(config)
    tags = [info.name.tag for info in experiment.metric_infos]
    assert tags == ["loss/val", "metric/accuracy/val"]
    assert len(list(tmp_path.iterdir())) == 1


def test_hparams_that_differ_are_marked_to_be_shown_first(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.hparams({"lr": 0.1, "seed": 3}, [Tag.LOSS_VAL], ["seed"])
    infos = hparams_data(tmp_path)["_hparams_/experiment"].experiment.hparam_infos
    assert {info.name: info.differs for info in infos} == {"lr": False, "seed": True}


@pytest.mark.parametrize("finished", [False, True])
def test_only_a_finished_run_is_marked_a_success(tmp_path: Path, finished: bool) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.hparams({"lr": 0.1}, [Tag.LOSS_VAL])
        if finished:
            tracker.mark_finished()
    assert ("_hparams_/session_end_info" in hparams_data(tmp_path)) is finished


@pytest.mark.parametrize("value", [{"a": 1}, torch.tensor(1.0), [{"a": 1}], 1j])
def test_a_hyperparameter_of_another_type_is_refused(tmp_path: Path, value: object) -> None:
    with Tracker(tmp_path) as tracker, pytest.raises(MpframeError) as error:
        tracker.hparams({"optimizer.x": value}, [])
    inner = value[0] if isinstance(value, list) else value
    assert str(error.value) == (
        f"optimizer.x={inner!r}: a {type(inner).__name__} cannot be a hyperparameter; allowed are "
        "bool, int, float, str, None and lists of those: pass a mapping's entries one by one"
    )
    assert "hparams" not in read(tmp_path)._plugin_to_tag_to_content


def test_layout_draws_every_curve_that_belongs_on_the_page(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.layout(["accuracy"])
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {c.title: list(c.multiline.tag) for page in layout.category for c in page.chart}
    assert charts == {
        "loss": ["loss/train", "loss/val"],
        "accuracy": ["metric/accuracy/val"],
        "learning rate": ["optim/lr"],
        "samples per second, lately": ["speed/samples_per_second"],
        "waiting for batches": ["speed/input_fraction"],
        "scale, log2": ["loss_scale/log2_scale"],
        "skipped steps": ["loss_scale/skipped_total"],
        "norm and amax": ["grad/norm", "grad/amax"],
    }


# --- kill and resume


def logged_run(folder: Path, steps: range, purge_step: int | None, offset: float) -> Tracker:
    tracker = Tracker(folder, purge_step)
    tracker.text(Tag.TEXT_CONFIG, f"from {steps.start}")
    tracker.hparams({"lr": 0.1}, [Tag.LOSS_VAL])
    tracker.layout()
    for step in steps:
        tracker.scalars(step, {Tag.LOSS_TRAIN: offset + step})
        if step % 4 == 0:
            tracker.scalars(step, {Tag.LOSS_VAL: offset + step})
    tracker.flush()
    return tracker


def test_steps_strictly_increase_after_kill_and_resume(tmp_path: Path) -> None:
    killed = logged_run(tmp_path, range(1, 19), None, 0.0)  # a checkpoint at 10, killed at 18
    logged_run(tmp_path, range(11, 15), 11, 100.0).close()  # killed again, before its checkpoint
    logged_run(tmp_path, range(11, 21), 11, 200.0).close()
    killed.close()
    expected = [(s, float(s)) for s in range(1, 11)] + [(s, 200.0 + s) for s in range(11, 21)]
    assert curve(tmp_path, Tag.LOSS_TRAIN) == expected
    assert curve(tmp_path, Tag.LOSS_VAL) == [point for point in expected if point[0] % 4 == 0]
    # This reader never hides a text; the server does, and shows one at 0 and one at 11.
    pages = texts(tmp_path, Tag.TEXT_CONFIG)
    assert pages == [(0, "from 1"), (11, "from 11"), (11, "from 11")]
    layouts = [event.step for event in read(tmp_path).Tensors("custom_scalars__config__")]
    assert layouts == [0, 11, 11]


def test_a_new_run_in_an_old_folder_hides_the_old_curve(tmp_path: Path) -> None:
    logged_run(tmp_path, range(1, 8), None, 0.0).close()
    logged_run(tmp_path, range(1, 3), None, 100.0).close()
    assert curve(tmp_path, Tag.LOSS_TRAIN) == [(1, 101.0), (2, 102.0)]


def test_a_resume_within_the_same_second_sorts_last(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        Tracker(tmp_path).close()
        names = sorted(path.name for path in tmp_path.iterdir())
    seconds = [int(name.split(".")[3]) for name in names]
    assert seconds[0] < seconds[1]


def test_killed_process_keeps_what_was_flushed(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib; from mpframe.tracking.tracker import Tracker\n"
        "tracker = Tracker(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1, 51): tracker.scalars(step, {'a': float(step)})\n"
        "tracker.flush(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=120)
    assert curve(tmp_path, "a") == [(step, float(step)) for step in range(1, 51)]


# --- bad input


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(MpframeError) as error:
        Tracker(folder)
    assert str(error.value) == (
        f"run folder {folder}: the event file cannot be written (Not a directory); "
        "free space or set hydra.run.dir to a writable folder"
    )


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    tracker.scalars(1, {"a": 1.0})
    with monkeypatch.context() as patched:
        patched.setattr(event_file, "append_whole", full)
        with pytest.raises(MpframeError, match=r"written \(No space left on device\); free space"):
            tracker.flush()
    tracker.close()
    assert curve(tmp_path, "a") == [(1, 1.0)]


def test_a_full_disk_does_not_hide_what_went_wrong_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def fail(tracker: Tracker) -> None:
        tracker.scalars(1, {"a": 1.0})
        monkeypatch.setattr(event_file, "append_whole", full)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Tracker(tmp_path) as tracker:
        fail(tracker)


def test_a_full_disk_may_be_warned_of_and_what_waited_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with Tracker(tmp_path, on_error="warn") as tracker:
        with monkeypatch.context() as patched:
            patched.setattr(event_file, "append_whole", full)
            for step in range(1, 4):
                tracker.scalars(step, {"a": float(step)})
                tracker.flush()
        tracker.scalars(4, {"a": 4.0})
    assert curve(tmp_path, "a") == [(step, float(step)) for step in range(1, 5)]
    (line,) = caplog.messages
    assert "cannot be written (No space left on device); the curves wait in memory" in line


def test_a_record_cut_short_by_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    append_whole(path, b"whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_whole(path, b"a piece")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"whole"


@pytest.mark.parametrize("ahead", [0, 10, 10**6])
def test_a_clock_that_went_back_does_not_mix_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """Files are read in the order of their names, and the newer one hides what is repeated."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ahead)
    with Tracker(tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.scalars(step, {Tag.LOSS_TRAIN: 1.0})
    monkeypatch.setattr(time, "time", lambda: now)
    for first in (3, 2):
        with Tracker(tmp_path, purge_step=first) as tracker:
            tracker.scalars(first, {Tag.LOSS_TRAIN: float(first)})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars(Tag.LOSS_TRAIN)] == [(1, 1.0), (2, 2.0)]


def test_the_last_step_is_written_again(tmp_path: Path) -> None:
    """What a resumed run hides from its first step on is in its checkpoint, whatever its kind."""
    with Tracker(tmp_path / "run") as tracker:
        tracker.scalars(1, {Tag.LOSS_TRAIN: 1.0})
        tracker.scalars(2, {Tag.LOSS_TRAIN: math.inf})
        tracker.histogram("counts", [1.0, 3.0], [0.0, 1.0, 2.0], 2)
        kept = tracker.last_step()
        tracker.scalars(3, {Tag.LOSS_TRAIN: 3.0})
    with Tracker(tmp_path / "run", purge_step=2) as tracker:
        tracker.write_again(kept)
        tracker.scalars(2, {Tag.LOSS_VAL: 5.0})
        assert len(tracker.last_step()["events"]) == 3
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars(Tag.LOSS_TRAIN)] == [(1, 1.0), (2, math.inf)]
    assert [e.step for e in events.Histograms("counts")] == [2]
    assert [(e.step, e.value) for e in events.Scalars(Tag.LOSS_VAL)] == [(2, 5.0)]


def test_what_was_never_a_last_step_is_refused(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker, pytest.raises(ValueError, match=r"\S"):
        tracker.write_again({"step": 1, "events": ["bm90IGFuIGV2ZW50"]})


# --- the null tracker, cost, imports


def test_logging_nine_tags_stays_cheap(tmp_path: Path) -> None:
    """The budget is 150 us; ten times that is a change of kind, however busy the machine."""
    values = {f"t{i}": torch.tensor(float(i)) for i in range(9)}
    seconds = []
    with Tracker(tmp_path) as tracker:
        for step in range(200):
            start = time.perf_counter()
            tracker.scalars(step, values)
            seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[100] < 1.5e-3


def test_import_warns_of_nothing() -> None:
    command = [sys.executable, "-W", "error", "-c", f"import {tracking.__name__}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- the environment's page


def test_environment_is_a_table_without_environment_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPFRAME_TEST_VARIABLE", "must-not-appear")
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", "ops.modules={a|b: fp32}"])
    monkeypatch.chdir(tmp_path)  # no repository here
    text = environment_text()
    rows = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines()[2:])
    assert rows["python"] == ".".join(map(str, sys.version_info[:3]))
    assert rows["torch"] == torch.__version__
    assert rows["git commit"] == "none"
    assert rows["command"] == r"`scripts/train.py 'ops.modules={a\|b: fp32}'`"
    assert all(rows.values())
    assert "must-not-appear" not in text


def test_environment_names_the_commit_and_whether_files_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*arguments: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *name, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert f"| git commit | {commit} |" in environment_text()
    (tmp_path / "file").write_text("2")
    assert f"| git commit | {commit}-dirty |" in environment_text()


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("optimizer.lr=0.1", "optimizer.lr=0.1"),
        ("+hub.token=abc", "+hub.token=***"),
        ("+hub={API_KEY: abc}", "+hub=***"),
        ("--password", "***"),
        ("model.max_tokens=8", "model.max_tokens=8"),
        ("model.tokenizer=bpe", "model.tokenizer=bpe"),
        ("url=https://me:pw@host/x", "url=https://***@host/x"),
        ("name=filled-in-by-the-shell", "name=***"),
        ("name=short", "name=short"),
    ],
)
def test_command_line_is_shown_without_its_secrets(argument: str, shown: str) -> None:
    environment = {"MY_SECRET": "filled-in-by-the-shell", "A_TOKEN": "short", "HOME": "0.1"}
    assert format_command([argument], environment).strip("'") == shown


# --- pictures and histograms


def test_a_picture_and_a_histogram_are_read_back(tmp_path: Path) -> None:
    figure = Figure(figsize=(2, 1))
    figure.savefig(tmp_path / "picture.png", dpi=50)
    png = (tmp_path / "picture.png").read_bytes()
    with Tracker(tmp_path / "run") as tracker:
        tracker.image("picture", png, 3)
        tracker.histogram("counts", [0.0, 2.0, 0.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3)
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    (image,) = events.Images("picture")
    assert (image.encoded_image_string, image.width, image.height) == (png, 100, 50)
    (entry,) = events.Histograms("counts")
    counted = entry.histogram_value
    assert (counted.min, counted.max, counted.num) == (1.0, 4.0, 3.0)
    assert (counted.sum, counted.sum_squares) == (2 * 1.5 + 3.5, 2 * 1.5**2 + 3.5**2)
    assert list(counted.bucket_limit) == [2.0, 3.0, 4.0]
    assert list(counted.bucket) == [2.0, 0.0, 1.0]
