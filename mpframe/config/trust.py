"""Which targets of a stored configuration may be built: those the user's own words or files name.

    conf/model/cnn.yaml              trusts mpframe.models.cnn, as a model
    a file of the user's own folder  trusts what it names, at the place where it names it
    model._target_=my_pkg.Net        on the command line trusts my_pkg.Net

A target below a section's own, as `model.config`, is trusted with the options beside it in the
file, and with no others: of a foreign class a stranger must choose no more than values.

Of the user's own folder only the groups count, and the file that `--config-name` names. A
checkpoint from elsewhere may lie in it, too, and must not trust itself.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mpframe.config.composition.source import Source
from mpframe.config.locations import CONF
from mpframe.config.schema import OPEN
from mpframe.errors import CheckpointError, ConfigError

_TARGET = "_target_"


class Trusted:
    """The targets that the files of a source name.

    Args:
        source: of the command line.

    Raises:
        ConfigError: a file of the user's is not YAML.
    """

    def __init__(self, source: Source) -> None:
        self._folders = [CONF, *source.own_folders]
        own = [n for folder in source.own_folders for n in _named_in(folder, source.name)]
        self._own = {(place, target) for place, target, _ in own}
        self._nodes: dict[tuple[str, str], list[set[str]]] = {}
        for place, target, options in [*own, *_named_in(CONF, "config")]:
            self._nodes.setdefault((place, target), []).append(options)

    def choices(self, group: str) -> dict[str, Any]:
        """The targets of a group by choice."""
        files = [
            file for folder in self._folders for file in sorted((folder / group).glob("*.yaml"))
        ]
        nodes = {file.stem: _read(file) for file in files}
        targets = {choice: node.get(_TARGET, "???") for choice, node in nodes.items()}
        return {choice: target for choice, target in targets.items() if target != "???"}

    def holds(self, place: str, node: Mapping[str, Any]) -> bool:
        """True if a file has this node's target and all of its options at this place."""
        target, options = str(node[_TARGET]), set(node)
        return any(options <= own for own in self._nodes.get((place, target), ()))

    def names(self, place: str, target: Any) -> bool:
        """True if a file names this target for this place, e.g. `model` or `metrics.top`."""
        shipped = place in OPEN and target in self.choices(place).values()
        return shipped or (place, str(target)) in self._own


def refuse_unnamed(path: Path, targets: Iterable[tuple[str, Any]]) -> None:
    """Refuse the targets that nobody but a stored configuration names, all in one line.

    Args:
        path: of the stored configuration.
        targets: what is to be added to trust one (`model._target_` or `+metrics.NAME._target_`),
            and the target.

    Raises:
        CheckpointError: there is one.
    """
    words = [f"{option}={target}" for option, target in targets]
    if not words:
        return
    several = len(words) > 1
    raise CheckpointError(
        f"{path}: {' and '.join(word.lstrip('+') for word in words)} "
        f"{'are' if several else 'is'} not mpframe's own, and a stored configuration runs nothing; "
        f"if you trust {'them' if several else 'it'}, add {shlex.join(words)}"
    )


def _named_in(folder: Path, primary: str) -> Iterator[tuple[str, str, set[str]]]:
    """What `_targets` gives, of the files of a folder that Hydra composes from."""
    places = {**{group: group for group in OPEN}, "experiment": ""}
    for group, place in places.items():
        for file in sorted((folder / group).rglob("*.yaml")):
            yield from _targets(_read(file), place)
    for file in folder.glob(f"{primary}.yaml"):
        yield from _targets(_read(file))


def _targets(node: Any, place: str = "") -> Iterator[tuple[str, str, set[str]]]:
    """(place, target, keys beside it) of each `_target_` in a node and below it."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == _TARGET:
                yield place, str(value), set(node)
            yield from _targets(value, f"{place}.{key}".lstrip("."))


def _read(file: Path) -> dict[Any, Any]:
    try:
        node = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not YAML; {str(error).splitlines()[0]}") from None
    return node if isinstance(node, dict) else {}
