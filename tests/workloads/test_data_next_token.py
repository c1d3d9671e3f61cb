"""Windows of a text: what each holds, that parts never share a token, and what is refused."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader, Task
from mpframe.workloads.text.language_model import next_token, token_loss

LENGTH = 60  # tokens in each of the 100 stretches of `numbered`


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """A file of the 16-bit tokens 0, 1, 2, ..., so that a token is its own place."""
    path = tmp_path / "tokens.bin"
    np.arange(100 * LENGTH, dtype="<u2").tofile(path)
    return path


def task_of(path: Path, **options: Any) -> Any:
    own = {"context": 8, "vocab_size": 65536, "token_bytes": 2, "eval_windows": None}
    return next_token(str(path), **{**own, **options})


def batches(task: Task, seed: int = 0, epoch: int = 0) -> list[tuple[Tensor, Tensor]]:
    return list(Loader(task.train, 16, seed=seed, shuffle=True).epoch(epoch))


def test_targets_are_the_next_tokens(numbered: Path) -> None:
    task = task_of(numbered)
    for inputs, targets in batches(task):
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)  # One token later, and the text counts up.
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))


def test_no_token_is_in_two_parts(numbered: Path) -> None:
    task = task_of(numbered)
    train = {
        int(token) // LENGTH for epoch in range(3) for pair in batches(task, 0, epoch)
        for tokens in pair for token in tokens.flatten()
    }  # fmt: skip
    val, test = (
        {int(token) // LENGTH for pair in part for tokens in pair for token in tokens}
        for part in (task.val, task.test)
    )
    assert val == {9, 29, 49, 69, 89}
    assert test == {19, 39, 59, 79, 99}
    assert train == set(range(100)) - val - test


def test_validation_lies_side_by_side(numbered: Path) -> None:
    task = task_of(numbered)
    # 59 tokens with one after them: 7 windows of 8 in each of the 5 stretches.
    firsts = [int(inputs[0]) for inputs, _ in task.val]
    assert firsts == [stretch * LENGTH + 8 * n for stretch in (9, 29, 49, 69, 89) for n in range(7)]
    assert len(task.train) == 90 * 7
    few = task_of(numbered, eval_windows=5)
    assert [int(inputs[0]) for inputs, _ in few.val] == firsts[::7]
    assert len(few.train) == 90 * 7


def test_windows_are_a_function_of_seed_epoch_and_index(numbered: Path) -> None:
    def firsts(seed: int, epoch: int, indices: list[int]) -> list[int]:
        train = task_of(numbered).train
        train.set_epoch(seed, epoch)
        return [int(token) for token in train.fetch_batch(indices)[0][:, 0]]

    assert firsts(3, 1, [5, 0, 7]) == firsts(3, 1, [5, 0, 7])
    assert firsts(3, 1, [0, 7]) == firsts(3, 1, [5, 0, 7])[1:]
    others = [firsts(*key, [5, 0, 7]) for key in ((3, 2), (4, 1))]
    assert firsts(3, 1, [5, 0, 7]) not in others
    assert others[0] != others[1]


def test_every_place_of_a_stretch_begins_a_window(numbered: Path) -> None:
    task = task_of(numbered)
    firsts = {
        int(first) for epoch in range(60) for inputs, _ in batches(task, 0, epoch)
        for first in inputs[:, 0]
    }  # fmt: skip
    # 52 places in each of 90 stretches and 60 * 624 windows: one is missed with e^-8.
    assert {first % LENGTH for first in firsts} == set(range(LENGTH - 8))


def test_bytes_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    text = bytes(range(256)) * 8
    (tmp_path / "one.txt").write_bytes(text)
    single = next_token(str(tmp_path / "one.txt"), context=4)
    assert [int(token) for token in single.val[0][0]] == list(text[180:184])
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_bytes(text[:99])
    (tmp_path / "more" / "b.txt").write_bytes(text[100:])
    (tmp_path / "more" / "link.txt").symlink_to(tmp_path / "one.txt")
    (tmp_path / "more" / "other.md").write_bytes(text)
    folder = next_token(str(tmp_path / "more"), context=4)
    assert len(folder.train) == len(single.train)
    # A line break stands in the place of byte 99.
    assert [int(token) for token in folder.val[0][0]] == list(text[180:184])


def test_a_file_is_mapped_and_not_read(numbered: Path) -> None:
    assert isinstance(task_of(numbered).train.stretches.tokens, np.memmap)


def test_the_library_is_the_default() -> None:
    tokens = next_token().train.stretches.tokens  # type: ignore[attr-defined]
    assert len(tokens) > 2**20
    source = (Path(sysconfig.get_path("stdlib")) / "abc.py").read_bytes()
    assert source in bytes(tokens)


def test_metrics_know_the_bytes_of_a_token(numbered: Path) -> None:
    metric = task_of(numbered, bytes_per_token=2.0).metric["bits_per_byte"]()
    metric.update(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64))
    assert metric.compute().item() == pytest.approx(1.0, rel=2**-23)


def test_the_loss_is_the_mean_over_tokens() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    # The same sum of six in another order.
    torch.testing.assert_close(token_loss(logits, targets), expected, rtol=2**-22, atol=0)


def test_an_unknown_token_is_refused(numbered: Path) -> None:
    # The first window of the validation is 540 to 547, and its last target 548.
    assert int(task_of(numbered, vocab_size=549).val[0][1][-1]) == 548
    message = r"^dataset.vocab_size=548: token 548 of the text is 548; set the size to that of the "
    with pytest.raises(DataError, match=message):
        task_of(numbered, vocab_size=548).val[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "dataset.context=0: must be a whole number >= 1"),
        ({"token_bytes": 4}, "dataset.token_bytes=4: allowed are 1 and 2"),
        ({"bytes_per_token": 0.0}, "dataset.bytes_per_token=0.0: must be a number > 0"),
        ({"eval_windows": 0}, "dataset.eval_windows=0: must be a whole number >= 1"),
        ({"vocab_size": 0}, "dataset.vocab_size=0: must be a whole number >= 1"),
    ],
)
def test_options_out_of_range_are_refused(
    numbered: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        task_of(numbered, **options)
    assert str(error.value) == message


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path, numbered: Path) -> None:
    odd, empty, folder = tmp_path / "odd.bin", tmp_path / "empty.txt", tmp_path / "folder"
    odd.write_bytes(b"abc")
    empty.touch()
    folder.mkdir()
    cases = {
        tmp_path / "none.txt": r"none.txt cannot be read \(No such file or directory\); give ",
        odd: r"odd.bin: 3 bytes are no row of tokens of 2 each; set dataset.token_bytes",
        empty: r"empty.txt: 0 bytes are no row of tokens",
        folder: r"folder: a folder needs \*.txt files .* it has 0 of 0 bytes; join them",
    }
    for path, message in cases.items():
        with pytest.raises(DataError, match=message):
            task_of(path)
    with pytest.raises(DataError, match=r"6000 tokens are too few .*use dataset.context=59 or"):
        task_of(numbered, context=60)
