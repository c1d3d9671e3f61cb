"""Lets Hydra compose one job's configuration, and says in one line why Hydra could not.

Hydra answers a misspelt key with the hint to add `+`, and a key added so would train with the
default and say nothing. So if Hydra refuses, the words are checked again, one by one: the
first that names no choice or option, or has a value that is not allowed, is named with what is.
"""

import argparse
from collections.abc import Iterator
from typing import Any, cast

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from mpframe.config.check import check, known_paths, refuse_bad_value
from mpframe.config.locations import CONF
from mpframe.config.overrides import (
    MAPPINGS,
    PRIMARY,
    Source,
    hydra_over,
    parsed,
    rewritten,
    source_of,
)
from mpframe.config.redaction import secrets_of, values_of
from mpframe.config.schema import OPEN, Config, use_instead
from mpframe.core.errors import ConfigError, first_line, nearest

_ONE_CHOICE = {
    *("dtype", "dtype/products", "ops"),
    *(name for name, section in OPEN.items() if not section.named),
}
_MERGING = "Error merging override "  # Hydra's; what is wrong with it stands in the cause.


def composed(words: list[str], name: str = PRIMARY) -> DictConfig:
    """What the words of one job compose, Hydra's own section with it; Hydra is initialised."""
    overrides = parsed(words)
    for override in overrides:
        refuse_bad_override(override)
    try:
        return compose(name, overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, OSError, MarkedYAMLError) as error:
        raise refusal(error, words, name) from None


def checked(config: DictConfig) -> Config:
    """The typed configuration behind a composed one that may still hold Hydra's own section."""
    secrets_of(values_of(config), {})  # A refusal tells none of them.
    return check(without_hydra(config))


