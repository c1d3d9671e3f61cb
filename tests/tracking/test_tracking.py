"""What the tracker and a run write is read back with TensorBoard's own reader."""

import math
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from checkout import ROOT
from fixtures import Patch
from in_process import events, scalars, texts, train
from matplotlib.figure import Figure
from pages import Page
from refusal import refused
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpframe.core.errors import MpframeError
from mpframe.tracking.tags import KINDS, PATTERNS, Tag, meaning_of, metric_tag
from mpframe.tracking.tracker import Tracker

SMALL = ("model=mlp", "model.hidden=8", "trainer.log_every=1", "loss_scaling=LogMax")


def hparams_data(folder: Path) -> dict[str, HParamsPluginData]:
    contents = events(folder).PluginTagToContent("hparams")
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


def test_numbers_of_any_dtype_share_one_event_and_are_read_in_one_transfer(tmp_path: Path) -> None:
    """torch promotes float16 beside int64 to float16, whose largest number is 65504."""
    small = {"half": torch.ones(()).half(), "truth": torch.tensor(True)}
    small |= {"count": torch.tensor(100_000)}
    wide = {"double": torch.tensor(1 / 3, dtype=torch.double, requires_grad=True) * 2}
    wide |= {"bfloat16": torch.tensor(2.0, dtype=torch.bfloat16), "inf": torch.tensor(-math.inf)}
    plain = {"number": 3, "plain inf": math.inf, "many": 2**24, Tag.LOSS_TRAIN: 0.5}
    with Tracker(tmp_path) as tracker, CountedTransfers() as transfers:
        tracker.scalars(3, small | plain)
        tracker.scalars(3, wide | {"nan": torch.tensor(math.nan)})
    assert transfers.shapes == [(3,), (4,)]
    found, read = scalars(tmp_path), events(tmp_path)
    assert math.isnan(found.pop("nan")[0][1])
    values = {"half": 1.0, "truth": 1.0, "count": 100_000.0, "bfloat16": 2.0, "inf": -math.inf}
    values |= {"double": torch.tensor(2 / 3).item(), **plain}
    assert found == {tag: [(3, value)] for tag, value in values.items()}
    assert len({read.Scalars(tag)[0].wall_time for tag in small | plain}) == 1


def test_the_page_says_what_every_tag_means() -> None:
    known = {str(tag): tag.meaning for tag in Tag} | PATTERNS
    assert all(own.title and own.text and own.unit for own in known.values())
    assert len({own.title for own in known.values()}) == len(known)
    page = (ROOT / "docs" / "tensorboard.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \| (.+?) \|$", page, re.M)
    told = {tag: (title, text.replace("\\|", "|"), unit) for tag, title, text, unit in rows}
    assert told == {tag: (own.title, own.text, own.unit) for tag, own in known.items()}
    assert set(re.findall(r"^\| `(\w+)` \| (.+?) \|$", page, re.M)) == set(KINDS.items())
    # The charts match tags as regular expressions from their start.
    assert not [(a, b) for a in Tag for b in Tag if a is not b and b.startswith(a)]


@pytest.mark.parametrize(
    ("tag", "told"),
    [
        ("metric/top5/val", r"\*\*Validation `top5`\*\* \(unit: its own\): the metric `top5` .*"),
        ("loss/train/generator", r"\*\*Training loss of `generator`\*\* \(unit: loss\): .*"),
        ("numerics/updates/headroom_bits/a.b", r"\*\*Headroom of `a\.b`\*\* \(unit: bits\): .*"),
        *((tag, "") for tag in ("mine/anything", "numerics/mine/headroom_bits/a", "losses")),
    ],
)
def test_names_are_filled_into_the_meaning_of_a_tag(tag: str, told: str) -> None:
    meaning = meaning_of(tag)
    assert re.fullmatch(told, meaning.markdown if meaning else "")


