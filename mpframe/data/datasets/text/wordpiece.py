"""BERT's tokenizer, with a vocabulary that is trained on the task's own texts or read from a file.

Nothing is fetched. A word becomes the longest pieces that the vocabulary has (WordPiece: Wu et al.
2016); a piece that goes on within a word begins with ##. The vocabulary's file has one piece a
line, in the order of their numbers, as BERT's vocab.txt.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpframe.data.facts import require_whole
from mpframe.errors import ConfigError, DataError
from mpframe.files import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MOST_BYTES = 2**26  # of a vocabulary's file


class WordPiece:
    """Turns texts into numbers of pieces, in lower case and without accents.

    Args:
        pieces: the vocabulary, in the order of the numbers.
        max_tokens: more are cut off; [CLS] and [SEP] count.
    """

    def __init__(self, pieces: Sequence[str], max_tokens: int) -> None:
        from tokenizers import BertWordPieceTokenizer

        _one_thread()
        self.pieces, self.max_tokens = list(pieces), max_tokens
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        self._tokenizer = BertWordPieceTokenizer(vocabulary)
        self._tokenizer.enable_truncation(max_tokens)

    def encode(self, text: str, then: str | None = None) -> Any:
        """The encoding of [CLS] text [SEP], and of `then` [SEP] behind it.

        Returns:
            An object with `ids`, `type_ids`, `sequence_ids` and `offsets` (of characters), lists
            of one length.
        """
        return self._tokenizer.encode(text, then)

    def described(self) -> dict[str, Any]:
        """What a stranger must do to a text, as JSON values, for `Task.preprocessing`."""
        return {
            "tokenizer": "WordPiece",
            "lowercase": True,
            "strip_accents": True,
            "max_tokens": self.max_tokens,
            "vocab": "\n".join(self.pieces),
        }


def word_piece(
    texts: Sequence[str], vocab: str | None, vocab_size: int, max_tokens: int
) -> WordPiece:
    """A tokenizer with the vocabulary of a file, or one trained on `texts`.

    Args:
        texts: to train it on; the same texts give the same vocabulary.
        vocab: the file; None: train one.
        vocab_size: most pieces; the model's embedding has as many rows.
        max_tokens: of a text, >= 3.

    Raises:
        ConfigError: an option is out of its range, or tokenizers is not installed.
        DataError: the file cannot be read, or is no vocabulary.
    """
    require_whole("dataset.vocab_size", vocab_size, least=len(_SPECIAL) + 1)
    require_whole("dataset.max_tokens", max_tokens, least=3)
    require_tokenizers()
    if vocab is None:
        return WordPiece(_trained(texts, vocab_size), max_tokens)
    pieces = _read(Path(vocab))
    if len(pieces) > vocab_size:
        raise ConfigError(
            f"dataset.vocab_size={vocab_size}: {vocab} has {len(pieces)} pieces; set it to "
            f"{len(pieces)} or more"
        )
    return WordPiece(pieces, max_tokens)


def require_tokenizers() -> None:
    """Refuse to work without the package that tokenizes.

    Raises:
        ConfigError: it is missing; the message names the extra.
    """
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise ConfigError(
            "dataset: tokenizers is not installed; get it with pip install mpframe[text]"
        ) from None


def _trained(texts: Sequence[str], vocab_size: int) -> list[str]:
    """Pieces found by joining the most frequent pairs, as long as a pair is found twice."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    _one_thread()
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # Single characters are given, because tokenizers numbers those within a word by chance.
    characters = _characters(texts, tokenizer)
    given = [*_SPECIAL, *characters, *(f"##{character}" for character in characters)]
    if len(given) > vocab_size:
        raise ConfigError(
            f"dataset.vocab_size={vocab_size}: the texts have {len(characters)} different "
            f"characters, which need {len(given)} pieces; use more, e.g. {2 * len(given)}"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False, special_tokens=given
    )
    tokenizer.train_from_iterator(texts, trainer)
    numbers = tokenizer.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


def _characters(texts: Sequence[str], tokenizer: "Tokenizer") -> list[str]:
    normalizer = tokenizer.normalizer
    found = set().union(*(normalizer.normalize_str(text) for text in texts))
    return sorted(character for character in found if not character.isspace())


def _read(path: Path) -> list[str]:
    try:
        pieces = read_regular(path, _MOST_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"dataset.vocab={path}: cannot be read ({getattr(error, 'strerror', 'not UTF-8')}); "
            "give a vocabulary with one piece a line, or null to train one"
        ) from None
    missing = next((piece for piece in _SPECIAL if piece not in pieces), None)
    if missing or len(set(pieces)) != len(pieces):
        what = f"has no {missing}" if missing else "has a piece twice"
        raise DataError(
            f"dataset.vocab={path}: {what}; give BERT's vocab.txt, or null to train one"
        )
    return pieces


def _one_thread() -> None:
    """Without its own threads, tokenizers does not warn when a loader's worker is forked."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