def without_hydra(config: DictConfig) -> DictConfig:
    """A composed configuration without Hydra's own section, interpolations left as they are."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def refusal(error: Exception, words: list[str], name: str = PRIMARY) -> ConfigError:
    """Why Hydra, which is initialised, could not compose the words, in one line."""
    try:
        overrides = parsed(words)
        for override in overrides:
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: several values make a sweep; add -m")
            _refuse_unknown_choice(override, words, name)
        deciding = [  # The words that decide which options there are.
            str(o.input_line)
            for o in overrides
            if o.key_or_group == "hydra.searchpath" or choices_of(o.key_or_group, words, name)
        ]
        base = compose(name, overrides=deciding, return_hydra_config=True)
        for override in overrides:
            _refuse_unknown_key(override, base)
            refuse_bad_override(override)
    except ConfigError as refused:
        return refused
    except Exception:
        pass  # The fault is in a choice's own file; the error repeats what Hydra said of it.
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(f"{mark.name}, line {mark.line + 1}: {error.problem}; correct the file")
    if isinstance(error, HydraException | OmegaConfBaseException):
        return ConfigError(one_line(error))
    return ConfigError(f"Hydra: {one_line(error)}; HYDRA_FULL_ERROR=1 shows the traceback")


def refuse_bad_override(override: Override) -> None:
    """Refuse a value on the command line that is not allowed, whatever else it is given with."""
    key, value = override.key_or_group, override.value()
    if override.type is OverrideType.DEL:
        if key in known_paths() and not key.startswith("optimizer."):
            raise ConfigError(f"~{key}: every run has this option; give it a value, {key}=VALUE")
    elif isinstance(value, list) and len(value) != 1 and key in _ONE_CHOICE:
        raise ConfigError(f"{override.input_line}: give one choice, as {key}=NAME")
    elif not override.is_sweep_override():
        refuse_bad_value(key, value)


def choices_of(group: str, words: list[str], name: str = PRIMARY) -> list[str]:
    """The choices of a group, sorted, for Hydra as it is initialised; none if it is no group."""
    if "." in group:
        return []
    places = [word for word in words if word.lstrip("+").startswith("hydra.searchpath=")]
    loader = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(group, config_name=name, overrides=places))


def one_line(error: Exception) -> str:
    """What Hydra or OmegaConf says on several lines, without where it looked."""
    said = str(error) or str(error.__cause__ or type(error).__name__)
    if said.startswith(_MERGING) and error.__cause__ is not None:
        said = f"{said.removeprefix(_MERGING)}: {first_line(error.__cause__)}"
    lines = [line.strip() for line in said.partition("Config search path")[0].splitlines()]
    lines = [line for line in lines if line]
    listed = ", ".join(lines[2:]) if len(lines) > 2 and lines[1].endswith(":") else ""
    return f"{'; '.join(lines[:2])} {listed}".strip()


def _refuse_unknown_choice(override: Override, words: list[str], name: str) -> None:
    group = override.key_or_group
    choices = choices_of(group, words, name)
    if not choices or override.type is OverrideType.DEL:
        return
    value = override.value()
    if override.type is not OverrideType.CHANGE:
        text = str(override.input_line)
        taken = compose(name, return_hydra_config=True).hydra.runtime.choices
        if group in taken or group == "experiment":
            raise ConfigError(f"{text}: a choice takes no +; write {text.lstrip('+')}")
    refuse_unknown_choice(group, "null" if value is None else str(value), choices)


def _other_way(group: str, choice: str) -> str:
    """What to write instead of a choice that others have, or how to get it."""
    if group in ("hydra/sweeper", "hydra/launcher"):
        return "Optuna, joblib and submitit come with pip install mpframe[sweep]"
    if group == "loss_scaling" and choice.replace(".", "", 1).isdigit():
        return f"use loss_scaling=static loss_scaling.scale={choice}"
    if group == "experiment":
        return _experiment_now(choice)
    return use_instead(choice) if group == "dtype" else ""


def _experiment_now(name: str) -> str:
    """What to write for an experiment that is now the small size of another, or has a new name."""
    whole = name.removesuffix("_small")
    file = CONF / "experiment" / f"{whole}.yaml"
    if whole == name or not file.is_file():
        return ""
    if "${size:" in file.read_text("utf-8"):
        return f"use experiment={whole} +size=small"
    return f"use experiment={whole}_digits"


def refuse_unknown_choice(group: str, choice: str, choices: list[str]) -> None:
    """Refuse what is no choice of a group, naming the nearest ones."""
    if choice not in choices:
        hint = _other_way(group, choice) or nearest(choice, choices)
        raise ConfigError(
            f"{group}={choice}: choose {', '.join(choices)}" + (f"; {hint}" if hint else "")
        )


def _refuse_unknown_key(override: Override, base: DictConfig) -> None:
    key = override.key_or_group
    if ("." not in key and key in base.hydra.runtime.choices) or "/" in key:
        return
    if key.startswith("hydra."):
        _refuse_unknown_hydra_key(override, base)
        return
    section, _, rest = key.partition(".")
    known = {path for path in paths(base) if not path.startswith("hydra")}
    adds = override.type in (OverrideType.ADD, OverrideType.FORCE_ADD)
    inside_mapping = key.startswith(tuple(f"{mapping}." for mapping in MAPPINGS))
    if key in known or inside_mapping or (adds and section in OPEN and rest):
        return
    own = section in OPEN and bool(rest)
    hint = use_instead(key if own else key.rpartition(".")[2]) or nearest(key, known)
    beside = [path for path in known if path.startswith(f"{section}.")]
    advice = hint or "known: " + ", ".join(sorted(beside or {p.split(".")[0] for p in known}))
    if own and not adds:
        advice += f"; an argument of your own class: +{key}=..."
    raise ConfigError(f"{key}: no such option; {advice}")


def _refuse_unknown_hydra_key(override: Override, base: DictConfig) -> None:
    key = override.key_or_group
    known = {path for path in paths(base) if path.startswith("hydra")}
    if override.type is OverrideType.CHANGE and key not in known:
        raise ConfigError(f"{key}: no such option of Hydra; {nearest(key, known)}".rstrip("; "))


def paths(config: DictConfig) -> set[str]:
    """The dotted path of every option of a composed configuration, sections included."""
    return set(_walked(cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))))


def _walked(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _walked(value, f"{prefix}{key}.")


def refusal_of(error: Exception, flags: argparse.Namespace, words: list[str]) -> ConfigError:
    """Look the words of a command line through for what Hydra could not compose."""
    source = source_of(flags, words)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file == source.name:
        return ConfigError(
            f"--config-name={source.name}: no {source.name}.yaml in {flags.config_dir or CONF}; "
            + (_nearest_in(source) or "add --config-dir=FOLDER")
        )
    job = [o for o in parsed(rewritten(words)) if not (flags.multirun and o.is_sweep_override())]
    with hydra_over(source):
        return refusal(error, [str(o.input_line) for o in job], source.name)


def _nearest_in(source: Source) -> str:
    """The user's own primary configurations with a name like the one that is asked for."""
    files = [file for folder in source.own_folders for file in folder.glob("*.yaml")]
    return nearest(source.name, [file.stem for file in files])
