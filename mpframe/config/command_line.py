"""Looks a command line over before Hydra sees it: every mistake in it is one line, at once.

Hydra would answer a misspelt key with the hint to add `+`, and a key added so trains with the
default and says nothing. Here each override is held against the groups, the schema and the
composed configuration of every job of a sweep; the nearest name is given.

Four forms are rewritten for Hydra:

    ops.allow+=[softmax]       ->  ++ops.move.softmax=allow
    ops.deny-=[exp]            ->  ++ops.move.exp=none
    ops.modules={head:fp32}    ->  ++ops.modules={head:fp32}
    model._target_=my.Net      ->  model=own ++model._target_=my.Net   (likewise dataset, ...)
"""

import argparse
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpframe.config.check import check
from mpframe.config.locations import CONF
from mpframe.config.schema import OPEN, Config, use_instead
from mpframe.errors import ConfigError, nearest

_MOVE = re.compile(r"^ops\.(allow|deny|infer)([+-])=\[?([\w, ]+)\]?$")
_MAPPINGS = ("ops.move", "ops.modules", "optimizer.groups")
_JOBS_CHECKED = 512
_COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")


@dataclass(frozen=True)
class Source:
    """Where a configuration is composed from.

    Attributes:
        folder: holds config groups.
        name: of the primary configuration.
        further: another such folder, which goes before the first; None: there is none.
    """

    folder: Path = CONF
    name: str = "config"
    further: Path | None = None

    @property
    def folders(self) -> list[Path]:
        """All folders, the first ones first."""
        return [*([self.further] if self.further else []), self.folder]

    def choices(self, group: str) -> list[str]:
        """The choices of a group, sorted; none where there is no such group."""
        files = [file for folder in self.folders for file in (folder / group).glob("*.yaml")]
        return sorted({file.stem for file in files})


SHIPPED = Source()


def prepare(arguments: list[str]) -> list[str]:
    """The arguments as Hydra is to see them, after every override has been checked.

    Args:
        arguments: the command line without the program's name.

    Raises:
        ConfigError: an override is not one of this program's, or its value is not allowed.
    """
    parsed, rest = _flags(arguments)
    given = [*parsed.overrides, *(text for text in rest if not text.startswith("-"))]
    flags = [argument for argument in arguments if argument not in given]
    _refuse_unfit_flags(parsed, rest)
    if parsed.shell_completion:
        return arguments
    overrides = _rewritten(given)
    source = _source(parsed)
    if source is None:
        return [*flags, *overrides]  # Checked once composed.
    if parsed.help or parsed.hydra_help:
        _composed_by_known_names(_parsed(overrides), source)
        return [*overrides, *flags]
    multirun = bool(parsed.multirun)
    for job in _jobs(overrides, multirun, source):
        _check_job(job, multirun, source)
    return [*flags, *(_with_options_of_swept_groups(overrides) if multirun else overrides)]


@dataclass(frozen=True)
class Job:
    """A job that training would run.

    Attributes:
        typed: the words of the command line that are its own, as they were typed.
        overrides: the same as Hydra is given them.
        config: the checked configuration they make.
    """

    typed: list[str]
    overrides: list[str]
    config: Config


def jobs(arguments: list[str]) -> Iterator[Job]:
    """Each job that training would run.

    Args:
        arguments: the command line, as training takes it; of its flags only `-m`.

    Raises:
        ConfigError: as for `prepare`.
    """
    multirun = not {"-m", "--multirun"}.isdisjoint(arguments)
    given = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    for word in given:
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such option; give option=value, and -m for a sweep")
    for typed in _jobs(given, multirun, SHIPPED):
        overrides = _rewritten(typed)
        yield Job(typed, overrides, checked(_composed_by_known_names(_parsed(overrides))))


def _flags(arguments: list[str]) -> tuple[Any, list[str]]:
    """What Hydra's own parser makes of the flags, and the words it does not know."""
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}; see --help") from None


