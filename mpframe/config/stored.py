"""A run's stored configuration, read back as data.

A checkpoint may come from anybody, and a configuration is code: a `_target_` names what is called.
So nothing that its `config.yaml` names is called or looked up, with one exception: a class or
function that a file of the shipped `conf/`, or of a folder that the user names, has at the same
place. Any other must be named again on the command line:

    stored                          command line                    built
    model: mpframe...images.cnn     -                               the shipped cnn, stored options
    model: my_pkg.Net               -                               refused, naming my_pkg.Net
    model: my_pkg.Net               model._target_=my_pkg.Net       my_pkg.Net, stored options
    model: my_pkg.Net               --config-dir=conf               the same, if a file there has it
    model: my_pkg.Net               model=cnn model.width=16        cnn as the command line says

A nested target is built if such a file has it at that place, with all options stored beside it. Any
other, Hydra's other special keys, interpolations and YAML aliases are refused.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from mpframe.config import CONF
from mpframe.config.command_line import compose_named
from mpframe.config.composing import check_config, without_hydra
from mpframe.config.overrides import PRIMARY, Source, take_source
from mpframe.config.schema import ONE_TARGET, OPEN, Config
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.files.stored_yaml import parse_stored, walk

_TARGET = "_target_"


class Trusted:
    """The targets that the shipped files and a user's files name at their places."""

    def __init__(self, source: Source) -> None:
        self._folders = [CONF, *source.own_folders]
        self._options: dict[tuple[str, str], list[set[str]]] = {}
        for folder in self._folders:
            primary = PRIMARY if folder == CONF else source.name
            for place, node in _find_targeted(folder, primary):
                self._options.setdefault((place, str(node[_TARGET])), []).append(set(node))

    def choices(self, group: str) -> dict[str, Any]:
        """Return the targets of a group by choice."""
        files = [f for folder in self._folders for f in sorted((folder / group).glob("*.yaml"))]
        targets = {file.stem: _read(file).get(_TARGET, "???") for file in files}
        return {choice: target for choice, target in targets.items() if target != "???"}

    def names(self, place: str, target: Any) -> bool:
        """Return whether a file has this target at this place, e.g. `model` or `metrics.top`."""
        return (place, str(target)) in self._options

    def holds(self, place: str, node: Mapping[str, Any]) -> bool:
        """Return whether a file has this node's target and all of its options at this place."""
        known = self._options.get((place, str(node[_TARGET])), ())
        return any(set(node) <= options for options in known)


def _find_targeted(folder: Path, primary: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, node) of each node with a `_target_` that Hydra finds in a folder."""
    trees = [(group, file) for group in OPEN for file in sorted((folder / group).rglob("*.yaml"))]
    roots = [*sorted((folder / "experiment").rglob("*.yaml")), *folder.glob(f"{primary}.yaml")]
    for group, file in [*trees, *(("", root) for root in roots)]:
        tree = _read(file)
        nodes = [(group, tree), *_nodes(tree, f"{group}." if group else "")]
        yield from ((place, node) for place, node in nodes if _TARGET in node)


def _nodes(tree: Any, parent: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, node) of the mappings below a tree, except those in lists."""
    return ((place, node) for place, _, node in walk(tree, parent) if isinstance(node, dict))


def _read(file: Path) -> dict[Any, Any]:
    try:
        node = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not YAML; {str(error).splitlines()[0]}") from None
    return node if isinstance(node, dict) else {}


_DATA = {"dataset", "objective", "metrics"}
_TARGETS = {f"{group}._target_" for group in OPEN}
_UNUSED = {
    *("optimizer", "scheduler", "loss_scaling", "callbacks"),
    *("resume", "init_from", "init_from_names", "init_from_except", "size", "numerics"),
}
# A complete configuration holds these, and an evaluation does not use them.
_OPTIMIZER = {"_target_": "torch.optim.SGD", "lr": 1.0}
_SCALING = {"_target_": "mpframe.core.loss_scaling.none"}


def config_of(text: str, path: Path, given: list[str], data: bool = True) -> Config:
    """Return the configuration to evaluate a run with.

    text: the stored configuration, from the file `path`. given: the words of the command line,
    which change it. data: if False, the dataset, the objective and the metrics are left out.
    """
    source, words = take_source(given)
    read, trusted = parse_stored(text, path), Trusted(source)
    stored = {k: v for k, v in read.items() if k not in _UNUSED}
    joint = _parts(read.get("optimizer"))
    overrides, composed = compose_named([*_choices_of(stored, words, trusted), *given])
    overrides = [o for o in overrides if o.key_or_group != "hydra.searchpath"]
    _refuse_unfit(overrides)
    fresh: Any = OmegaConf.to_container(without_hydra(composed), resolve=False)
    groups = {o.key_or_group for o in overrides if (CONF / o.key_or_group).is_dir()}
    taken = [o.key_or_group for o in overrides if o.key_or_group not in groups]
    named = groups & _words(words)
    for group in named:
        if group not in OPEN or _target(stored.get(group)) != _target(fresh.get(group)):
            stored[group] = {}
    for key in taken:
        _drop(stored, key)
    built = {key: section for key, section in stored.items() if data or key not in _DATA}
    _refuse_unnamed(path, built, named, trusted)
    nested = [(place, node) for place, node in _nodes(stored) if "." in place and _TARGET in node]
    allowed = {f"{place}._target_" for place, node in nested if trusted.holds(place, node)}
    _refuse_code(path, {**stored, "optimizer": joint}, allowed)
    for key in (*named, *taken):
        _put(stored, key, fresh)
    parts = {"parts": {name: {**part, **_OPTIMIZER} for name, part in joint.items()}}
    optimizer = parts if joint else _OPTIMIZER
    whole = {**stored, "optimizer": optimizer, "loss_scaling": _SCALING}
    config = check_config(OmegaConf.create(whole))
    if "dataset.workers" not in taken:  # As many as the machine of the run had cores for.
        config.data.workers = min(config.data.workers, os.cpu_count() or 1)
    if data:
        return config
    trainer = replace(config.trainer, monitor=None)  # Nothing names the data's code any more.
    return replace(config, dataset={}, objective=None, metrics={}, trainer=trainer)


