"""callbacks=confusion_matrix, predictions: counts of all samples and ranks, pictures as seen."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Patch, refused
from in_process import events, train
from vocabulary import differing

from mpframe import checkpoint
from mpframe.core.comm import Comm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import StepOutput
from mpframe.data import digits
from mpframe.lab import validation
from mpframe.lab.validation import ConfusionMatrix, Predictions
from mpframe.tracking.summary import Summary


class WithAnother(Comm):
    """A rank without samples, and another one that has counted these."""

    theirs = torch.tensor([1, 2, 3, 4, 5])

    def sum_(self, tensors: Any) -> None:
        for tensor in tensors:
            tensor += self.theirs

    def max_of(self, numbers: Any) -> list[int]:
        return [len(self.theirs)]


def trainer_of(comm: Comm | None = None) -> Any:
    return SimpleNamespace(comm=comm or Comm(), model=torch.nn.Linear(1, 1))


@pytest.mark.parametrize(("form", "labelled"), [((7, 3), (7,)), ((2, 3, 4, 5), (2, 4, 5))])
def test_it_counts_each_label_of_every_batch(form: Any, labelled: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    matrix, expected, trainer = ConfusionMatrix(), torch.zeros(3, 3).long(), trainer_of()
    matrix.setup(trainer, SimpleNamespace(usage={}))  # type: ignore[arg-type]
    for number in (0, 1, 2, 0, 1):  # The first pass was broken off.
        logits, labels = torch.randn(form), torch.randint(0, 3, labelled)
        labels[0] = -100 if number else 3
        output = StepOutput(torch.zeros(()), logits, labels)
        matrix.on_prediction_end(trainer, number, None, output)
        expected *= number != 0
        for true, row in zip(labels.flatten(), logits.movedim(1, -1).reshape(-1, 3), strict=True):
            if 0 <= true < 3:
                expected[true, row.argmax()] += 1
    assert matrix.draw(trainer, "", tmp_path / "a.png")
    assert matrix.counts is not None
    assert torch.equal(matrix.counts, expected)
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert not matrix.draw(trainer, "", tmp_path / "b.png")


def test_a_rank_without_samples_counts_with_the_others(tmp_path: Path) -> None:
    matrix = ConfusionMatrix()
    matrix.setup(None, SimpleNamespace(usage={"class_names": ["a", "b"]}))  # type: ignore[arg-type]
    matrix.draw(trainer_of(WithAnother()), "", tmp_path / "a.png")
    assert matrix.counts is not None
    assert matrix.counts.tolist() == [[1, 2], [3, 4]]


def test_a_run_shows_both_and_trains_as_without(tmp_path: Path, monkeypatch: Patch) -> None:
    matrices, pictures = list[ConfusionMatrix](), list[Any]()
    draw, as_seen = ConfusionMatrix.draw, validation._as_seen
    monkeypatch.setattr(
        ConfusionMatrix, "draw", lambda own, *rest: matrices.append(own) or draw(own, *rest)
    )
    monkeypatch.setattr(
        validation, "_as_seen", lambda *given: pictures.append(as_seen(*given)) or pictures[-1]
    )
    small = ["dtype=mixed", "model.width=4", "trainer.epochs=1", "dataset.batch_size=128"]
    train(tmp_path / "plain", *small)
    summary = train(tmp_path / "run", *small, "callbacks=[default,confusion_matrix,predictions]")
    counts, shown = matrices[0].counts, pictures[-1]
    test: Any = digits().test
    accuracy = Summary.read(tmp_path / "run").test_metrics["accuracy"]
    assert counts is not None
    assert int(counts.sum()) == len(test.targets)
    assert int(counts.trace()) == round(accuracy * len(test.targets))
    assert len(shown) == 16
    for picture, raw in zip(shown, test.images, strict=False):  # Not normalised any more.
        assert torch.allclose(torch.from_numpy(picture), raw[0], atol=1e-6)
    tags = [f"{s}/{n}" for s in ("validation", "test") for n in ("confusion_matrix", "predictions")]
    assert sorted(events(tmp_path / "run").Tags()["images"]) == sorted(tags)
    assert len(list((tmp_path / "run/validation").glob("*.png"))) == 4
    folders = tmp_path / "plain", tmp_path / "run"
    assert not differing(*(checkpoint.load(own)["trainer"]["weights"] for own in folders))
    assert summary.metric == "accuracy"


def test_masks_are_drawn_beside_their_pictures(tmp_path: Path) -> None:
    predictions = Predictions(count=3)
    predictions.setup(None, SimpleNamespace(usage={}))  # type: ignore[arg-type]
    batch = [torch.rand(5, 3, 6, 6), torch.randint(0, 4, (5, 6, 6))]
    output = StepOutput(torch.zeros(()), torch.rand(5, 4, 6, 6), batch[1])
    for number in (0, 1):
        predictions.on_prediction_end(trainer_of(), number, batch, output)
    assert predictions._shown is not None
    assert [len(part) for part in predictions._shown] == [3, 3, 3]
    assert predictions.draw(trainer_of(), "t", tmp_path / "a.png")
    assert not predictions.draw(trainer_of(), "t", tmp_path / "b.png")


def test_what_has_no_classes_or_no_pictures_is_refused() -> None:
    batch, loss, trainer = [torch.rand(5, 3)], torch.zeros(()), trainer_of()
    for callback, output, said in (
        (ConfusionMatrix(), (torch.rand(5, 1), torch.rand(5, 1)),
         "confusion_matrix: the objective gives outputs float32 [5, 1] and targets float32 [5, 1]"),
        (Predictions(), (torch.rand(5, 2), torch.zeros(5).long()),
         "predictions: a batch begins with float32 [5, 3] and its outputs are float32 [5, 2]"),
    ):  # fmt: skip
        given = trainer, 0, batch, StepOutput(loss, *output)
        told = refused(ConfigError, callback.on_prediction_end, *given)
        assert told.startswith(f"callbacks.{said}; it needs ")
