"""Patterns that nobody speaks, with the most places per 10,000 words.

The limits are near the rates of well-read libraries, where most of these do not occur at all.
"""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

_START = r"(?:^|(?<=[.!?:] ))"  # of a paragraph or a sentence
PATTERNS: list[tuple[str, float]] = [
    (r";", 40),
    (r"\b(?:that|those) of\b", 2),
    (r"\balone\b", 1),
    (r", too\b", 1),
    (_START + r"What\b[^?]*?(?:[.!:]|$)", 2),
    (_START + r"(?:Let|Of)\b", 1),
    (r"\bbut for\b", 1),
    (r"\blikewise\b", 1),
    (r"\bof (?:yours|users)\b|\bof (?:its|their|your) own\b", 2),
]
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
