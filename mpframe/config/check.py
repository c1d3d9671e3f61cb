"""Compares a composed configuration with the schema, and returns a typed `Config`.

Interpolations are resolved first, so a missing value or a dangling reference is found before the
first step. Then unknown keys, wrong types and values out of range are refused, each with the
option's path, the value and what is allowed.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpframe.config import planned, schema  # noqa: F401 - planned resolves ${plan:...}, ${size:...}
from mpframe.config.redaction import values_of
from mpframe.config.schema import Config, JointOptions, Part
from mpframe.core.errors import ConfigError, nearest
from mpframe.core.ranges import Range
from mpframe.files.stored_yaml import walk

T = TypeVar("T")
_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    list: "a list",
    dict: "a mapping",
}


def check(composed: DictConfig) -> Config:
    """Return the typed configuration of a composed one, or raise a ConfigError."""
    tree = _resolve(composed)
    _refuse_unfit_size(composed)
    _refuse_unknown("", tree, {*schema.SECTIONS, *schema.OPEN, *schema.RUN_OPTIONS, "size"})
    run, _ = _take(schema.RunOptions, "", tree)
    _check_run(run)
    optimizer = _section(tree, "optimizer")
    joint = _joint(optimizer) if "parts" in optimizer else None
    _take(schema.OptimizerOptions, "optimizer", optimizer)
    data, arguments = _take(schema.DatasetOptions, "dataset", _open(tree, "dataset"))
    trainer = _load(schema.TrainerOptions, "trainer", _section(tree, "trainer"))
    if None not in (trainer.clip_norm, trainer.clip_value):
        raise ConfigError(
            "trainer.clip_norm and trainer.clip_value: cannot be combined; give only one"
        )
    groups = optimizer.get("groups") or {}
    if joint is None:
        optimizer = {k: v for k, v in _open(tree, "optimizer").items() if k != "groups"}
    return Config(
        run=run,
        dtype=_load(schema.Dtype, "dtype", _section(tree, "dtype")),
        loss_scaling=_open(tree, "loss_scaling"),
        ops=_load(schema.Ops, "ops", _section(tree, "ops")),
        trainer=trainer,
        data=data,
        model=_open(tree, "model"),
        dataset=arguments,
        objective=_optional(tree, "objective"),
        optimizer=optimizer,
        groups={str(k): _group(str(k), node) for k, node in groups.items() if node is not None},
        joint=joint,
        scheduler=_optional(tree, "scheduler"),
        callbacks=_nodes_by_name(tree, "callbacks"),
        metrics=_nodes_by_name(tree, "metrics"),
        distributed=_optional(tree, "distributed"),
        flat=flatten(tree),
    )


def _refuse_unfit_size(composed: DictConfig) -> None:
    """Refuse a size that would change nothing; some experiments have small values for `small`."""
    size = composed.get("size")
    if size not in (None, "small"):
        raise ConfigError(f"size={size}: must be small; leave it out for the full size")
    if size and not any("${size:" in str(value) for value in values_of(composed)):
        raise ConfigError(
            f"size={size}: nothing chosen here has two sizes; docs/workloads.md lists the "
            "experiments that do"
        )


def _check_run(run: schema.RunOptions) -> None:
    """Refuse a name that leads out of runs/, empty paths, and options that need `init_from`."""
    place = PurePosixPath(run.run_name.replace("\\", "/"))
    if place.is_absolute() or ".." in place.parts:
        raise ConfigError(
            f"run_name={run.run_name}: must stay within runs/; for another place set hydra.run.dir"
        )
    refuse_empty("resume", run.resume)
    refuse_empty("init_from", run.init_from)
    names = run.init_from_names or {}
    for name, value in (("init_from_except", run.init_from_except), ("init_from_names", names)):
        if value and run.init_from is None:
            raise ConfigError(f"{name}={value}: only works with init_from; give both")
    for old, new in names.items():
        if not isinstance(new, str):
            raise ConfigError(f"init_from_names={{{old}: {new}}}: must map a word to a word")


def refuse_empty(option: str, path: str | None) -> None:
    """Refuse an empty path, which would mean the current folder."""
    if path is not None and not path.strip():
        raise ConfigError(
            f"{option}=: is empty, perhaps from a shell variable that is not set; name a folder, "
            "and . for this one"
        )


def refuse_missing(resume: str) -> None:
    """Refuse to resume from a path that does not exist."""
    if resume not in ("none", "auto") and not Path(resume).exists():
        raise ConfigError(f"resume={resume}: no such folder; name a run's folder or a checkpoint")


def _group(name: str, node: Any) -> Part:
    path = f"optimizer.groups.{name}"
    if name == "default":
        raise ConfigError(f"{path}: is the group of all other parameters; choose another name")
    if not isinstance(node, dict):
        raise ConfigError(f"{path}={as_typed(node)}: must be a mapping; give it parameters")
    options, settings = _take(schema.GroupOptions, path, node)
    given = [key for key in ("lr", *settings) if node.get(key) is not None]
    if options.frozen and given:
        raise ConfigError(
            f"{path}.{given[0]}={as_typed(node[given[0]])}: does nothing with frozen=true; leave "
            "out one of them"
        )
    return Part(options, settings)


def _joint(node: Mapping[str, Any]) -> JointOptions:
    options = _load(JointOptions, "optimizer", node)
    if not options.parts:
        raise ConfigError("optimizer.parts={}: must name at least one optimizer")
    options.parts = {str(name): _part(str(name), part) for name, part in options.parts.items()}
    return options


def _part(name: str, node: Any) -> Part:
    path = f"optimizer.parts.{name}"
    _require_target(path, node)
    options, settings = _take(schema.GroupOptions, path, node)
    if options.frozen:
        raise ConfigError(f"{path}.frozen=true: is for a group; leave the parameters to no part")
    if isinstance(options.lr, str):
        raise ConfigError(f"{path}.lr={options.lr}: must be a number > 0; a factor is for a group")
    kept = {k: v for k, v in node.items() if k in settings or (k == "lr" and v is not None)}
    return Part(options, kept)


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options as one level of dotted paths."""
    return {path: held for path, _, held in walk(tree) if not isinstance(held, dict) or not held}


