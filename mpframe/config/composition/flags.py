"""The flags of a command line, which are Hydra's, and which of them do not go together.

The three that say where a configuration is composed from are flags of the other commands, too.
"""

import argparse
from pathlib import Path
from typing import NoReturn

from mpframe.errors import ConfigError

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")


def parsed_flags(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags by name, and the `option=value` words between them, in order.

    Raises:
        ConfigError: a flag is unknown, lacks its value, or does not go with another one.
    """
    flags, rest = _parsed(_parser(), arguments)
    _refuse_unfit(flags, rest)
    return flags, [*flags.overrides, *rest]


def source_flags(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Of the flags those that say where Hydra composes from, and all other arguments, in order.

    Raises:
        ConfigError: a flag lacks its value, or names no folder.
    """
    flags, rest = _parsed(_source_parser(), arguments)
    _refuse_unfit_source(flags)
    return flags, rest


def _parsed(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}; see --help") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse in one line, and not by printing the usage, e.g. an ambiguous abbreviation."""
        raise ConfigError(f"{message}; see --help")


def _source_parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, exit_on_error=False, allow_abbrev=False)
    for flag in ("--config-path/-cp", "--config-name/-cn", "--config-dir/-cd"):
        parser.add_argument(*flag.split("/"))
    return parser


def _parser() -> argparse.ArgumentParser:
    """Hydra's flags, as its documentation lists them."""
    parser = _Parser(add_help=False, exit_on_error=False, parents=[_source_parser()])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=_INFO)
    for switch in ("--help/-h", "--run/-r", "--multirun/-m", "--shell-completion/-sc"):
        parser.add_argument(*switch.split("/"), action="store_true")
    for switch in ("--hydra-help", "--version", "--resolve"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--experimental-rerun")
    return parser


def _refuse_unfit(flags: argparse.Namespace, rest: list[str]) -> None:
    if flags.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun={flags.experimental_rerun}: reads a pickle, which may run "
            "code; give the run's options again, or continue it with resume=auto"
        )
    for word in rest:
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such flag; write options as option=value; see --help")
    commands = [name for name in _COMMANDS if getattr(flags, name)]
    if len(commands) > 1:
        both = " and ".join(f"--{name.replace('_', '-')}" for name in commands)
        raise ConfigError(f"{both}: do not go together; give one of them")
    if flags.resolve and not (flags.cfg or flags.help):
        raise ConfigError("--resolve: goes with --cfg or --help; add --cfg=job")
    if flags.package and not flags.cfg:
        raise ConfigError(f"--package={flags.package}: goes with --cfg; add --cfg=job")
    if flags.shell_completion and not any(
        word.startswith(("install=", "uninstall=", "query=")) for word in flags.overrides
    ):
        raise ConfigError("--shell-completion: add install=SHELL or uninstall=SHELL, e.g. bash")
    _refuse_unfit_source(flags)


def _refuse_unfit_source(flags: argparse.Namespace) -> None:
    path, folder = flags.config_path, flags.config_dir
    if path is not None and "://" not in path and not Path(path).is_dir():
        raise ConfigError(f"--config-path={path}: no such folder; name one with .yaml files")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--config-dir={folder}: no such folder; name one with .yaml files")
