"""The tokenizer: a vocabulary that does not depend on chance, BERT's own rules, and refusals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from mpframe.core.errors import ConfigError, DataError

pytest.importorskip("tokenizers", reason="needs pip install mpframe[text]")

from mpframe.workloads.text.classification import word_piece

WORDS = "a naïve fox, boxes of foxes and Boxers; 3 taxis! wax, mixes, fixed vexed taxes axes exits"
TEXTS = [f"{WORDS} {WORDS[number:]} {WORDS[::-1]}" for number in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def vocabulary(path: Path, *pieces: str) -> str:
    path.write_text("\n".join([*SPECIAL, *pieces]) + "\n")
    return str(path)


def test_the_same_texts_give_the_same_pieces_in_every_process() -> None:
    code = (
        "from test_data_wordpiece import TEXTS; "
        "from mpframe.workloads.text.classification import word_piece; "
        "print(word_piece(TEXTS, None, 200, 16).pieces)"
    )
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    own = str(word_piece(TEXTS, None, 200, 16).pieces)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == own


def test_characters_come_first_and_frequent_pieces_after() -> None:
    pieces = word_piece(["abab ab b"] * 2, None, 100, 8).pieces
    assert pieces == [*SPECIAL, "a", "b", "##a", "##b", "ab", "##ab", "abab"]


def test_a_vocabulary_has_at_most_its_size() -> None:
    few, more = (len(word_piece(TEXTS, None, size, 8).pieces) for size in (100, 110))
    assert few <= 100 < more <= 110


def test_a_text_as_bert_reads_it(tmp_path: Path) -> None:
    vocab = vocabulary(tmp_path / "vocab.txt", "fox", "##es", "naive", "!", "un")
    tokenizer = word_piece([], vocab, 10, 7)
    encoding = tokenizer.encode("Naïve foxes! unknown")
    assert encoding.ids == [2, 7, 5, 6, 8, 1, 3]
    assert encoding.offsets[1:4] == [(0, 5), (6, 9), (9, 11)]
    assert word_piece([], vocab, 10, 4).encode("fox fox fox").ids == [2, 5, 5, 3]
    pair = tokenizer.encode("fox", "un !")
    assert (pair.ids, pair.type_ids) == ([2, 5, 3, 9, 8, 3], [0, 0, 0, 1, 1, 1])


def test_its_description_has_the_whole_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    described = word_piece([], vocabulary(path, "fox"), 6, 7).described()
    assert described["vocab"] == path.read_text().rstrip("\n")
    assert described["max_tokens"] == 7


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    vocab = vocabulary(tmp_path / "vocab.txt", "fox", "box")
    with pytest.raises(ConfigError, match=r"^dataset.vocab_size=6: .* has 7 pieces; set it to 7"):
        word_piece([], vocab, 6, 8)
    with pytest.raises(ConfigError, match=r"^dataset.vocab_size=8: the texts have 2 different .*9"):
        word_piece(["ab"], None, 8, 8)
    with pytest.raises(ConfigError, match=r"^dataset.max_tokens=2: must be a whole number >= 3"):
        word_piece(["ab"], None, 80, 2)


def test_files_that_are_no_vocabulary_are_refused(tmp_path: Path) -> None:
    twice, lacking, binary = (tmp_path / name for name in ("twice", "lacking", "binary"))
    vocabulary(twice, "a", "a")
    lacking.write_text("[PAD]\n[UNK]\nfox\n")
    binary.write_bytes(b"\xff\xfe")
    cases = {
        twice: "has a piece twice; give BERT's vocab.txt, or null to train one",
        lacking: r"has no \[CLS\]; give BERT's",
        binary: r"cannot be read \(not UTF-8\); give a vocabulary with one piece a line",
        tmp_path / "none": r"cannot be read \(No such file or directory\)",
    }
    for path, message in cases.items():
        with pytest.raises(DataError, match=rf"^dataset.vocab={path}: {message}"):
            word_piece([], str(path), 7, 8)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError) as error:
        word_piece(TEXTS, None, 200, 16)
    assert str(error.value) == (
        "dataset: tokenizers is not installed; get it with pip install mpframe[text]"
    )
