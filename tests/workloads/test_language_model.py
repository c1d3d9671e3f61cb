"""Windows of a text that share no token between parts, shards, a GPT with GPT-2's numbers."""

import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Patch, refused
from vocabulary import differing

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader
from mpframe.data.streaming import StreamLoader
from mpframe.workloads.text.language_model import GPT, next_token
from mpframe.workloads.text.token_shards import token_shards

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


def test_targets_are_next_tokens_and_no_token_is_in_two_parts(numbered: Path) -> None:
    """Windows of the validation lie side by side."""
    task, few = task_of(numbered), task_of(numbered, eval_windows=5)
    loader = Loader(task.train, 16, seed=0, shuffle=True)
    batches = [batch for epoch in range(3) for batch in loader.epoch(epoch)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)  # One token later, and the text counts up.
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))
    assert isinstance(task.train.stretches.tokens, np.memmap)  # Mapped and not read.
    read = torch.cat([inputs, targets]).flatten()
    val, test = (
        {int(token) // LENGTH for pair in part for tokens in pair for token in tokens}
        for part in (task.val, task.test)
    )
    assert val == {9, 29, 49, 69, 89}
    assert test == {19, 39, 59, 79, 99}
    assert set((read // LENGTH).tolist()) == set(range(100)) - val - test
    # 59 tokens with one after them: 7 windows of 8 in each of the 5 stretches.
    firsts = [int(inputs[0]) for inputs, _ in task.val]
    assert firsts == [stretch * LENGTH + 8 * n for stretch in (9, 29, 49, 69, 89) for n in range(7)]
    assert [int(inputs[0]) for inputs, _ in few.val] == firsts[::7]
    assert len(task.train) == len(few.train) == 90 * 7

    def firsts_of(seed: int, epoch: int, *indices: int) -> list[int]:
        task.train.set_epoch(seed, epoch)
        return task.train.fetch_batch(indices)[0][:, 0].tolist()

    # The windows are a function of seed, epoch and index.
    own, *others = (firsts_of(*key, 5, 0, 7) for key in ((3, 1), (3, 2), (4, 1)))
    assert firsts_of(3, 1, 0, 7) == own[1:]
    assert own not in others
    assert others[0] != others[1]


def test_bytes_of_a_file_of_a_folder_and_of_the_library(tmp_path: Path, monkeypatch: Patch) -> None:
    text = bytes(range(256)) * 8
    (tmp_path / "one.txt").write_bytes(text)
    single = next_token(str(tmp_path / "one.txt"), context=4)
    assert [int(token) for token in single.val[0][0]] == list(text[180:184])
    more = tmp_path / "more"
    more.mkdir()
    for name, part in {"a.txt": text[:99], "b.txt": text[100:], "other.md": text}.items():
        (more / name).write_bytes(part)
    (more / "link.txt").symlink_to(tmp_path / "one.txt")
    folder = next_token(str(more), context=4)
    assert len(folder.train) == len(single.train)
    # A line break stands in the place of byte 99.
    assert [int(token) for token in folder.val[0][0]] == list(text[180:184])
    (more / "site-packages").mkdir()
    for name in ("abc.py", "site-packages/own.py"):
        (more / name).write_text(f"# {name} ".ljust(3000, "x"))
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(more)}.__getitem__)
    library: Any = next_token(context=8).train.stretches.tokens
    assert (b"abc.py" in bytes(library), b"own.py" in bytes(library)) == (True, False)


def test_what_makes_no_task_and_an_unknown_token_are_refused(numbered: Path) -> None:
    folder = numbered.parent
    (folder / "odd").write_bytes(b"abc")
    for options, text in (
        ({"context": 0}, "dataset.context=0: must be a whole number >= 1"),
        ({"token_bytes": 3}, "dataset.token_bytes=3: must be one of 1, 2, 4"),
        ({"bytes_per_token": 0.0}, "dataset.bytes_per_token=0.0: must be a number > 0"),
        ({"eval_windows": 0}, "dataset.eval_windows=0: must be a whole number >= 1"),
        ({"context": 60}, "use dataset.context=59 or"),
        ({"root": "odd"}, "is not a multiple of the data-type size"),
        ({"root": ""}, "it has 0 of 0 bytes; join them"),
    ):
        root = folder / str(options.pop("root", "tokens.bin"))
        assert text in refused((ConfigError, DataError, ValueError), task_of, root, **options)
    # The first window of the validation is 540 to 547, and its last target 548.
    assert int(task_of(numbered, vocab_size=549).val[0][1][-1]) == 548
    text = refused(DataError, task_of(numbered, vocab_size=548).val.__getitem__, 0)
    assert text.startswith("dataset.vocab_size=548: token 548 of the text is 548; set the size to")
    metric = task_of(numbered, bytes_per_token=2.0).metric["bits_per_byte"]()
    metric.update(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64))
    assert metric.compute().item() == pytest.approx(1.0, rel=2**-23)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three files of 13, 21 and 8 tokens, and the one that validates."""
    for name, begin, end in (("a", 0, 13), ("b", 13, 34), ("c", 34, 42), ("val", 50, 80)):
        np.arange(begin, end, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_every_window_is_read_once_in_a_pass(shards: Path, workers: int) -> None:
    task = token_shards(str(shards), 4, 80)
    loader = StreamLoader(task.train, 3, batches_per_epoch=3, workers=workers, seed=1)
    windows, orders = {*range(0, 12, 4), *range(13, 33, 4), 34}, []
    for epoch in range(3):
        pairs = list(loader.epoch(epoch))
        assert all((inputs + 1).equal(targets) for inputs, targets in pairs)
        orders.append([int(inputs[0]) for batch, _ in pairs for inputs in batch])
    assert len({*orders[0][:6]}) == 6  # of two shares, if there are two workers
    if not workers:  # With two, one share has five windows and begins again before the other.
        assert all(set(order) == windows for order in orders)
        assert len({*map(tuple, orders)}) > 1  # The order of the files.
    assert [int(task.val[n][0][0]) for n in range(len(task.val))] == list(range(50, 78, 4))
    resumed = StreamLoader(task.train, 3, batches_per_epoch=3, workers=workers, seed=1)
    resumed.load_state_dict(loader.state_dict())
    assert not differing(list(resumed.epoch(3)), list(loader.epoch(3)))
    loader.close()
    resumed.close()


@pytest.mark.parametrize(("options", "text"), [
    ({"context": 8}, "c.bin: 8 tokens are too few for a window of 8; use dataset.context=7 or fewer"
     ", or leave out the file"),
    ({"token_bytes": 4}, "is not a multiple of the data-type size"),
    ({"batches_per_epoch": 0}, "dataset.batches_per_epoch=0: must be a whole number >= 1"),
])  # fmt: skip
def test_shards_that_cannot_be_read_are_refused(
    shards: Path, options: dict[str, Any], text: str
) -> None:
    given = {"context": 4, "vocab_size": 80} | options
    assert text in refused((ConfigError, DataError, ValueError), token_shards, str(shards), **given)
    (shards / "val.bin").unlink()
    assert refused(DataError, token_shards, str(shards), 4) == (
        f"dataset.root={shards}: has 3 other *.bin files and no val.bin; put token numbers into "
        "val.bin and at least one other"
    )


SIZES: dict[str, Any] = {"vocab_size": 11, "context": 8, "depth": 2, "heads": 2, "width": 16}


def made(**changed: Any) -> Any:
    torch.manual_seed(0)
    return GPT(**{**SIZES, **changed})


def test_its_numbers_are_those_of_gpt2() -> None:
    """Whose matrices are transposed, with the rows of q of all heads before those of k."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_layer=2, n_head=2, n_embd=16, use_cache=False
    )
    reference, own = transformers.GPT2LMHeadModel(config).eval(), made().eval()
    mine, given = own.state_dict(), reference.state_dict()
    turned = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    norms_last = (sorted(s, key=lambda n: "norm" in n or "ln_" in n) for s in (mine, given))
    for name, theirs in zip(*norms_last, strict=True):
        values = given[theirs].T if name.endswith(turned) else given[theirs]
        if "qkv" in name:
            values = values.unflatten(0, (3, 2, 8)).transpose(0, 1).flatten(0, 2)
        mine[name].copy_(values)
    tokens = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(1))
    # The same sums in another order: a few roundings of numbers of about 1.
    torch.testing.assert_close(own(tokens), reference(tokens).logits, rtol=0, atol=2e-6)


def test_a_logit_depends_on_no_later_token_of_windows_up_to_its_length() -> None:
    net, tokens = made().eval(), torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 10
    before, after = net(tokens), net(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])
    assert net(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 11)
    text = refused(DataError, net, torch.zeros(1, 9, dtype=torch.int64))
    assert text.startswith("model: 9 tokens, and model.context is 8; give it 8")


def test_the_initialisation_is_that_of_gpt2_and_the_head_is_the_embedding() -> None:
    net = made(width=256, depth=8)
    for name, weight in net.named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.full_like(weight, not name.endswith("bias"))), name
        else:
            std = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
            # Of n normal numbers the deviation is off by about std / sqrt(2 n): five times that.
            off = 5 * std / math.sqrt(2 * weight.numel())
            assert weight.std().item() == pytest.approx(std, abs=off), name
    assert net.head.weight is net.token_embed.weight
    with torch.device("meta"):
        small = GPT(vocab_size=50257, context=1024)
    assert sum(weight.numel() for weight in small.parameters()) == 124_439_808  # GPT-2 small
