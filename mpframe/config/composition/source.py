"""Where Hydra composes from, as the flags of a command line say.

--config-dir=FOLDER    is searched before the shipped conf/, as are the folders of hydra.searchpath
--config-path=FOLDER   takes the place of the shipped conf/
--config-name=NAME     the primary configuration in one of them
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hydra import initialize_config_dir, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mpframe.config.composition.flags import source_flags
from mpframe.config.composition.overrides import parsed
from mpframe.config.locations import CONF
from mpframe.errors import ConfigError

PRIMARY = "config"
"""The name of the shipped primary configuration."""
_PACKAGE = "pkg://"
_SEARCHED = "hydra.searchpath"


@dataclass(frozen=True)
class Source:
    """Where a configuration is composed from.

    Attributes:
        name: of the primary configuration.
        place: a folder, absolute, or `pkg://` and a package.
        further: a folder that is searched besides, absolute; None: there is none.
        searched: what hydra.searchpath adds, `file://` and a folder or `pkg://` and a package.
    """

    name: str = PRIMARY
    place: str = str(CONF)
    further: str | None = None
    searched: tuple[str, ...] = ()

    @property
    def own_folders(self) -> list[Path]:
        """The folders among them that are not mpframe's own, without those of hydra.searchpath."""
        named = [place for place in (self.place, self.further) if place]
        return [Path(p) for p in named if _PACKAGE not in p and not _is_shipped(p)]

    @property
    def first(self) -> list[str]:
        """What is searched before the shipped conf/: a user's file stands for one of that name.

        Raises:
            ConfigError: a primary configuration there would stand for the shipped one.
        """
        if not _is_shipped(self.place):
            return []
        named = [f"file://{self.further}"] if self.further else []
        places = [place for place in (*named, *self.searched) if not _is_shipped(place)]
        for file in (f"{place.removeprefix('file://')}/{PRIMARY}.yaml" for place in places):
            if self.name == PRIMARY and os.path.exists(file):
                raise ConfigError(
                    f"{file}: would stand for mpframe's; rename it and add --config-name=NAME"
                )
        return places


SHIPPED = Source()


def _is_shipped(place: str) -> bool:
    path = place.removeprefix("file://")
    return place == f"{_PACKAGE}mpframe.conf" or Path(path).resolve() == CONF


def source_of(flags: argparse.Namespace, words: Sequence[str]) -> Source:
    """The source that parsed flags and words name."""
    place = str(flags.config_path or CONF)
    source = Source(
        name=str(flags.config_name or PRIMARY).removesuffix(".yaml"),
        place=place if _PACKAGE in place else str(Path(place).absolute()),
        further=str(Path(flags.config_dir).absolute()) if flags.config_dir else None,
    )
    given = [o.value() for o in parsed([w for w in words if w.startswith(f"{_SEARCHED}=")])]
    found = given[0] if given else _searched_by(source)
    return replace(source, searched=tuple(map(str, found)) if isinstance(found, list) else ())


def _searched_by(source: Source) -> Any:
    """What a user's own primary configuration adds; Hydra itself says what is wrong with it."""
    for folder in source.own_folders:
        with suppress(OSError, YAMLError, OmegaConfBaseException):
            config = OmegaConf.load(folder / f"{source.name}.yaml")
            return list(OmegaConf.select(config, _SEARCHED) or ())
    return []


def stand_ins(hydra: DictConfig) -> Iterator[str]:
    """A line for each choice of a job that a user's file of the same name makes.

    Args:
        hydra: Hydra's own section of the job.
    """
    folders = [own.path for own in hydra.runtime.config_sources if own.schema == "file"]
    for group, choice in hydra.runtime.choices.items():
        name = f"{group}/{choice}.yaml"
        folder = next((own for own in folders if os.path.isfile(f"{own}/{name}")), str(CONF))
        if not _is_shipped(folder) and (CONF / name).is_file():
            yield f"{group}={choice}: {folder}/{name} stands for mpframe's file of that name"


def take_source(
    arguments: list[str], advice: str = "give option=value"
) -> tuple[Source, list[str]]:
    """Separate the flags that name a source from the `option=value` words.

    Args:
        arguments: a command line whose only flags are these.
        advice: what to do instead of another flag.

    Raises:
        ConfigError: there is another flag, or no such folder.
    """
    flags, words = source_flags(arguments)
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such option; {advice}")
    return source_of(flags, words), words


@contextmanager
def hydra_over(source: Source = SHIPPED) -> Iterator[None]:
    """Within the block Hydra composes from a source."""
    package = source.place.removeprefix(_PACKAGE).replace("/", ".")
    settings = {"version_base": "1.3", "job_name": "train"}
    with (
        own_folders_first(source),
        initialize_config_module(package, **settings)
        if source.place.startswith(_PACKAGE)
        else initialize_config_dir(source.place, **settings),
    ):
        yield


@contextmanager
def own_folders_first(source: Source) -> Iterator[None]:
    """Within the block a search path that Hydra makes has the user's folders before mpframe's."""
    Plugins.instance().register(_OwnFolders)
    _OwnFolders.first = source.first
    _OwnFolders.last = source.further
    try:
        yield
    finally:
        _OwnFolders.first, _OwnFolders.last = [], None


class _OwnFolders(SearchPathPlugin):
    """Hydra itself puts the folders of --config-dir and hydra.searchpath last."""

    first: ClassVar[list[str]] = []
    last: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for place in reversed(self.first):
            search_path.prepend("own", place, "main")
        if self.last:
            search_path.append("command-line", f"file://{self.last}")
