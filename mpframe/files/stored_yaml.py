"""Reads a run's stored options as plain values, for resuming, evaluating and reporting.

They may come from anybody, and a few lines of YAML can fill the memory or take the parser hours.
So aliases, depth and length are limited before anything is built.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mpframe.core.errors import CheckpointError
from mpframe.files.plain_file import read_regular

_MOST_LETTERS = 2**16
_DEEPEST = 16


def read_stored(path: Path) -> dict[str, Any]:
    """Read the options in a file. Raises as `parse_stored` does, or OSError."""
    return parse_stored(read_regular(path, 4 * _MOST_LETTERS).decode(errors="replace"), path)


def parse_stored(text: str, path: Path) -> dict[str, Any]:
    """Parse a stored configuration into plain values, without calling or looking up anything.

    CheckpointError: it is not a configuration, or made to take hours or all memory.
    """
    try:
        hostile = _is_hostile(text)
        tree = None if hostile else yaml.safe_load(text)
    except Exception as error:  # YAMLError, and what building an odd date or number raises.
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: not a stored configuration ({reason:.200})") from None
    if hostile:
        raise CheckpointError(
            f"{path}: refused, a stored configuration has no aliases, at most {_MOST_LETTERS} "
            f"letters and at most {_DEEPEST} levels"
        )
    if not isinstance(tree, dict):
        raise CheckpointError(
            f"{path}: no stored options, which a run made in Python does not have; use a "
            "checkpoint of a YAML run"
        )
    return tree


def walk(node: Any, parent: str = "", *, lists: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, key, value) of each entry of nested mappings.

    With `lists` also each item of a list, under the list's path and an empty key. `parent` is what
    every path begins with, e.g. `model.`.
    """
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{parent}{key}", key, value
        yield from walk(value, f"{parent}{key}.", lists=lists)
    for item in node if lists and isinstance(node, list) else ():
        yield parent.removesuffix("."), "", item
        yield from walk(item, parent, lists=lists)


def _is_hostile(text: str) -> bool:
    """Return whether the text would take the parser hours, or fill the memory."""
    if len(text) > _MOST_LETTERS:
        return True
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        starts = isinstance(event, yaml.CollectionStartEvent)
        depth += starts - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
            return True
    return False
