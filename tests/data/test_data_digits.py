"""The digits: complete, split for good, normalised."""

import sys
from typing import Any

import pytest
import torch

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import ArrayImages, Task, digits
from mpframe.data.samples import hold_out


@pytest.fixture(scope="module")
def task() -> Task:
    return digits()


def arrays(task: Task) -> tuple[ArrayImages, ArrayImages, ArrayImages]:
    assert isinstance(task.train, ArrayImages)
    assert isinstance(task.val, ArrayImages)
    assert isinstance(task.test, ArrayImages)
    return task.train, task.val, task.test


def test_sizes_and_shapes(task: Task) -> None:
    train, val, test = arrays(task)
    assert (len(train), len(val), len(test)) == (1437, 180, 180)
    inputs, target = train[0]
    assert inputs.shape == (1, 8, 8)
    assert inputs.dtype == torch.float32
    assert target.dtype == torch.int64


def test_every_digit_is_in_exactly_one_part(task: Task) -> None:
    from sklearn.datasets import load_digits

    stored = torch.cat([part.images for part in arrays(task)]).flatten(1)
    published = torch.from_numpy(load_digits().data).float() / 16
    assert sorted(stored.tolist()) == sorted(published.tolist())


def test_they_are_read_without_scikit_learns_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # Its import is an error now.
    assert isinstance(digits(), Task)


def test_without_scikit_learn_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpframe.data.images.find_spec", lambda name: None)
    with pytest.raises(DataError) as error:
        digits()
    assert str(error.value) == (
        "dataset: no scikit-learn with datasets/data/digits.csv.gz, which holds the digits; "
        "pip install scikit-learn"
    )


def test_every_class_gives_a_tenth_to_validation_and_to_test(task: Task) -> None:
    train, val, test = (part.targets.bincount(minlength=10) for part in arrays(task))
    # Counting off in tens over all classes in a row: each class is off by less than one.
    assert ((val - (train + val + test) / 10).abs() < 1).all()
    assert ((test - (train + val + test) / 10).abs() < 1).all()


def test_the_split_is_random_and_never_changes() -> None:
    targets = torch.arange(100) % 4
    train, held = hold_out(targets, one_in=5)
    assert sorted(train.tolist() + held.tolist()) == list(range(100))
    assert held.tolist() == HELD_OF_100
    torch.manual_seed(1)
    assert torch.equal(hold_out(targets, one_in=5)[1], held)


def test_parts_share_what_is_held_out() -> None:
    targets = torch.arange(100) % 4
    whole, held = hold_out(targets, one_in=5)
    train, first, second = hold_out(targets, one_in=5, parts=2)
    assert torch.equal(train, whole)
    assert (first.diff() > 0).all()
    assert torch.equal(torch.cat([first, second]).sort().values, held)
    assert targets[first].bincount().tolist() == [3, 2, 3, 2]
    assert targets[second].bincount().tolist() == [2, 3, 2, 3]


# The split of 100 samples in four classes: pinned, for a changed split would move every result.
HELD_OF_100 = [3, 10, 17, 23, 42, 45, 47, 48, 52, 58, 60, 61, 62, 63, 71, 76, 77, 81, 84, 86]


def test_training_images_are_normalised(task: Task) -> None:
    train, *_ = arrays(task)
    inputs, _ = train.fetch_batch(range(len(train)))
    # 92,000 float32 values up to 2: their mean's rounding is far below one unit of 2^-22.
    assert abs(inputs.double().mean().item()) < 2.0**-22
    assert abs(inputs.double().std(correction=0).item() - 1) < 1e-6


def test_a_stranger_prepares_them_by_the_description(task: Task) -> None:
    how = task.preprocessing
    assert how is not None
    _, val, _ = arrays(task)
    raw = val.images * 16  # exact: a power of two
    inputs = (raw / how["value_range"][1] - how["mean"][0]) / how["std"][0]
    # Three roundings of values below 4, where half a unit in the last place is 2^-23.
    torch.testing.assert_close(val.normalize(val.images), inputs, rtol=0, atol=3 * 2.0**-23)
    assert task.class_names == [str(digit) for digit in range(10)]


def test_only_training_images_are_augmented() -> None:
    augments = [part.augment for part in arrays(digits(augment="crop"))]
    assert augments == ["crop", "none", "none"]


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("root", "data", "dataset.root=data: the digits come with scikit-learn and are read from"),
        ("channels", 3, "dataset.channels=3: digits has 1; set dataset.channels=1"),
        ("image_size", 28, "dataset.image_size=28: digits has 8; set dataset.image_size=8"),
        ("classes", 11, "dataset.classes=11: digits has 10; set dataset.classes=10"),
        ("augment", "flip", "dataset.augment=flip: allowed are none, crop, crop_flip"),
    ],
)
def test_wrong_facts_are_refused(option: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        digits(**{option: value})
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_loss_and_metric(task: Task) -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    targets = torch.tensor([0, 1])
    # Two equal logits: -log(1/2), to the last float32 place.
    loss = task.objective(torch.nn.Identity(), (logits, targets)).loss
    assert loss.item() == pytest.approx(0.6931471805599453, rel=2.0**-23)
    metrics = task.metric(), task.metric()
    metrics[0].update(logits, targets)
    assert metrics[0].name == "accuracy"
    assert metrics[0].compute() == 0.5
    assert metrics[1].compute().isnan()
