"""How the project's text reads: patterns that nobody speaks, per 10,000 words.

    python tests/docs/prose.py FILE...       each place in these files, to be rewritten

The limits are near the rates of well-read libraries, where most of these patterns do not occur at
all. tests/docs/test_docs.py holds them.
"""

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

_START = r"(?:^|(?<=[.!?:] ))"  # of a paragraph or a sentence
PATTERNS: dict[str, tuple[str, float]] = {
    # name: (regular expression, most places per 10,000 words)
    "semicolon": (r";", 40),
    "that/those of": (r"\b(?:that|those) of\b", 2),
    "alone": (r"\balone\b", 1),
    ", too": (r", too\b", 1),
    "What ...": (_START + r"What\b[^?]*?(?:[.!:]|$)", 2),
    "Let ...": (_START + r"Let\b", 1),
    "Of ...": (_START + r"Of\b", 1),
    "but for": (r"\bbut for\b", 1),
    "likewise": (r"\blikewise\b", 1),
    "of yours": (r"\bof (?:yours|users)\b|\bof (?:its|their|your) own\b", 2),
}
_CODE = re.compile(r"^ *```.*?^ *```|^ *\|.*?$", re.M | re.S)  # blocks and tables
_ITEM = r" *(?:[-*] |\d+\. |\w+(?:, \w+)*: )"  # of a list
_BREAK = re.compile(rf"\n\s*\n|\n(?={_ITEM})")


def paragraphs(path: Path) -> Iterator[str]:
    """Each paragraph of a page's prose, or of a module's docstrings and comments."""
    source = path.read_text()
    for block in _of_code(source) if path.suffix == ".py" else [source]:
        for text in _BREAK.split(_CODE.sub("\n", block)):
            if re.match(_ITEM, text) or not text.startswith("    "):
                yield " ".join(re.sub(r"`+[^`]*`+|https?://\S+|\]\([^)]*\)", "x", text).split())


def _of_code(source: str) -> Iterator[str]:
    """Comments on consecutive lines are one block."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield inspect.cleandoc(text)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = enumerate(token for token in tokens if token.type == tokenize.COMMENT)
    for _, block in groupby(comments, lambda own: own[1].start[0] - own[0]):
        yield "\n".join(token.string.lstrip("#: ") for _, token in block)


def beyond_limits(paths: list[Path]) -> dict[str, float]:
    """The patterns that these files hold too often, with their rates."""
    texts = [text for path in paths for text in paragraphs(path)]
    words = sum(len(text.split()) for text in texts)
    rates = {}
    for name, (pattern, _) in PATTERNS.items():
        rates[name] = sum(len(re.findall(pattern, text)) for text in texts) * 10_000 / words
    return {name: rate for name, rate in rates.items() if rate > PATTERNS[name][1]}


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for text in paragraphs(path):
            for name, (pattern, _) in PATTERNS.items():
                for found in re.findall(f".{{0,40}}(?:{pattern}).{{0,40}}", text):
                    print(f"{path}: {name}: ...{found}...")
