"""A real run, and one stopped and resumed, as the TensorBoard server shows them."""

import re
from pathlib import Path

import pytest
from in_process import StartRun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_tensorboard_server import ALL_STATUSES, Server

from mpframe.tracking.tags import Tag, meaning_of, metric_tag

ACCURACY = metric_tag("accuracy")
SHORT = ("trainer.max_steps=2", "trainer.log_every=1", "callbacks.autopsy=null")
RANGES = ("model=mlp", "numerics=on", "numerics.every=1", "callbacks.ranges.layers=[head]")
GROUPS = ("+optimizer.groups.heads.parameters=[head.*]", "optimizer.groups.heads.lr=0.1")
RUNS = [
    ("dtype=fp32", "model=mlp"),
    ("dtype=mixed", "loss_scaling=LogMax", *RANGES),
    ("dtype=amp", "loss_scaling=static", "model=mlp", *GROUPS),
    ("dtype=mixed_bf16", "model=mlp", "optimizer=muon_adamw"),
    ("dtype=amp_bf16", "model=mlp"),
    ("dtype=mixed", "experiment=digits_gan"),
]


@pytest.fixture
def server(start_run: StartRun, tmp_path: Path) -> object:
    runs = tmp_path / "runs"
    options = ["trainer.log_every=1", "loss_scaling=LogMax"]
    start_run(runs / "whole", *options, "trainer.epochs=2")
    start_run(runs / "resumed", *options, "trainer.epochs=1")
    start_run(runs / "resumed", *options, "trainer.epochs=2", "resume=auto")
    server = Server(runs, tmp_path / "log.txt", "false")
    try:
        server.wait_until_ready({"whole": 44, "resumed": 44})
        yield server
    finally:
        server.kill()


def test_a_run_as_the_server_shows_it(server: Server) -> None:
    assert sorted(server.get("runs")) == ["resumed", "whole"]
    tags = {run: set(found) for run, found in server.get("plugin/scalars/tags").items()}
    tested = {ACCURACY, metric_tag("accuracy", "test")}
    expected = {str(tag) for tag in Tag if not tag.startswith("text/")} | tested
    assert tags == {"resumed": expected, "whole": expected}
    for run in ("whole", "resumed"):
        points = server.get("plugin/scalars/scalars", run=run, tag=Tag.LOSS_TRAIN)
        assert [step for _, step, _ in points] == list(range(1, 45))
        points = server.get("plugin/scalars/scalars", run=run, tag=ACCURACY)
        assert [step for _, step, _ in points] == [22, 44]
    texts = {tag for tag in Tag if tag.startswith("text/")} - {Tag.TEXT_PROFILE}
    assert set(server.get("plugin/text/tags")["whole"]) == texts
    (page, *_) = server.get("plugin/text/text", run="whole", tag=Tag.TEXT_DTYPE_MAP)
    assert "conv2d in ops.allow" in page["text"]
    (page, *_) = server.get("plugin/text/text", run="whole", tag=Tag.TEXT_CONFIG)
    assert "overflow_probability: 0.001" in page["text"]
    assert "conv2d" not in page["text"]
    (page, *_) = server.get("plugin/text/text", run="whole", tag=Tag.TEXT_ABOUT)
    lines = re.findall("<strong>(.+?)</strong>: (.+?)[ ,]", page["text"])
    assert lines == [("Precision", "mixed"), ("Model and data", "cnn"), ("Training", "AdamW")]
    assert "ops <code>default</code>" in page["text"]
    assert "65,834 weights" in page["text"]
    columns = [
        {"hparam": "dtype"},
        {"hparam": "loss_scaling"},
        {"metric": {"tag": ACCURACY, "group": ""}},
    ]
    body = {"allowedStatuses": ALL_STATUSES, "colParams": columns, "startIndex": 0, "sliceSize": 9}
    groups = server.post("plugin/hparams/session_groups", body)["sessionGroups"]
    assert {group["name"] for group in groups} == {"whole", "resumed"}
    assert {group["hparams"]["loss_scaling"] for group in groups} == {"LogMax"}
    assert {group["hparams"]["dtype"] for group in groups} == {"mixed float16"}
    pages = server.get("plugin/custom_scalars/layout")["category"]
    assert [page["title"] for page in pages] == ["training", "loss scaling", "gradients"]


@pytest.mark.parametrize("options", RUNS, ids=" ".join)
def test_every_tag_of_a_run_has_a_meaning(
    options: tuple[str, ...], start_run: StartRun, tmp_path: Path
) -> None:
    start_run(tmp_path, *SHORT, *options)
    events = EventAccumulator(str(tmp_path)).Reload()
    kinds = events.Tags()
    tags = [tag for kind in ("scalars", "images", "histograms") for tag in kinds[kind]]
    tags += [tag for tag in kinds["tensors"] if "__" not in tag and not tag.startswith("_")]
    assert any(tag.startswith(Tag.LOG2_SCALE) for tag in tags)
    assert Tag.TEXT_CONFIG in tags
    for tag in tags:
        meaning = meaning_of(tag)
        assert meaning is not None, tag
        assert events.SummaryMetadata(tag).summary_description == meaning.markdown