def _parts(optimizer: Any) -> dict[Any, Any]:
    """Return the names of several optimizers and which weights each takes."""
    parts = optimizer.get("parts") if isinstance(optimizer, dict) else None
    kept = ("parameters", "without", "ndim")
    return {
        name: {key: part[key] for key in kept if key in part}
        for name, part in (parts.items() if isinstance(parts, dict) else ())
        if isinstance(part, dict)
    }


def _choices_of(stored: Mapping[str, Any], given: list[str], trusted: Trusted) -> list[str]:
    """Return `GROUP=CHOICE` for each stored section, so that words may name its options."""
    choices = []
    for group in ONE_TARGET - _UNUSED - _words(given):
        if stored.get(group):
            target, known = _target(stored[group]), trusted.choices(group)
            choice = next((choice for choice in known if known[choice] == target), "own")
            choices.append(f"{group}={choice}")
    return choices


def _words(given: list[str]) -> set[str]:
    """Return the groups that the command line chooses from, `group._target_=...` included."""
    keys = {word.partition("=")[0].lstrip("+~") for word in given}
    return {key.removesuffix("._target_") for key in keys}


def _target(node: Any) -> Any:
    return node.get(_TARGET) if isinstance(node, dict) else None


def _refuse_unfit(overrides: list[Override]) -> None:
    for override in overrides:
        key = override.key_or_group
        if key == "experiment" or key.startswith("hydra") or key.partition(".")[0] in _UNUSED:
            raise ConfigError(
                f"{override.input_line}: has no part in an evaluation, which takes the run's own "
                "options; give those of model, dataset, dtype, ops, trainer, device or seed"
            )


def _refuse_unnamed(
    path: Path, stored: Mapping[str, Any], named: set[str], trusted: Trusted
) -> None:
    """Refuse the targets that nobody but the stored configuration names, all in one line."""
    groups = sorted(ONE_TARGET - _UNUSED - named)
    nodes = {group: stored[group] for group in groups if stored.get(group)}
    metrics = stored.get("metrics")  # The group holds what a user added to the dataset's.
    for name, node in metrics.items() if isinstance(metrics, dict) else ():
        if _target(node) is not None:
            nodes[f"+metrics.{name}"] = node
    words = [
        f"{place}.{_TARGET}={_target(node)}"
        for place, node in nodes.items()
        if not trusted.names(place.lstrip("+"), _target(node))
    ]
    if words:
        raise CheckpointError(
            f"{path}: {' and '.join(word.lstrip('+') for word in words)}: not mpframe's own, and a "
            "stored configuration runs nothing; give the --config-dir whose files name it, or if "
            f"you trust it, add {shlex.join(words)}"
        )


def _refuse_code(path: Path, stored: Mapping[str, Any], nested: set[str]) -> None:
    """Refuse everything that could run, except the targets that have been found trusted."""
    metrics = {f"metrics.{name}._target_" for name in stored.get("metrics") or ()}
    targets = _TARGETS | metrics | nested
    for place, key, value in walk(stored, lists=True):
        if not isinstance(key, str) or (key.startswith("_") and place not in targets):
            raise CheckpointError(f"{path}: {place} is refused, a stored configuration is data")
        if not isinstance(value, str | int | float | dict | list | None):
            raise CheckpointError(f"{path}: {place} is a {type(value).__name__}; refused")
        if isinstance(value, str) and "${" in value:
            raise CheckpointError(
                f"{path}: {place} refers to what is not in the file; give it as {place}=VALUE"
            )


def _drop(tree: Any, key: str) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.get(parent) if isinstance(tree, dict) else None
    if isinstance(tree, dict):
        tree.pop(last, None)


def _put(tree: dict[str, Any], key: str, source: dict[str, Any]) -> None:
    """Set the value of `source` at a dotted path. A mapping is filled up, not replaced."""
    *parents, last = key.split(".")
    for parent in parents:
        tree, source = tree.setdefault(parent, {}), source.get(parent, {})
    if last not in source:
        return  # Deleted by the command line.
    both = isinstance(tree.get(last), dict) and isinstance(source[last], dict)
    tree[last] = {**source[last], **tree[last]} if both else source[last]
