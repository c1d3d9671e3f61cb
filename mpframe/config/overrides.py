"""The words of a command line: Hydra's flags, `option=value`, and where Hydra composes from.

    --config-dir=FOLDER    is searched before the shipped conf/
    --config-path=FOLDER   replaces the shipped conf/
    --config-name=NAME     the primary configuration in one of them

All commands take these three flags. Hydra parses the overrides, and a few are rewritten for it.
"""

import argparse
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

from hydra import initialize_config_dir, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig

from mpframe.config import CONF
from mpframe.config.schema import ONE_TARGET
from mpframe.core.errors import ConfigError


def parse_flags(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate the flags by name from the `option=value` words, which keep their order."""
    parser = _Parser(add_help=False, parents=[get_args_parser()])
    flags, words = parser.parse_known_args(arguments)
    for kind, path in (("path", flags.config_path), ("dir", flags.config_dir)):
        package = kind == "path" and "://" in str(path)
        if path is not None and not package and not Path(path).is_dir():
            raise ConfigError(f"--config-{kind}={path}: no such folder; name one with .yaml files")
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such flag; write options as option=value; see --help")
    if flags.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun={flags.experimental_rerun}: reads a pickle, which may run "
            "code; give the run's options again, or continue it with resume=auto"
        )
    if flags.cfg and flags.multirun:
        raise ConfigError("--cfg and --multirun: cannot be combined; give only one")
    return flags, [*flags.overrides, *words]


def take_source(arguments: list[str]) -> tuple["Source", list[str]]:
    """Separate the flags that name a source from the `option=value` words; refuse the others."""
    flags, words = parse_flags(arguments)
    source = {"overrides", "config_path", "config_name", "config_dir"}
    for name, value in vars(flags).items():
        if value and name not in source:
            raise ConfigError(f"--{name.replace('_', '-')}: is for mpframe train; leave it out")
    return source_of(flags), words


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse in one line instead of printing the usage."""
        raise ConfigError(f"{message.removeprefix('argument ')}; see --help")


MAPPINGS = ("ops.move", "ops.modules", "optimizer.groups", "distributed.plan")
"""Options that are mappings without an entry at first."""
_PATHS = ("resume", "init_from", "hydra.run.dir", "hydra.sweep.dir")
_DECIMAL = re.compile(r"^(\d+)\.(\d+)$")
_MOVE = re.compile(r"^ops\.(allow|deny|infer)([+-])=\[?([\w, ]+)\]?$")


def rewrite(words: list[str]) -> list[str]:
    """Return the words as Hydra takes them."""
    words = [move for word in words for move in _moves(_quote_path(word))]
    words = [f"++{word}" if word.startswith(MAPPINGS) else word for word in words]
    # A user's class gets none of the arguments of the shipped choice.
    named = {word.lstrip("+").partition("._target_=")[0] for word in words if "._target_=" in word}
    users, chosen = named & ONE_TARGET, {word.partition("=")[0] for word in words}
    options = tuple(f"{group}." for group in users)
    words = [f"++{word}" if word.startswith(options) else word for word in words]
    words = [*(f"{group}=own" for group in sorted(users - chosen)), *words]
    # Some options belong to only some choices of a swept group.
    swept = tuple(f"{o.key_or_group}." for o in parse_words(words) if o.is_sweep_override())
    return [f"++{word}" if word.startswith(swept) else word for word in words]


def parse_words(words: list[str]) -> list[Override]:
    parser = OverridesParser.create()
    overrides = []
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            what = f"{word or repr(word)}: not of the form option=value"
            reason = f"; {str(error).splitlines()[0]}" if "=" in word else ""
            raise ConfigError(what + reason) from None
        if not override.key_or_group:
            raise ConfigError(f"{word}: not of the form option=value; the option is missing")
        overrides.append(override)
    return overrides


def word_of(option: str, value: str) -> str:
    """Return the word that gives an option a text as its value, quoted if Hydra needs it."""
    word = f"{option}={value}"
    with suppress(ConfigError):  # It is none as it stands.
        plain = parse_words([word])[0]
        if not plain.is_sweep_override() and plain.value() == value:
            return word
    # Only backslashes before a quote need another one.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), value)
    return f"{option}='{escaped}'"


def pin_words(modules: Iterable[str], pin: str = "fp32") -> tuple[str, ...]:
    """Return the words that pin modules, by qualified name. The empty name is the model.

    Between braces Hydra reads `0` and `0.1`, names of layers in a Sequential, as numbers. `0` gets
    a separate word, `0.1` becomes the pattern `0?1`.
    """
    names = list(modules)
    numbered = [f"ops.modules.{name}={pin}" for name in names if name.isdigit()]
    patterns = [_DECIMAL.sub(r"\1?\2", name) or "*" for name in names if not name.isdigit()]
    together = ",".join(f"{pattern}:{pin}" for pattern in patterns)
    return (*([f"ops.modules={{{together}}}"] if patterns else []), *numbered)


def deny_words(ops: Iterable[str]) -> tuple[str, ...]:
    """Return the word that moves ops to `deny`, where they run in fp32, if there are ops."""
    listed = ",".join(ops)
    return (f"ops.deny+=[{listed}]",) if listed else ()


def _quote_path(word: str) -> str:
    """Quote a path, which may hold `=` and commas as a sweep's folder does, or begin with `~/`."""
    option, _, value = word.partition("=")
    home = value.startswith("~/") and "," not in value
    if home or (option in _PATHS and os.path.exists(value)):
        return word_of(option, os.path.expanduser(value) if home else value)
    return word


def _moves(word: str) -> list[str]:
    """Return an addition to an op list, or a removal, as moves of single ops."""
    match = _MOVE.match(word)
    if match is None:
        return [word]
    name, sign, ops = match.groups()
    to = name if sign == "+" else "none"
    return [f"++ops.move.{op.strip()}={to}" for op in ops.split(",")]


PRIMARY = "config"
"""The name of the shipped primary configuration."""
_PACKAGE = "pkg://"


@dataclass(frozen=True)
class Source:
    name: str = PRIMARY  # the primary configuration's
    place: str = str(CONF)  # an absolute folder, or `pkg://` and a package
    further: str | None = None  # an absolute folder that is also searched

    @property
    def own_folders(self) -> list[Path]:
        """The user's folders, except the ones of hydra.searchpath."""
        named = [place for place in (self.place, self.further) if place]
        return [Path(p) for p in named if _PACKAGE not in p and not _is_shipped(p)]


def _is_shipped(place: str) -> bool:
    return place == f"{_PACKAGE}mpframe.conf" or Path(place).resolve() == CONF


def source_of(flags: argparse.Namespace) -> Source:
    """Return what the flags name. ConfigError: a file there would replace mpframe's config.yaml."""
    place = str(flags.config_path or CONF)
    source = Source(
        name=str(flags.config_name or PRIMARY).removesuffix(".yaml"),
        place=place if _PACKAGE in place else str(Path(place).absolute()),
        further=str(Path(flags.config_dir).absolute()) if flags.config_dir else None,
    )
    if source.name == PRIMARY and _is_shipped(source.place):
        for file in (folder / f"{PRIMARY}.yaml" for folder in source.own_folders):
            if file.exists():
                raise ConfigError(
                    f"{file}: would replace mpframe's; rename it and add --config-name=NAME"
                )
    return source


def words_again(hydra: DictConfig) -> list[str]:
    """Return the words that train a run again; a job of a sweep is then a run by itself."""
    flags = {"main": "--config-path", "command-line": "--config-dir"}
    words = []
    for source in hydra.runtime.config_sources:
        package = f"{_PACKAGE}{source.path}" if source.schema == "pkg" else ""
        if source.provider in flags and not _is_shipped(package or source.path):
            place = package or os.path.relpath(source.path, hydra.runtime.cwd)
            words.append(f"{flags[source.provider]}={place}")
    if hydra.job.config_name != PRIMARY:
        words.append(f"--config-name={hydra.job.config_name}")
    given = [word for word in hydra.overrides.hydra if not word.startswith("hydra.mode=")]
    if hydra.mode is RunMode.MULTIRUN:  # The others say where and how the jobs run.
        given = [word for word in given if word.startswith("hydra.searchpath=")]
    words += given
    return [*dict.fromkeys(words), *hydra.overrides.task]


@contextmanager
def hydra_over(source: Source) -> Iterator[None]:
    """Context manager in which Hydra composes from a source."""
    package = source.place.removeprefix(_PACKAGE).replace("/", ".")
    settings = {"version_base": "1.3", "job_name": "train"}
    with (
        own_folder_first(source),
        initialize_config_module(package, **settings)
        if source.place.startswith(_PACKAGE)
        else initialize_config_dir(source.place, **settings),
    ):
        yield


@contextmanager
def own_folder_first(source: Source) -> Iterator[None]:
    """Context manager in which Hydra searches the folder of --config-dir before mpframe's."""
    Plugins.instance().register(_OwnFolder)
    _OwnFolder.source = source
    try:
        yield
    finally:
        _OwnFolder.source = Source()


class _OwnFolder(SearchPathPlugin):
    """A plugin, because Hydra searches the folder of --config-dir last."""

    source: ClassVar[Source] = Source()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.source.further and not _is_shipped(self.source.further):
            place = f"file://{self.source.further}"
            if _is_shipped(self.source.place):
                search_path.prepend("command-line", place, "main")  # Directly before "main".
            else:
                search_path.append("command-line", place)