def _source(parsed: Any) -> Source | None:
    """Where Hydra will compose from; None where that is no folder of files."""
    path = str(parsed.config_path or CONF)
    if "://" in path:
        return None
    further = None if parsed.config_dir is None else Path(parsed.config_dir).absolute()
    name = str(parsed.config_name or "config").removesuffix(".yaml")
    return Source(Path(__file__).parent / path, name, further)


def _refuse_unfit_flags(parsed: Any, rest: list[str]) -> None:
    if parsed.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun={parsed.experimental_rerun}: reads a pickle, which may run "
            "code; give the run's options again, or continue it with resume=auto"
        )
    for word in rest:
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such flag; write options as option=value; see --help")
    _refuse_unfit_commands(parsed)
    folder = Path(parsed.config_dir or CONF)
    if not folder.is_dir():
        raise ConfigError(f"--config-dir={folder}: no such folder; name one with .yaml files")
    name = str(parsed.config_name or "config").removesuffix(".yaml")
    folders = [folder, CONF] if parsed.config_path is None else []
    if folders and not any((place / f"{name}.yaml").is_file() for place in folders):
        raise ConfigError(
            f"--config-name={name}: no {name}.yaml in {folder}; add --config-dir=FOLDER"
        )


def _refuse_unfit_commands(parsed: Any) -> None:
    """Refuse flags that name several things to do, or half of one."""
    commands = [name for name in _COMMANDS if getattr(parsed, name)]
    if len(commands) > 1:
        both = " and ".join(f"--{name.replace('_', '-')}" for name in commands)
        raise ConfigError(f"{both}: do not go together; give one of them")
    if parsed.resolve and not (parsed.cfg or parsed.help):
        raise ConfigError("--resolve: goes with --cfg or --help; add --cfg=job")
    if parsed.shell_completion and not any(
        word.startswith(("install=", "uninstall=", "query=")) for word in parsed.overrides
    ):
        raise ConfigError("--shell-completion: add install=SHELL or uninstall=SHELL, e.g. bash")


def compose_named(given: list[str]) -> tuple[list[Override], DictConfig]:
    """What `option=value` words compose, names checked and values not; for one job, no flags.

    Raises:
        ConfigError: an override names no choice or option of this program, or is malformed.
    """
    parsed = _parsed(_rewritten(given))
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: give one value; there is no sweep here")
    return parsed, _composed_by_known_names(parsed)


def _rewritten(given: list[str]) -> list[str]:
    return _with_mappings(_with_own_targets(_with_moves(given)))


def _with_options_of_swept_groups(overrides: list[str]) -> list[str]:
    """Let an option go with a group that is swept: `-m loss_scaling=A,B loss_scaling.X=1`.

    Hydra composes the command line once without the sweep, and the group's default choice may lack
    the option. Each job has been checked with its own choice.
    """
    parsed = _parsed(overrides)
    swept = {o.key_or_group for o in parsed if o.is_sweep_override() and is_group(o.key_or_group)}

    def free(key: str) -> bool:
        group, _, option = key.partition(".")
        return bool(option) and group in swept

    return [
        f"++{text}" if free(o.key_or_group) and text[0] not in "+~" else text
        for o, text in zip(parsed, overrides, strict=True)
    ]


def _with_moves(overrides: list[str]) -> list[str]:
    """Replace additions to and removals from an op list by single moves."""
    written: list[str] = []
    for override in overrides:
        match = _MOVE.match(override)
        if match is None:
            written.append(override)
            continue
        name, sign, ops = match.groups()
        to = name if sign == "+" else "none"
        written += [f"++ops.move.{op.strip()}={to}" for op in ops.split(",")]
    return written


def _with_mappings(overrides: list[str]) -> list[str]:
    """Let entries be added to the options that are mappings, which hold none at first."""
    return [f"++{o}" if o.startswith(_MAPPINGS) else o for o in overrides]


def _with_own_targets(overrides: list[str]) -> list[str]:
    """Let a user's own class stand alone: none of the shipped choice's arguments go with it."""
    groups = [group for group, section in OPEN.items() if not section.named]
    own = {g for g in groups for o in overrides if o.lstrip("+").startswith(f"{g}._target_=")}
    chosen = {g for g in OPEN for o in overrides if o.startswith(f"{g}=")}
    written = [f"{group}=own" for group in sorted(own - chosen)]
    for override in overrides:
        free = any(override.startswith(f"{group}.") for group in own)
        written.append(f"++{override}" if free else override)
    return written


