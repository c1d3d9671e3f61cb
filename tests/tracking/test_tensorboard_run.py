"""What a run, and one stopped and resumed, writes for TensorBoard."""

from pathlib import Path

import pytest
from in_process import events, scalars, texts, train

from mpframe.tracking.tags import Tag, meaning_of, metric_tag

SMALL = ("model=mlp", "model.hidden=8", "trainer.log_every=1", "loss_scaling=LogMax")


def test_a_resumed_run_shows_every_curve_and_page_once(tmp_path: Path) -> None:
    train(tmp_path, *SMALL, "trainer.epochs=1")
    train(tmp_path, *SMALL, "trainer.epochs=2", "resume=auto")
    curves, accuracy = scalars(tmp_path), metric_tag("accuracy")
    expected = {str(tag) for tag in Tag if not tag.startswith("text/")}
    assert {*curves} == expected | {accuracy, metric_tag("accuracy", "test")}
    assert [step for step, _ in curves[Tag.LOSS_TRAIN]] == list(range(1, 45))
    assert [step for step, _ in curves[accuracy]] == [22, 44]
    pages = {tag for tag in events(tmp_path).Tags()["tensors"] if tag.startswith("text/")}
    assert pages == {str(tag) for tag in Tag if tag.startswith("text/")} - {Tag.TEXT_PROFILE}
    assert "linear in ops.allow" in texts(tmp_path, Tag.TEXT_DTYPE_MAP)[0][1]
    assert "overflow_probability: 0.001" in texts(tmp_path, Tag.TEXT_CONFIG)[0][1]
    about = texts(tmp_path, Tag.TEXT_ABOUT)[0][1]
    for said in ("**Precision**: mixed", "**Training**: AdamW", "ops `default`", "682 weights"):
        assert said in about


@pytest.mark.parametrize(
    "words",
    [  # tests/lab/test_pictures.py asks the same of a run that watches its numbers.
        "dtype=amp model=mlp loss_scaling=static +optimizer.groups.heads.parameters=[head.*]",
        "dtype=mixed experiment=digits_gan",
    ],
)
def test_every_tag_of_a_run_has_a_meaning(words: str, tmp_path: Path) -> None:
    train(tmp_path, "trainer.max_steps=2", "trainer.log_every=1", *words.split())
    found = events(tmp_path)
    tags = [tag for tag in found.Tags()["tensors"] if "__" not in tag and not tag.startswith("_")]
    assert Tag.TEXT_CONFIG in tags
    for tag in [*tags, *found.Tags()["scalars"]]:
        meaning = meaning_of(tag)
        assert meaning is not None, tag
        assert found.SummaryMetadata(tag).summary_description == meaning.markdown