def test_the_first_value_of_a_tag_carries_its_meaning(tmp_path: Path) -> None:
    tag = "numerics/weights/exponents/head"
    with Tracker(tmp_path) as tracker:
        for step in (1, 2):
            tracker.scalars(step, {Tag.LOSS_TRAIN: 1.0, "mine": 2.0})
            tracker.histogram(tag, [1.0], [0.0, 1.0], step)
    read = events(tmp_path)
    data = read.SummaryMetadata(Tag.LOSS_TRAIN)
    assert data.summary_description == Tag.LOSS_TRAIN.meaning.markdown
    # The fast reader of TensorBoard's server wants these two beside it.
    assert (data.plugin_data.plugin_name, data.data_class) == ("scalars", DATA_CLASS_SCALAR)
    assert read.SummaryMetadata(tag).summary_description.startswith("**Exponents of `head`**")
    assert scalars(tmp_path)["mine"] == [(1, 2.0), (2, 2.0)]
    with pytest.raises(KeyError):
        read.SummaryMetadata("mine")


def test_columns_that_differ_success_and_another_type_that_is_refused(
    tmp_path: Path,
) -> None:
    config = {"lr": 0.1, "n": 3, "ema": None, "nesterov": True, "betas": [0.9, None], "name": "a"}
    with Tracker(tmp_path) as tracker:
        tracker.hparams(config, [Tag.LOSS_VAL, metric_tag("accuracy")], ["n"])
        tracker.flush()
        data = hparams_data(tmp_path)
        for kind, value in (("dict", {"a": 1}), ("Tensor", [torch.ones(1)])):
            said = refused(MpframeError, tracker.hparams, {"optimizer.x": value}, [])
            assert f": a {kind} cannot be a hyperparameter; allowed are bool, int, float, " in said
            assert said.startswith("optimizer.x=")
        tracker.mark_finished()
    start = data["_hparams_/session_start_info"].session_start_info.hparams
    assert {key: start[key].number_value for key in ("lr", "n")} == {"lr": 0.1, "n": 3}
    strings = {key: start[key].string_value for key in ("ema", "nesterov", "betas", "name")}
    assert strings == {"ema": "none", "nesterov": "true", "betas": "[0.9, none]", "name": "a"}
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
    with Tracker(tmp_path / "run") as tracker:
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


def test_a_resumed_run_shows_every_curve_and_page_once(tmp_path: Path) -> None:
    train(tmp_path, *SMALL, "trainer.epochs=1")
    train(tmp_path, *SMALL, "trainer.epochs=2", "resume=auto")
    curves, accuracy = scalars(tmp_path), metric_tag("accuracy")
    expected = {str(tag) for tag in Tag if not tag.startswith("text/")}
    assert {*curves} == expected | {accuracy, metric_tag("accuracy", "test")}
    assert [step for step, _ in curves[Tag.LOSS_TRAIN]] == list(range(1, 45))
    assert [step for step, _ in curves[accuracy]] == [22, 44]
    events_of = events(tmp_path)
    pages = {tag for tag in events_of.Tags()["tensors"] if tag.startswith("text/")}
    assert pages == {str(tag) for tag in Tag if tag.startswith("text/")} - {Tag.TEXT_PROFILE}
    assert "linear in ops.allow" in texts(tmp_path, Tag.TEXT_DTYPE_MAP)[0][1]
    assert "overflow_probability: 0.001" in texts(tmp_path, Tag.TEXT_CONFIG)[0][1]
    for tag in [*curves, *pages]:
        told = events_of.SummaryMetadata(tag).summary_description
        assert told == meaning_of(tag).markdown, tag
    about = texts(tmp_path, Tag.TEXT_ABOUT)[0][1]
    for said in ("**Precision**: mixed", "**Training**: AdamW", "ops `default`", "682 weights"):
        assert said in about


def test_the_tracker_of_own_parts_is_called(tmp_path: Path, monkeypatch: Patch) -> None:
    """Two logs and one validation in 20 steps; the package itself is not installed."""
    wandb = MagicMock()
    wandb.init.return_value = wandb
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    blocks = Page(ROOT / "docs" / "own_parts.md").blocks("python")
    (code,) = (code for code in blocks if code.startswith("import wandb"))
    (tmp_path / "my_tracker.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["trainer.eval_every=20", "+callbacks.own._target_=my_tracker.WandB"]
    train(tmp_path / "run", *SMALL[:2], "trainer.max_steps=20", *options)
    assert [name for name, *_ in wandb.method_calls] == ["init", "log", "log", "log", "finish"]
