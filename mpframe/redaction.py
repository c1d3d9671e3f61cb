"""What the environment tells a run stays out of what the run leaves behind.

A run's folder is meant to be passed on. Two kinds of values never stand in it: those of variables
that the configuration refers to by `${oc.env:NAME}`, wherever they are handed on to, and those of
variables whose name sounds like a secret, should a shell have put them on the command line.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from mpframe.check import flatten
from mpframe.durable import write_atomically
from mpframe.environment import HIDDEN, SECRET_NAME

_REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")
# Shorter values would blank out half a text and protect nothing.
_SHORTEST_REFERRED = 4
_SHORTEST_NAMED = 8


def secrets_of(texts: Iterable[object], environment: Mapping[str, str]) -> list[str]:
    """The values to keep out, the longest first.

    Args:
        texts: the configuration's values before they are resolved.
        environment: variables by name.
    """
    referred = {name for text in texts for name in _REFERENCE.findall(str(text))}
    found = {
        value
        for name, value in environment.items()
        if (name in referred and len(value) >= _SHORTEST_REFERRED)
        or (SECRET_NAME.search(name) and len(value) >= _SHORTEST_NAMED)
    }
    return sorted(found, key=len, reverse=True)


def hide(text: str, secrets: Sequence[str]) -> str:
    """`text` with `***` in the place of every secret."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def hide_in_files(files: Iterable[Path], secrets: Sequence[str]) -> None:
    """Rewrite the text files that hold a secret."""
    for path in files:
        text = path.read_text(encoding="utf-8")
        if hide(text, secrets) != text:
            write_atomically(path, hide(text, secrets))


def resolved_text(composed: DictConfig, secrets: Sequence[str]) -> str:
    """The resolved configuration as YAML; what comes from the environment stays a reference."""
    raw = flatten(cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False)))
    shown = OmegaConf.create(OmegaConf.to_container(composed, resolve=True))
    for path, value in raw.items():
        if "${oc.env" in str(value):
            OmegaConf.update(shown, path, str(value).replace("$", "\\$"), force_add=True)
    return hide(OmegaConf.to_yaml(shown), secrets)


def values_of(composed: DictConfig) -> list[Any]:
    """Every value of a configuration as it was written, unresolved."""
    tree = OmegaConf.to_container(composed, resolve=False)
    return list(flatten(cast(dict[str, Any], tree)).values())


@contextmanager
def hidden_from_logs(secrets: Sequence[str]) -> Iterator[None]:
    """Within the block the files that the root logger writes hold no secret."""
    files = [h for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]
    before = [handler.formatter for handler in files]
    for handler in files:
        handler.setFormatter(_Redacting(handler.formatter, secrets))
    try:
        yield
    finally:
        for handler, formatter in zip(files, before, strict=True):
            handler.setFormatter(formatter)


class _Redacting(logging.Formatter):
    """Formats as another does, and hides secrets in the text, tracebacks included."""

    def __init__(self, inner: logging.Formatter | None, secrets: Sequence[str]) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return hide(self._inner.format(record), self._secrets)
