"""Composes one job's configuration with Hydra, and explains in one line why Hydra could not.

Hydra answers a misspelt key with the hint to add `+`, and then the run would silently train with
the default. So if Hydra refuses, each word is checked again: the first that names no choice or
option, or has a value that is not allowed, is reported with the allowed ones.
"""

import argparse

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from mpframe.config import CONF
from mpframe.config.check import check, refuse_bad_value
from mpframe.config.overrides import (
    MAPPINGS,
    PRIMARY,
    Source,
    hydra_over,
    parse_words,
    rewrite,
    source_of,
)
from mpframe.config.redaction import secrets_of, values_of
from mpframe.config.schema import ONE_TARGET, OPEN, OPTIONS, Config, use_instead
from mpframe.core.errors import ConfigError, first_line, nearest
from mpframe.files.stored_yaml import walk

_ONE_CHOICE = ONE_TARGET | {"dtype", "dtype/products", "ops"}
_MERGING = "Error merging override "  # Hydra's words, whose cause says what is wrong.


def compose_words(words: list[str], name: str = PRIMARY) -> DictConfig:
    """Compose the words of one job, including Hydra's own section; needs Hydra initialised."""
    for override in parse_words(words):
        refuse_bad_override(override)
    try:
        return compose(name, overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, OSError, ValueError, MarkedYAMLError) as error:
        raise refusal(error, words, name) from None


def compose_typed(words: list[str], source: Source) -> DictConfig:
    """Compose the words of one job as they were typed, from a source."""
    with hydra_over(source):
        return compose_words(rewrite(words), source.name)


def check_config(config: DictConfig) -> Config:
    """Return the typed configuration of a composed one, with or without Hydra's own section."""
    secrets_of(values_of(config), {})  # A refusal tells none of them.
    return check(without_hydra(config))


def without_hydra(config: DictConfig) -> DictConfig:
    """Return a composed configuration without Hydra's own section, interpolations unresolved."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def refusal(error: Exception, words: list[str], name: str = PRIMARY) -> ConfigError:
    """Explain in one line why Hydra, which is initialised, could not compose the words."""
    try:
        overrides = parse_words(words)
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
        pass  # The fault is in a choice's own file, and Hydra's error describes it.
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(f"{mark.name}, line {mark.line + 1}: {error.problem}; correct the file")
    if isinstance(error, HydraException | OmegaConfBaseException):
        return ConfigError(one_line(error))
    return ConfigError(f"Hydra: {one_line(error)}; HYDRA_FULL_ERROR=1 shows the traceback")


def refuse_bad_override(override: Override) -> None:
    """Refuse a value on the command line that no other word could make right."""
    key, value = override.key_or_group, override.value()
    if override.type is OverrideType.DEL:
        if key in OPTIONS and not key.startswith("optimizer."):
            raise ConfigError(f"~{key}: every run has this option; give it a value, {key}=VALUE")
    elif isinstance(value, list) and len(value) != 1 and key in _ONE_CHOICE:
        raise ConfigError(f"{override.input_line}: give one choice, as {key}=NAME")
    elif not override.is_sweep_override():
        refuse_bad_value(key, value)


def choices_of(group: str, words: list[str], name: str = PRIMARY) -> list[str]:
    """Return the sorted choices of a group for Hydra as it is initialised, if it is a group."""
    if "." in group:
        return []
    places = [word for word in words if word.lstrip("+").startswith("hydra.searchpath=")]
    loader = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(group, config_name=name, overrides=places))


def one_line(error: Exception) -> str:
    """Put what Hydra or OmegaConf says into one line, without the search path."""
    said = str(error) or str(error.__cause__ or type(error).__name__)
    if said.startswith(_MERGING) and error.__cause__ is not None:
        said = f"{said.removeprefix(_MERGING)}: {first_line(error.__cause__)}"
    lines = [line.strip() for line in said.partition("Config search path")[0].splitlines()]
    return "; ".join(line for line in lines if line)


def _refuse_unknown_choice(override: Override, words: list[str], name: str) -> None:
    group = override.key_or_group
    choices = choices_of(group, words, name)
    if not choices or override.type is OverrideType.DEL:
        return
    text, value = str(override.input_line), override.value()
    if override.type is not OverrideType.CHANGE and group in _ONE_CHOICE | {"experiment"}:
        raise ConfigError(f"{text}: a choice takes no +; write {text.lstrip('+')}")
    for choice in value if isinstance(value, list) else [value]:
        refuse_unknown_choice(group, "null" if choice is None else str(choice), choices)


def refuse_unknown_choice(group: str, choice: str, choices: list[str]) -> None:
    """Refuse a choice that a group does not have, naming the nearest ones."""
    if choice in choices:
        return
    hint = (use_instead(choice) if group == "dtype" else "") or nearest(choice, choices)
    if group in ("hydra/sweeper", "hydra/launcher"):
        hint = "Optuna, joblib and submitit come with pip install mpframe[sweep]"
    raise ConfigError(f"{group}={choice}: choose {', '.join(choices)}" + f"; {hint}" * bool(hint))


def _refuse_unknown_key(override: Override, base: DictConfig) -> None:
    key = override.key_or_group
    if ("." not in key and key in base.hydra.runtime.choices) or "/" in key:
        return
    of_hydra = key.startswith("hydra.")
    tree = OmegaConf.to_container(base, resolve=False)
    known = {path for path, _, _ in walk(tree) if path.startswith("hydra") is of_hydra}
    if of_hydra:
        if override.type is OverrideType.CHANGE and key not in known:
            raise ConfigError(f"{key}: no such option of Hydra{nearest(key, known, before='; ')}")
        return
    section, _, rest = key.partition(".")
    is_open = section in OPEN and bool(rest)
    adds = override.type in (OverrideType.ADD, OverrideType.FORCE_ADD)
    inside_mapping = key.startswith(tuple(f"{mapping}." for mapping in MAPPINGS))
    if key in known or inside_mapping or (adds and is_open):
        return
    value = override.value()
    hint = use_instead(key, value)
    hint = hint or ("" if is_open else use_instead(key.rpartition(".")[2], value))
    hint = hint or nearest(key, known)
    beside = [path for path in known if path.startswith(f"{section}.")]
    advice = hint or "known: " + ", ".join(sorted(beside or {p.split(".")[0] for p in known}))
    if is_open and not adds:
        advice += f"; an argument of your own class: +{key}=..."
    raise ConfigError(f"{key}: no such option; {advice}")


def refusal_of(error: Exception, flags: argparse.Namespace, words: list[str]) -> ConfigError:
    """Search the words of a command line for what Hydra could not compose."""
    source = source_of(flags)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file == source.name:
        names = [file.stem for folder in source.own_folders for file in folder.glob("*.yaml")]
        hint = nearest(source.name, names) or "add --config-dir=FOLDER"
        where = flags.config_dir or CONF
        return ConfigError(f"--config-name={source.name}: no {source.name}.yaml in {where}; {hint}")
    job = [o for o in parse_words(rewrite(words)) if not (flags.multirun and o.is_sweep_override())]
    with hydra_over(source):
        return refusal(error, [str(o.input_line) for o in job], source.name)
