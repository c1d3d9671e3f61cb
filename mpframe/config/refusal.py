"""Why Hydra refused a command line, in one line, found out after it has ended."""

import argparse
from pathlib import Path

from hydra.errors import MissingConfigException

from mpframe.config.composing import PRIMARY, hydra_over, one_line, refusal
from mpframe.config.locations import CONF
from mpframe.config.overrides import parsed, rewritten
from mpframe.errors import ConfigError


def refusal_of(error: Exception, flags: argparse.Namespace, words: list[str]) -> ConfigError:
    """Look the words of a command line through for what Hydra could not compose.

    Args:
        error: what Hydra raised.
        flags: of the command line; they say where Hydra composes from.
        words: as they were typed.
    """
    name = str(flags.config_name or PRIMARY).removesuffix(".yaml")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file == name:
        return ConfigError(
            f"--config-name={name}: no {name}.yaml in {flags.config_dir or CONF}; add "
            "--config-dir=FOLDER"
        )
    folders = _folders(flags)
    if folders is None:
        return ConfigError(one_line(error))
    primary = next((place for place in folders if (place / f"{name}.yaml").is_file()), folders[0])
    others = ",".join(f"file://{place}" for place in folders if place != primary)
    job = [o for o in parsed(rewritten(words)) if not (flags.multirun and o.is_sweep_override())]
    search = [f"hydra.searchpath=[{others}]"] if others else []
    with hydra_over(primary):
        return refusal(error, [*search, *(str(o.input_line) for o in job)], name)


def _folders(flags: argparse.Namespace) -> list[Path] | None:
    """Where Hydra composes from; None if that is no folder of files."""
    path = str(flags.config_path or CONF)
    if "://" in path:
        return None
    further = [Path(flags.config_dir).absolute()] if flags.config_dir else []
    return [Path(__file__).parents[1] / "cli" / path, *further]
