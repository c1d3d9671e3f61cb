"""Where Hydra composes from, as the flags of a command line say.

--config-dir=FOLDER    is searched besides the shipped conf/
--config-path=FOLDER   takes the place of the shipped conf/
--config-name=NAME     the primary configuration in one of them
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hydra import initialize_config_dir, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from mpframe.config.composition.flags import source_flags
from mpframe.config.locations import CONF
from mpframe.errors import ConfigError

PRIMARY = "config"
"""The name of the shipped primary configuration."""
_PACKAGE = "pkg://"


@dataclass(frozen=True)
class Source:
    """Where a configuration is composed from.

    Attributes:
        name: of the primary configuration.
        place: a folder, absolute, or `pkg://` and a package.
        further: a folder that is searched besides, absolute; None: there is none.
    """

    name: str = PRIMARY
    place: str = str(CONF)
    further: str | None = None

    @property
    def own_folders(self) -> list[Path]:
        """The folders among them that are not mpframe's own."""
        named = [place for place in (self.place, self.further) if place]
        return [Path(p) for p in named if _PACKAGE not in p and Path(p).resolve() != CONF]


SHIPPED = Source()


def source_of(flags: argparse.Namespace) -> Source:
    """The source that parsed flags name."""
    place = str(flags.config_path or CONF)
    return Source(
        name=str(flags.config_name or PRIMARY).removesuffix(".yaml"),
        place=place if _PACKAGE in place else str(Path(place).absolute()),
        further=str(Path(flags.config_dir).absolute()) if flags.config_dir else None,
    )


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
    return source_of(flags), words


@contextmanager
def hydra_over(source: Source = SHIPPED) -> Iterator[None]:
    """Within the block Hydra composes from a source."""
    Plugins.instance().register(_FurtherFolder)
    _FurtherFolder.folder = source.further
    package = source.place.removeprefix(_PACKAGE).replace("/", ".")
    settings = {"version_base": "1.3", "job_name": "train"}
    try:
        with (
            initialize_config_module(package, **settings)
            if source.place.startswith(_PACKAGE)
            else initialize_config_dir(source.place, **settings)
        ):
            yield
    finally:
        _FurtherFolder.folder = None


class _FurtherFolder(SearchPathPlugin):
    """Adds a folder to those that Hydra searches, as hydra.main does for --config-dir."""

    folder: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder:
            search_path.append("command-line", f"file://{self.folder}")
