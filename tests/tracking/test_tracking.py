"""What the tracker and a run write is read back with TensorBoard's own reader.

Of runs that are killed and resumed, or whose disk is full, too; and the table of numbers.
"""

import math
import re
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from fixtures import Patch, full
from in_process import events, scalars, texts, train
from matplotlib.figure import Figure
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor

from mpframe.core.errors import MpframeError
from mpframe.tracking.logger import Loggers
from mpframe.tracking.records import CSV_FILE, MetricsCsv
from mpframe.tracking.tags import KINDS, MEANINGS, Tag, describe_tag, metric_tag
from mpframe.tracking.tracker import Tracker, read_step

SMALL = ("model=mlp", "model.hidden=8", "trainer.log_every=1", "loss_scaling=LogMax")
HISTOGRAM = "numerics/weights/exponents/head"


def hparams_data(folder: Path) -> dict[str, HParamsPluginData]:
    contents = events(folder).PluginTagToContent("hparams")
    return {tag: HParamsPluginData.FromString(content) for tag, content in contents.items()}


def test_numbers_of_any_dtype_share_one_event_and_are_read_in_one_transfer(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """torch promotes float16 beside int64 to float16, whose largest number is 65504."""
    read, transfers = Tensor.tolist, []
    monkeypatch.setattr(Tensor, "tolist", lambda t: transfers.append(tuple(t.shape)) or read(t))
    small = {"half": torch.ones(()).half(), "truth": torch.tensor(True)}
    small |= {"count": torch.tensor(100_000)}
    wide = {"double": torch.tensor(1 / 3, dtype=torch.double, requires_grad=True) * 2}
    wide |= {"bfloat16": torch.tensor(2.0, dtype=torch.bfloat16), "inf": torch.tensor(-math.inf)}
    plain = {"number": 3, "plain inf": math.inf, "many": 2**24, Tag.LOSS_TRAIN: 0.5}
    with Loggers(Tracker(tmp_path)) as tracker:
        tracker.scalars(3, small | plain)
        tracker.scalars(3, wide | {"nan": torch.tensor(math.nan)})
    assert transfers == [(3,), (4,)]
    found, shown = scalars(tmp_path), events(tmp_path)
    assert math.isnan(found.pop("nan")[0][1])
    values = {"half": 1.0, "truth": 1.0, "count": 100_000.0, "bfloat16": 2.0, "inf": -math.inf}
    values |= {"double": torch.tensor(2 / 3).item(), **plain}
    assert found == {tag: [(3, value)] for tag, value in values.items()}
    assert len({shown.Scalars(tag)[0].wall_time for tag in small | plain}) == 1


def test_the_page_says_what_every_tag_means() -> None:
    assert all(unit and text for unit, text in MEANINGS.values())
    assert {*Tag} <= {*MEANINGS}
    page = (ROOT / "docs" / "tensorboard.md").read_text()
    rows = re.findall(r"^\| `(\S+/.+?)` \| (.+) \| (.+?) \|$", page, re.M)
    assert {tag: (unit, text.replace("\\|", "|")) for tag, text, unit in rows} == MEANINGS
    assert set(re.findall(r"^\| `(\w+)` \| (.+?) \|$", page, re.M)) == set(KINDS.items())
    # The charts match tags as regular expressions from their start.
    assert not [(a, b) for a in Tag for b in Tag if a is not b and b.startswith(a)]


def test_columns_that_differ_and_success(tmp_path: Path) -> None:
    config = {"lr": 0.1, "n": 3, "ema": None, "nesterov": True, "name": "a"}
    with closing(Tracker(tmp_path)) as tracker:
        tracker.hparams(config, [Tag.LOSS_VAL, metric_tag("accuracy")], ["n"])
        tracker.flush()
        data = hparams_data(tmp_path)
        tracker.mark_finished()
    start = data["_hparams_/session_start_info"].session_start_info.hparams
    assert {key: start[key].number_value for key in ("lr", "n")} == {"lr": 0.1, "n": 3}
    strings = {key: start[key].string_value for key in ("ema", "nesterov", "name")}
    assert strings == {"ema": "none", "nesterov": "true", "name": "a"}
    experiment = data["_hparams_/experiment"].experiment
    assert {info.name: info.differs for info in experiment.hparam_infos} == {
        name: name == "n" for name in config
    }
    tags = [info.name.tag for info in experiment.metric_infos]
    assert tags == ["loss/val", "metric/accuracy/val"]
    assert {*hparams_data(tmp_path)} - {*data} == {"_hparams_/session_end_info"}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_text_charts_a_picture_and_a_histogram_are_read_back(tmp_path: Path) -> None:
    """A text is Markdown without a table around it."""
    Figure(figsize=(2, 1)).savefig(tmp_path / "picture.png", dpi=50)
    png = (tmp_path / "picture.png").read_bytes()
    with closing(Tracker(tmp_path / "run")) as tracker:
        tracker.text(Tag.TEXT_CONFIG, "seed: **é**")
        tracker.layout(["accuracy"])
        tracker.image("picture", png, 3)
        tracker.histogram("counts", [0.0, 2.0, 0.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3)
    read = events(tmp_path / "run")
    assert texts(tmp_path / "run", "text/config") == [(0, "seed: **é**")]
    assert len(read.Tensors("text/config")[0].tensor_proto.tensor_shape.dim) == 0
    assert read.SummaryMetadata("text/config").plugin_data.plugin_name == "text"
    (event,) = read.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {c.title: list(c.multiline.tag) for page in layout.category for c in page.chart}
    assert charts.pop("accuracy") == ["metric/accuracy/val"]
    tags = {tag for own in charts.values() for tag in own}
    assert {"loss/train", "loss/val", "loss_scale/skipped_total", "grad/amax"} <= tags <= {*Tag}
    (image,), (entry,) = read.Images("picture"), read.Histograms("counts")
    assert (image.encoded_image_string, image.width, image.height) == (png, 100, 50)
    counted = entry.histogram_value
    assert (counted.min, counted.max, counted.num) == (1.0, 4.0, 3.0)
    assert (counted.sum, counted.sum_squares) == (2 * 1.5 + 3.5, 2 * 1.5**2 + 3.5**2)
    assert list(zip(counted.bucket_limit, counted.bucket, strict=True)) == [(2, 2), (3, 0), (4, 1)]


def test_all_curves_and_pages_of_a_run_carry_their_meaning(tmp_path: Path) -> None:
    train(tmp_path, *SMALL, "trainer.max_steps=2")
    found, metric = events(tmp_path), metric_tag("accuracy")
    tags = {*found.Tags()["scalars"], *found.Tags()["tensors"]} - {"custom_scalars__config__"}
    never = {Tag.TEXT_PROFILE, Tag.FIND_LR}
    assert tags == {*map(str, Tag), metric, metric_tag("accuracy", "test")} - never
    for tag in tags:
        told = found.SummaryMetadata(tag).summary_description
        assert told == describe_tag(tag), tag
    for tag, *words in (
        (Tag.TEXT_DTYPE_MAP, "linear in ops.allow"),
        (Tag.TEXT_CONFIG, "overflow_probability: 0.001"),
        (Tag.TEXT_ABOUT, "**Precision**: mixed", "**Training**: AdamW"),
        (Tag.TEXT_ABOUT, "ops `default`", "682 weights"),
    ):
        text = found.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        assert all(said in text for said in words), text


def logged_run(folder: Path, steps: range, purge_step: int, offset: float) -> Tracker:
    tracker = Tracker(folder, purge_step)
    tracker.text(Tag.TEXT_CONFIG, f"from {steps.start}")
    tracker.layout()
    for step in steps:
        tracker.scalars(step, {Tag.LOSS_TRAIN: offset + step})
        if step % 4 == 0:
            tracker.scalars(step, {Tag.LOSS_VAL: offset + step})
    tracker.flush()
    return tracker


def test_steps_strictly_increase_after_kill_and_resume(tmp_path: Path) -> None:
    logged_run(tmp_path, range(1, 8), 0, 50.0).close()  # An old run, which the new one hides.
    killed = logged_run(tmp_path, range(1, 19), 0, 0.0)  # a checkpoint at 10, killed at 18
    logged_run(tmp_path, range(11, 15), 11, 100.0).close()  # killed again, before its checkpoint
    logged_run(tmp_path, range(11, 21), 11, 200.0).close()
    killed.close()
    expected = [(s, float(s)) for s in range(1, 11)] + [(s, 200.0 + s) for s in range(11, 21)]
    assert scalars(tmp_path)[Tag.LOSS_TRAIN] == expected
    assert scalars(tmp_path)[Tag.LOSS_VAL] == [point for point in expected if point[0] % 4 == 0]
    # This reader never hides a text; the server does, and shows one at 0 and one at 11.
    pages = texts(tmp_path, Tag.TEXT_CONFIG)
    assert pages[1:] == [(0, "from 1"), (11, "from 11"), (11, "from 11")]
    layouts = [event.step for event in events(tmp_path).Tensors("custom_scalars__config__")]
    assert layouts[1:] == [0, 11, 11]


def test_a_clock_that_went_back_mixes_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    """Files are read in the order of their names, and the newer one hides what is repeated."""
    now = time.time()
    for ahead in (0, 10):
        (tmp_path / str(ahead)).mkdir()
        (tmp_path / str(ahead) / "events.out.tfevents.of_others").touch()
        runs = (0, (1, 2, 3), now + ahead), (3, (3,), now), (2, (2,), now)
        for purge_step, steps, clock in runs:
            monkeypatch.setattr(time, "time", lambda clock=clock: clock)
            with closing(Tracker(tmp_path / str(ahead), purge_step)) as tracker:
                for step in steps:
                    tracker.scalars(step, {Tag.LOSS_TRAIN: float(purge_step or 1)})
        assert scalars(tmp_path / str(ahead))[Tag.LOSS_TRAIN] == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("folder", ["run", "elsewhere"])
def test_the_last_step_is_written_again_with_its_meaning(tmp_path: Path, folder: str) -> None:
    """What a resumed run hides from its first step on is in its checkpoint, whatever its kind."""
    with closing(Tracker(tmp_path / "run")) as tracker:
        tracker.scalars(1, {Tag.LOSS_TRAIN: 1.0})
        tracker.scalars(2, {Tag.LOSS_TRAIN: math.inf})
        tracker.histogram(HISTOGRAM, [1.0, 3.0], [0.0, 1.0, 2.0], 2)
        kept = tracker.last_step()
        tracker.scalars(3, {Tag.LOSS_TRAIN: 3.0})
    with closing(Tracker(tmp_path / folder, purge_step=2)) as tracker:
        tracker.write_again(*read_step(kept))
        tracker.scalars(2, {Tag.LOSS_VAL: 5.0})
        assert len(tracker.last_step()["events"]) == 3
    found, curves = events(tmp_path / folder), scalars(tmp_path / folder)
    assert [curves[Tag.LOSS_TRAIN][-1], *curves[Tag.LOSS_VAL]] == [(2, math.inf), (2, 5.0)]
    assert [e.step for e in found.Histograms(HISTOGRAM)] == [2]
    data = found.SummaryMetadata(Tag.LOSS_TRAIN)
    assert data.summary_description == describe_tag(Tag.LOSS_TRAIN)
    told = found.SummaryMetadata(HISTOGRAM).summary_description
    assert told.endswith("(unit: values). Counted: the weights, as stored.")
    # The fast reader wants these two beside it.
    assert (data.plugin_data.plugin_name, data.data_class) == ("scalars", DATA_CLASS_SCALAR)


def test_a_step_that_is_not_hidden_is_not_written_again(tmp_path: Path) -> None:
    with closing(Tracker(tmp_path)) as tracker:
        tracker.scalars(2, {"mine": 1.0})
        kept = tracker.last_step()
        tracker.flush()
    with closing(Tracker(tmp_path, purge_step=4)) as tracker:  # resumed; step 4 logged nothing
        tracker.write_again(*read_step(kept))
        tracker.scalars(6, {"mine": 3.0})
        with pytest.raises(ValueError, match=r"\S"):  # What was never a last step.
            read_step({"step": 9, "events": ["bm90IGFuIGV2ZW50"]})
    assert scalars(tmp_path)["mine"] == [(2, 1.0), (6, 3.0)]


def test_a_full_disk_does_not_hide_what_went_wrong(tmp_path: Path, monkeypatch: Patch) -> None:
    """And what waits for room is written later."""
    raising, failed = Tracker(tmp_path / "a"), Loggers(Tracker(tmp_path / "b"))
    with monkeypatch.context() as patched:
        patched.setattr("mpframe.tracking.tracker.append_whole", full)
        for tracker in (raising, failed):
            tracker.scalars(1, {"a": 1.0})
        with pytest.raises(MpframeError, match=r"written \(No space left on device\); free space"):
            raising.flush()
        with pytest.raises(ZeroDivisionError), failed:
            raise ZeroDivisionError
    raising.close()
    assert scalars(tmp_path / "a")["a"] == [(1, 1.0)]


def test_a_row_is_a_step_and_a_resumed_run_cuts_what_it_repeats(tmp_path: Path) -> None:
    file, table = tmp_path / CSV_FILE, MetricsCsv(tmp_path, ["step", "train_loss", "val_loss"])
    table.add({"step": 10, "train_loss": 1 / 3})
    table.add({"step": 20, "val_loss": float("nan")})
    assert file.read_text() == "step,train_loss,val_loss\n10,0.333333333,\n20,,nan\n"
    table = MetricsCsv(tmp_path, ["step", "a", "b"])  # A new run begins a new table.
    for step in (1, 2, 3):
        table.add({"step": step, "a": step, "b": 2})
    MetricsCsv(tmp_path, ["step", "b", "c"], before=3).add({"step": 3, "b": 3, "c": 4})
    assert file.read_text() == "step,a,b,c\n1,1,2,\n2,2,2,\n3,,3,4\n"
    for there, left in (
        ("a,b\n1,2\n", "step,a\n"),  # no table
        ('step\n"1\n', "step,a\n"),
        ("step,a\n1,0.5\n2,0.2", "step,a\n1,0.5\n"),  # A kill cut it short.
        (f"step,a\n1,0.5\n{'9' * 5000},0.2\n", "step,a\n1,0.5\n"),
    ):
        file.write_text(there)
        MetricsCsv(tmp_path, ["step", "a"], before=9)
        assert file.read_text() == left
