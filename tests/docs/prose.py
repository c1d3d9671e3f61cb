"""How the project's text reads: patterns that nobody speaks, per 10,000 words.

    python tests/docs/prose.py FILE...       each place in these files, to be rewritten

The limits are near the rates of well-read libraries, where most of these patterns do not occur at
all. tests/docs/test_docs.py holds them.
"""

import ast
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


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Each paragraph of prose with the number of its first line."""
    source = path.read_text()
    for first, block in _of_code(source) if path.suffix == ".py" else [(1, source)]:
        yield from _split(first, block)


def _of_code(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module; comments on consecutive lines are one block."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = enumerate(token for token in tokens if token.type == tokenize.COMMENT)
    for _, block in groupby(comments, lambda own: own[1].start[0] - own[0]):
        lines = [token for _, token in block]
        yield lines[0].start[0], "\n".join(token.string.lstrip("#: ") for token in lines)


def _split(first: int, block: str) -> Iterator[tuple[int, str]]:
    fenced, start = False, first
    words: list[str] = []
    margin = min((len(x) - len(x.lstrip()) for x in block.split("\n")[1:] if x.strip()), default=0)
    for number, line in enumerate([*block.split("\n"), ""], first):
        fenced ^= line.lstrip().startswith("```")
        indent = len(line) - len(line.lstrip())
        listed = re.match(r"\s*(?:[-*] |\d+\. |\w+(?:, \w+)*: )", line)
        skipped = fenced or line.lstrip().startswith(("|", "```", "    ")) or not line.strip()
        code = indent >= margin + 4 and not words and not listed
        if (skipped or code or listed) and words:
            yield start, " ".join(words)
            words = []
        if not skipped and not code:
            start = start if words else number
            words.append(re.sub(r"`+[^`]*`+|https?://\S+|\]\([^)]*\)", "x", line.strip()))


def beyond_limits(paths: list[Path]) -> dict[str, float]:
    """The patterns that these files hold too often, with their rates."""
    texts = [text for path in paths for _, text in paragraphs(path)]
    words = sum(len(text.split()) for text in texts)
    rates = {}
    for name, (pattern, _) in PATTERNS.items():
        rates[name] = sum(len(re.findall(pattern, text)) for text in texts) * 10_000 / words
    return {name: rate for name, rate in rates.items() if rate > PATTERNS[name][1]}


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for line, text in paragraphs(path):
            for name, (pattern, _) in PATTERNS.items():
                for found in re.findall(f".{{0,40}}(?:{pattern}).{{0,40}}", text):
                    print(f"{path}:{line}: {name}: ...{found}...")
