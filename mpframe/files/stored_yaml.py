"""Reads a run's stored options as plain values, for resuming, evaluating and reporting alike.

They may come from anybody, and a few lines of YAML can unfold to more than the memory holds or take
the parser hours: aliases, depth and length are bounded before anything is built.
"""

from pathlib import Path
from typing import Any

import yaml

from mpframe.errors import CheckpointError
from mpframe.files.plain_file import read_regular

_MOST_LETTERS = 2**16
_DEEPEST = 16


def read_stored(path: Path) -> dict[str, Any]:
    """The options a file holds; see `parsed`.

    Raises:
        CheckpointError: as of `parsed`.
        OSError: it cannot be read, is larger than a configuration, or no regular file.
    """
    return parsed(read_regular(path, 4 * _MOST_LETTERS).decode(errors="replace"), path)


def parsed(text: str, path: Path) -> dict[str, Any]:
    """A stored configuration as plain values; nothing in it is called or looked up.

    Args:
        text: YAML.
        path: where it came from, for messages.

    Raises:
        CheckpointError: it is not a configuration, or contrived to take hours or all memory.
    """
    try:
        contrived = _is_contrived(text)
        tree = None if contrived else yaml.safe_load(text)
    except Exception as error:  # Beside YAMLError what building an odd date or number raises.
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: not a stored configuration ({reason:.200})") from None
    if contrived:
        raise CheckpointError(
            f"{path}: refused, a stored configuration has no aliases, at most {_MOST_LETTERS} "
            f"letters and at most {_DEEPEST} levels"
        )
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: not a stored configuration; use a checkpoint of a run")
    return tree


def _is_contrived(text: str) -> bool:
    """Whether it would take the parser hours, or unfold to more than the memory holds."""
    if len(text) > _MOST_LETTERS:
        return True
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        starts = isinstance(event, yaml.CollectionStartEvent)
        depth += starts - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
            return True
    return False
