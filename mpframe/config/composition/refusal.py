"""Why Hydra refused a command line, in one line, found out after it has ended."""

import argparse

from hydra.errors import MissingConfigException

from mpframe.config.composition.composing import refusal
from mpframe.config.composition.overrides import parsed, rewritten
from mpframe.config.composition.source import Source, hydra_over, source_of
from mpframe.config.locations import CONF
from mpframe.errors import ConfigError, nearest


def refusal_of(error: Exception, flags: argparse.Namespace, words: list[str]) -> ConfigError:
    """Look the words of a command line through for what Hydra could not compose.

    Args:
        error: what Hydra raised.
        flags: of the command line; they say where Hydra composes from.
        words: as they were typed.
    """
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