def refuse_bad_value(path: str, value: Any) -> None:
    """Refuse a value of the option at `path`, if that is an option of a closed section."""
    refers = isinstance(value, str) and ("${" in value or value == "???")
    if path in schema.OPTIONS and not refers:
        _validate(path, value, schema.OPTIONS[path])


def _take(section: type[T], path: str, node: Mapping[str, Any]) -> tuple[T, dict[str, Any]]:
    """Load the entries of a node that are options of a section, and return the others as well."""
    names = {f.name for f in dataclasses.fields(cast(Any, section))}
    held = {key: value for key, value in node.items() if key in names}
    return _load(section, path, held), {k: v for k, v in node.items() if k not in names}


def _load(section: type[T], path: str, node: Mapping[str, Any]) -> T:
    """Make an instance of a section's dataclass, or refuse a key, type or value."""
    options = {f.name: f for f in dataclasses.fields(cast(Any, section))}
    _refuse_unknown(path, node, set(options))
    prefix = f"{path}." if path else ""
    return section(
        **{name: _validate(f"{prefix}{name}", value, options[name]) for name, value in node.items()}
    )


def _validate(path: str, value: Any, spec: Any) -> Any:
    """Convert a value to the type of its option, or refuse it."""
    limits: Range = spec.metadata["range"]
    unit, measure = spec.metadata["unit"], spec.metadata["measure"]
    if measure and schema.parse_measure(value, measure):
        return value
    # OmegaConf would take any number for a truth.
    if not (spec.type is bool and type(value) in (int, float)):
        with suppress(OmegaConfBaseException):  # Another type.
            converted = _convert(value, spec)
            if limits.holds(converted):
                return converted
    kind, *others = _kinds(spec)
    what = "" if limits.choices else _NAMES.get(get_origin(kind) or kind, "a value")
    allowed = f"{what} {limits}".strip() + f" ({unit})" * bool(unit)
    allowed += f", or as in 10{measure}" * bool(measure) + ", or null" * (NoneType in others)
    hint = schema.use_instead(str(value)) if path == "dtype.mode" else ""
    hint = hint or nearest(str(value), limits.choices)
    raise ConfigError(f"{path}={as_typed(value)}: must be {allowed}" + f"; {hint}" * bool(hint))


def _convert(value: Any, spec: Any) -> Any:
    """Convert by OmegaConf's rules: `"3"` is an int, `1` a float."""
    kinds = _kinds(spec)
    # Most values are of their type, and OmegaConf takes a millisecond for each.
    if type(value) not in kinds and Any not in kinds:
        holder = dataclasses.make_dataclass("Holder", [("value", reduce(or_, kinds))])
        merged = OmegaConf.merge(OmegaConf.structured(holder), {"value": value})
        value = cast(dict[str, Any], OmegaConf.to_container(merged))["value"]
    if "true" in spec.metadata["range"].choices:  # A quoted one was a word.
        return {"true": True, "false": False}.get(str(value), value)
    return value


def _kinds(spec: Any) -> list[Any]:
    """Return the types of an option, without the `str` of a number with its measure."""
    kinds = get_args(spec.type) if isinstance(spec.type, UnionType) else (spec.type,)
    return [kind for kind in kinds if not (kind is str and spec.metadata["measure"])]


def as_typed(value: Any) -> str:
    """Write a value as it is typed on a command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    node = tree.get(name)
    if not isinstance(node, dict):
        raise ConfigError(
            f"{name}={as_typed(node)}: must be a mapping; choose a file of conf/{name}"
        )
    return node


def _open(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    node = _section(tree, name)
    _require_target(name, node)
    return node


def _optional(tree: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return _open(tree, name) if tree.get(name) else None


def _nodes_by_name(tree: Mapping[str, Any], section: str) -> dict[str, dict[str, Any]]:
    """Return the nodes of a section with several entries by name, without those that are null."""
    nodes = _section(tree, section) if tree.get(section) else {}
    found = {str(name): node for name, node in nodes.items() if node is not None}
    for name, node in found.items():
        _require_target(f"{section}.{name}", node)
    return found


def _require_target(path: str, node: Any) -> None:
    if not isinstance(node, dict):
        raise ConfigError(f"{path}={as_typed(node)}: must be a mapping with a _target_")
    target = node.get("_target_")
    if not isinstance(target, str):
        must = "must be the dotted name of a class or function"
        raise ConfigError(f"{path}._target_={as_typed(target)}: {must}")


def _refuse_unknown(path: str, node: Mapping[str, Any], known: set[str]) -> None:
    for key in node:
        if key not in known:
            prefix = f"{path}." if path else ""
            names = [f"{prefix}{name}" for name in sorted(known)]
            hint = schema.use_instead(str(key), node[key]) or nearest(f"{prefix}{key}", names)
            raise ConfigError(
                f"{prefix}{key}: no such option; {hint or 'known: ' + ', '.join(names)}"
            )


def _resolve(composed: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain values, or refuse a missing value or reference."""
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"{missing[0]}: must be given, e.g. {missing[0]}=VALUE")
        return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        path = error.full_key or "config"
        raise ConfigError(f"{path}: {first}; set {path}=VALUE") from None
