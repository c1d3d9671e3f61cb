"""What the tracker writes is read back with TensorBoard's own reader."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpframe.core.errors import MpframeError
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


def test_tensors_of_any_dtype_are_read(tmp_path: Path) -> None:
    """torch promotes float16 beside int64 to float16, whose largest number is 65504."""
    small = {"half": torch.ones((), dtype=torch.half), "truth": torch.tensor(True)}
    wide = torch.ones((), dtype=torch.double, requires_grad=True) * 2
    with Tracker(tmp_path) as tracker:
        tracker.scalars(1, {**small, "count": torch.tensor(100_000), "number": 3})
        tracker.scalars(2, {"bfloat16": torch.ones((), dtype=torch.bfloat16), "double": wide})
    values = {"half": 1.0, "truth": 1.0, "count": 100_000.0, "number": 3.0}
    assert {tag: curve(tmp_path, tag) for tag in values} == {t: [(1, v)] for t, v in values.items()}
    assert [curve(tmp_path, tag) for tag in ("bfloat16", "double")] == [[(2, 1.0)], [(2, 2.0)]]


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
    # The fast reader of TensorBoard's server wants these two beside it.
    metadata = read(tmp_path).SummaryMetadata(Tag.LOSS_TRAIN)
    assert metadata.plugin_data.plugin_name == "scalars"
    assert metadata.data_class == DATA_CLASS_SCALAR
    assert description(tmp_path, tag).startswith("**Exponents of `head`** (unit: values)")
    assert curve(tmp_path, "mine") == [(1, 2.0), (2, 2.0)]
    with pytest.raises(KeyError):
        description(tmp_path, "mine")


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


def test_the_columns_that_differ_come_first_and_only_a_finished_run_is_a_success(
    tmp_path: Path,
) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.hparams({"lr": 0.1, "seed": 3}, [Tag.LOSS_VAL], ["seed"])
        tracker.flush()
        data = hparams_data(tmp_path)
        tracker.mark_finished()
    infos = data["_hparams_/experiment"].experiment.hparam_infos
    assert {info.name: info.differs for info in infos} == {"lr": False, "seed": True}
    assert "_hparams_/session_end_info" not in data
    assert "_hparams_/session_end_info" in hparams_data(tmp_path)


@pytest.mark.parametrize("value", [{"a": 1}, [torch.tensor(1.0)]], ids=["a dict", "a list"])
def test_a_hyperparameter_of_another_type_is_refused(tmp_path: Path, value: object) -> None:
    with Tracker(tmp_path) as tracker, pytest.raises(MpframeError) as error:
        tracker.hparams({"optimizer.x": value}, [])
    inner = value[0] if isinstance(value, list) else value
    assert str(error.value) == (
        f"optimizer.x={inner!r}: a {type(inner).__name__} cannot be a hyperparameter; allowed are "
        "bool, int, float, str, None and lists of those: pass a mapping's entries one by one"
    )


def test_the_page_of_charts(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.layout(["accuracy"])
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {c.title: list(c.multiline.tag) for page in layout.category for c in page.chart}
    assert charts.pop("accuracy") == ["metric/accuracy/val"]
    tags = [tag for own in charts.values() for tag in own]
    assert set(tags) <= {str(tag) for tag in Tag}
    assert {"loss/train", "loss/val", "loss_scale/skipped_total", "grad/amax"} <= set(tags)


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
