"""What a run, and one stopped and resumed, writes for TensorBoard."""

from pathlib import Path

import pytest
from in_process import train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpframe.tracking.tags import Tag, meaning_of, metric_tag

SMALL = ("model=mlp", "model.hidden=8", "trainer.log_every=1", "loss_scaling=LogMax")
RANGES = ("numerics=on", "numerics.every=2", "callbacks.ranges.layers=[head]", "model.depth=1")
GROUPS = ("+optimizer.groups.heads.parameters=[head.*]", "optimizer.groups.heads.lr=0.1")
RUNS = [
    ("dtype=mixed", *SMALL, *RANGES),
    ("dtype=amp", *SMALL[:2], "loss_scaling=static", *GROUPS),
    ("dtype=mixed_bf16", *SMALL[:2], "optimizer=muon_adamw"),
    ("dtype=mixed", "experiment=digits_gan"),
]


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def test_a_resumed_run_shows_every_curve_and_page_once(tmp_path: Path) -> None:
    train(tmp_path, *SMALL, "trainer.epochs=1")
    train(tmp_path, *SMALL, "trainer.epochs=2", "resume=auto")
    events = read(tmp_path)
    accuracy = metric_tag("accuracy")
    expected = {str(tag) for tag in Tag if not tag.startswith("text/")}
    assert {*events.Tags()["scalars"]} == expected | {accuracy, metric_tag("accuracy", "test")}
    assert [event.step for event in events.Scalars(Tag.LOSS_TRAIN)] == list(range(1, 45))
    assert [event.step for event in events.Scalars(accuracy)] == [22, 44]

    def page(tag: str) -> str:
        return str(events.Tensors(tag)[0].tensor_proto.string_val[0].decode())

    texts = {tag for tag in events.Tags()["tensors"] if tag.startswith("text/")}
    assert texts == {str(tag) for tag in Tag if tag.startswith("text/")} - {Tag.TEXT_PROFILE}
    assert "linear in ops.allow" in page(Tag.TEXT_DTYPE_MAP)
    assert "overflow_probability: 0.001" in page(Tag.TEXT_CONFIG)
    about = page(Tag.TEXT_ABOUT)
    assert "**Precision**: mixed" in about
    assert "**Training**: AdamW" in about
    assert "ops `default`" in about
    assert "682 weights" in about


@pytest.mark.parametrize("options", RUNS, ids=" ".join)
def test_every_tag_of_a_run_has_a_meaning(options: tuple[str, ...], tmp_path: Path) -> None:
    train(tmp_path, "trainer.max_steps=2", "trainer.log_every=1", *options)
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
