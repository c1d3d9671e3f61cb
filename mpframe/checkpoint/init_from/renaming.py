"""Gives saved weights the model's names, by patterns."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set

from torch import Tensor

from mpframe.errors import CheckpointError, ConfigError, nearest

_WRAPPERS = ("module.", "_orig_mod.")  # Of DistributedDataParallel, and of torch.compile.


def renamed(
    saved: Mapping[str, Tensor], names: Mapping[str, str], own: Set[str], source: str
) -> dict[str, Tensor]:
    """Saved weights under new names.

    A wrapper's prefix that all names have (`module.`) is taken off first.

    Args:
        saved: by name.
        names: pattern -> pattern, as in `backbone.*` -> `encoder.*`. Each `*` on the right stands
            for what the one in its place on the left matched. The first that matches a name counts.
        own: the model's names.
        source: the value of `init_from`, for messages.

    Raises:
        ConfigError: a pattern matches no name, or has fewer `*` than its replacement.
        CheckpointError: two weights would get one name.
    """
    saved = _unwrapped(saved, own)
    rules = {old: _Rule(old, new) for old, new in names.items()}
    used, result = set(), {}
    for name, tensor in saved.items():
        matching = (old for old, rule in rules.items() if rule.matches(name))
        first = next(matching, None)
        used.add(first)
        to = name if first is None else rules[first].applied(name)
        if to in result:
            raise CheckpointError(
                f"init_from={source}: two of its weights would be {to} by init_from_names; "
                "let each pattern give names of its own"
            )
        result[to] = tensor
    for old in rules:
        if old not in used:
            raise ConfigError(
                f"init_from_names={old}: matches no weight of {source} that an earlier pattern "
                f"leaves; {hint(old, saved)}"
            )
    return result


def hint(pattern: str, names: Iterable[str]) -> str:
    """The names that are nearest to a pattern, or some of all, as a clause."""
    names = sorted(names)
    return nearest(pattern, names) or "there are " + few(names)


def few(names: Sequence[str]) -> str:
    """The first five of some names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class _Rule:
    """One pattern and what it makes of a name that it matches."""

    def __init__(self, old: str, new: str) -> None:
        if new.count("*") > old.count("*"):
            raise ConfigError(
                f"init_from_names={{{old}: {new}}}: each * on the right stands for one on the "
                "left, which has fewer"
            )
        self._pattern = re.compile("(.*)".join(map(re.escape, old.split("*"))))
        self._new = new

    def matches(self, name: str) -> bool:
        return self._pattern.fullmatch(name) is not None

    def applied(self, name: str) -> str:
        match = self._pattern.fullmatch(name)
        parts = iter(match.groups() if match else ())
        return re.sub(r"\*", lambda _: next(parts), self._new)


def _unwrapped(saved: Mapping[str, Tensor], own: Set[str]) -> Mapping[str, Tensor]:
    for prefix in _WRAPPERS:
        wrapped = all(name.startswith(prefix) for name in saved)
        if wrapped and not any(name.startswith(prefix) for name in own):
            return _unwrapped({n.removeprefix(prefix): t for n, t in saved.items()}, own)
    return saved