def _parsed(overrides: list[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            shown = text or "''"
            raise ConfigError(f"{shown}: not of the form option=value; {reason}") from None
    return parsed


def _jobs(words: list[str], multirun: bool, source: Source) -> list[list[str]]:
    """The words of each job: one list, or one for each combination of a sweep."""
    draws = any(w.startswith("hydra/sweeper=") and not w.endswith("=basic") for w in words)
    axes = [_words_of(word, multirun, draws, source) for word in words]
    return [list(job) for job in itertools.islice(itertools.product(*axes), _JOBS_CHECKED)]


def _words_of(word: str, multirun: bool, draws: bool, source: Source) -> list[str]:
    """The word itself, or one for each of the values it sweeps over."""
    if _MOVE.match(word):
        return [word]
    (override,) = _parsed([word])
    if not override.is_sweep_override():
        return [word]
    if not multirun:
        raise ConfigError(f"{word}: several values make a sweep; add -m")
    values = _values(override, draws, source)
    if not values:
        raise ConfigError(
            f"{word}: holds no value, so the sweep would have no job; give at least one"
        )
    return [f"{override.get_key_element()}={value}" for value in values]


def _values(override: Override, draws: bool, source: Source) -> list[str]:
    """The values of a sweep over one option; of an interval, from which a sweeper draws, its ends.

    Args:
        override: names several values.
        draws: another sweeper than Hydra's basic one is in use.
        source: has the choices that a glob may match.
    """
    text = override.input_line
    value: Any = override.value()
    if isinstance(value, Glob):
        choices = source.choices(override.key_or_group)
        matching = value.filter(choices)
        if not matching:
            known = ", ".join(choices) or "none: glob() is for groups"
            raise ConfigError(f"{text}: matches no choice; there are {known}")
        return list(matching)
    if isinstance(value, IntervalSweep):
        if not draws:
            raise ConfigError(
                f"{text}: needs a sweeper that draws values, as hydra/sweeper=optuna; without one "
                "give a list, range() or choice()"
            )
        return [str(value.start), str(value.end)]
    try:
        return list(itertools.islice(override.sweep_string_iterator(), _JOBS_CHECKED))
    except (HydraException, ValueError) as error:
        raise ConfigError(f"{text}: {str(error).splitlines()[0]}; give other values") from None


def _check_job(overrides: list[str], multirun: bool, source: Source) -> None:
    composed = _composed_by_known_names(_parsed(overrides), source)
    option = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    try:
        folder = composed.hydra.sweep.dir if multirun else composed.hydra.run.dir
    except OmegaConfBaseException as error:
        raise ConfigError(f"{option}: {str(error).splitlines()[0]}; set {option}=FOLDER") from None
    if not str(folder or "").strip():
        raise ConfigError(
            f"{option}=: is empty, perhaps from a shell variable that is not set; name a folder, "
            "and . for this one"
        )
    checked(composed)
    refuse_unwritable(option, Path(folder))


def _composed_by_known_names(overrides: list[Override], source: Source = SHIPPED) -> DictConfig:
    for override in overrides:
        _refuse_unknown_choice(override, source)
    choices = [
        o for o in overrides if is_group(o.key_or_group, source) or o.key_or_group == "run_name"
    ]
    base = _composed([str(o.input_line) for o in choices], source)
    for override in overrides:
        _refuse_unknown_key(override, base, source)
    return _composed([str(o.input_line) for o in overrides], source)


def checked(composed: DictConfig) -> Config:
    """The typed configuration behind a composed one that may still hold Hydra's own section."""
    own = {key: composed._get_node(key) for key in composed if key != "hydra"}
    return check(OmegaConf.create(own))


def _composed(overrides: list[str], source: Source) -> DictConfig:
    holders = [f for f in source.folders if (f / f"{source.name}.yaml").is_file()]
    primary = next(iter(holders), source.folder)
    others = [f"file://{folder}" for folder in source.folders if folder != primary]
    if others:
        overrides = [f"hydra.searchpath=[{','.join(others)}]", *overrides]
    with initialize_config_dir(str(primary), version_base="1.3", job_name="train"):
        try:
            return compose(source.name, overrides=overrides, return_hydra_config=True)
        except HydraException as error:
            raise ConfigError(_one_line(error)) from None


def _one_line(error: HydraException) -> str:
    """What Hydra says on several lines, without where it looked."""
    text = str(error).partition("Config search path")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    listed = ", ".join(lines[2:]) if len(lines) > 2 and lines[1].endswith(":") else ""
    return f"{'; '.join(lines[:2])} {listed}".strip()


def is_group(key: str, source: Source = SHIPPED) -> bool:
    """True where `key` names a group of conf/, as in `model=cnn`."""
    inside = any((folder / key).is_dir() for folder in source.folders)
    return "." not in key and not key.startswith("hydra") and inside


def _refuse_unknown_choice(override: Override, source: Source) -> None:
    group = override.key_or_group
    if not is_group(group, source) or override.type is OverrideType.DEL:
        return
    if override.type is not OverrideType.CHANGE:
        text = str(override.input_line)
        raise ConfigError(f"{text}: a choice takes no +; write {text.lstrip('+')}")
    choices = source.choices(group)
    value = override.value()
    if value is None and group == "experiment":
        return
    choice = str(value)
    if choice not in choices:
        hint = (use_instead(choice) if group == "dtype" else "") or nearest(choice, choices)
        raise ConfigError(
            f"{group}={choice}: choose {', '.join(choices)}" + (f"; {hint}" if hint else "")
        )


def _refuse_unknown_key(override: Override, base: DictConfig, source: Source) -> None:
    key = override.key_or_group
    if is_group(key, source) or "/" in key:
        return
    if key.startswith("hydra"):
        _refuse_unknown_hydra_key(override, base)
        return
    section, _, rest = key.partition(".")
    known = _paths(base)
    adds = override.type in (OverrideType.ADD, OverrideType.FORCE_ADD)
    inside_mapping = key.startswith(tuple(f"{mapping}." for mapping in _MAPPINGS))
    if key in known or inside_mapping or (adds and section in OPEN and rest):
        return
    if any(path.startswith(f"{key}.") for path in known):
        return
    hint = nearest(key, known)
    advice = hint or "known: " + ", ".join(sorted({path.split(".")[0] for path in known}))
    if section in OPEN and rest and not adds:
        advice += f"; an argument of your own class: +{key}=..."
    raise ConfigError(f"{key}: no such option; {advice}")


def _refuse_unknown_hydra_key(override: Override, base: DictConfig) -> None:
    key = override.key_or_group
    known = {f"hydra.{path}" for path in _paths(base.hydra)} | {"hydra"}
    if override.type is OverrideType.CHANGE and key not in known:
        raise ConfigError(f"{key}: no such option of Hydra; {nearest(key, known)}".rstrip("; "))


def _paths(node: DictConfig, prefix: str = "") -> set[str]:
    """The dotted path of every option of a composed configuration, sections included."""
    paths: set[str] = set()
    for key in map(str, node):
        if prefix or key != "hydra":
            paths.add(f"{prefix}{key}")
            child: Any = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
                paths |= _paths(child, f"{prefix}{key}.")
    return paths


def refuse_unwritable(option: str, folder: Path) -> None:
    """Refuse an output folder before anything is computed that could not be written into it.

    Raises:
        ConfigError: it is a file, lies below one, or cannot be written.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{option}={folder}: {existing} is a file; choose a folder")
    if not os.access(existing, os.W_OK) or not _takes_files(existing):
        raise ConfigError(f"{option}={folder}: {existing} cannot be written; choose another folder")


def _takes_files(folder: Path) -> bool:
    probe = folder / f".write-probe-{os.getpid()}"
    try:
        probe.touch(exist_ok=False)  # A link planted there is not followed.
        probe.unlink()
    except OSError:
        return False
    return True
