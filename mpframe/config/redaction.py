"""Keeps the secrets of the environment out of what a run writes and prints.

A run's folder is meant to be passed on. Two kinds of environment variables are never shown in it:
variables that the configuration refers to by `${oc.env:NAME}`, and variables whose name sounds like
a secret, because a shell may have put them on the command line. A folder's path is shown unless its
variable's name sounds like a secret.

Values are redacted before they are written, as YAML may quote, escape or fold a secret.
"""

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from mpframe.files.stored_yaml import walk
from mpframe.files.text import printable

SECRET_NAME = re.compile(
    r"token(?!s|iz)|secret|passw|api_?key|access_?key|private_?key|credential|auth(?!or)",
    re.IGNORECASE,
)
HIDDEN = "***"
_REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")
# Shorter values would blank out half a text and protect nothing.
_SHORTEST_REFERRED = 4
_SHORTEST_NAMED = 8
_referred: set[str] = set()  # Variables that any configuration of this process has referred to.
_ESCAPED = {"\n": "(?:\n|n)", "\t": "(?:\t|t)", "\r": "(?:\r|r)"}


def secrets_of(texts: Iterable[object], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the values of variables to keep out, the longest first."""
    _referred.update(name for text in texts for name in _REFERENCE.findall(str(text)))
    found = {
        value
        for name, value in environment.items()
        # The path of a folder, such as a cluster's scratch space, is no secret.
        if (
            name in _referred
            and len(value) >= _SHORTEST_REFERRED
            and not (os.path.isabs(value) and os.path.isdir(value))
        )
        or (SECRET_NAME.search(name) and len(value) >= _SHORTEST_NAMED)
    }
    return sorted(found, key=len, reverse=True)


def hide(text: str, secrets: Sequence[str]) -> str:
    """Replace every secret in `text` by `***`, also if it is escaped."""
    for secret in secrets:
        text = _pattern(secret).sub(HIDDEN, text)
    return text


def redact(value: Any, secrets: Sequence[str]) -> Any:
    """Return a copy of nested values with `***` for every secret in a key or a value.

    An interpolation or a number that contains a secret is hidden as a whole.
    """
    if isinstance(value, Mapping):
        return {redact(key, secrets): redact(held, secrets) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [redact(held, secrets) for held in value]
    if value is None or isinstance(value, bool):
        return value
    shown = hide(str(value), secrets)
    if shown == str(value):
        return value
    return HIDDEN if "${" in shown or not isinstance(value, str) else shown


def as_yaml(config: Any, secrets: Sequence[str], resolve: bool = False) -> str:
    """Return a configuration as YAML without its secrets."""
    tree: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    if resolve:
        resolved: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
        tree = _but_references(tree, resolved)
    return OmegaConf.to_yaml(OmegaConf.create(redact(tree, secrets)))


def values_of(config: Any) -> list[Any]:
    """Return every value of a configuration as it was written, unresolved."""
    tree = OmegaConf.to_container(config, resolve=False)
    return [held for _, _, held in walk(tree, lists=True) if not isinstance(held, dict | list)]


@contextmanager
def hide_from_logs(secrets: Sequence[str]) -> Iterator[None]:
    """Context manager in which the root logger writes no secret and no control character."""
    before = {handler: handler.formatter for handler in logging.getLogger().handlers}
    for handler, formatter in before.items():
        handler.setFormatter(Redacting(formatter, secrets))
    try:
        yield
    finally:
        for handler, formatter in before.items():
            handler.setFormatter(formatter)


class Redacting(logging.Formatter):
    """A formatter that hides secrets in what another one writes, tracebacks included."""

    def __init__(self, inner: logging.Formatter | None, secrets: Sequence[str]) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return printable(hide(self._inner.format(record), self._secrets), keep="\n\t")


def formatter_of_hydra() -> logging.Formatter:
    """Make the formatter of Hydra's lines, which repeat the options of a sweep's jobs."""
    return Redacting(logging.Formatter("[%(asctime)s][HYDRA] %(message)s"), secrets_of(sys.argv))


@lru_cache
def _pattern(secret: str) -> re.Pattern[str]:
    """Match a secret also if quoting or `repr` has put backslashes into it."""
    letters = (_ESCAPED.get(letter, re.escape(letter)) for letter in secret)
    return re.compile("".join(rf"\\{{0,3}}{letter}" for letter in letters))


def _but_references(raw: Any, resolved: Any) -> Any:
    """Return `resolved`, with each reference to the environment as it is in `raw`."""
    if isinstance(raw, dict) and isinstance(resolved, dict):
        return {key: _but_references(raw.get(key), value) for key, value in resolved.items()}
    if isinstance(raw, list) and isinstance(resolved, list):
        return [_but_references(*pair) for pair in zip(raw, resolved, strict=True)]
    if isinstance(raw, str) and "${oc.env" in raw:
        return raw.replace("$", "\\$")
    return resolved
