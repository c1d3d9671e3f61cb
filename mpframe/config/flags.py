"""The flags of a command line, which are Hydra's, and which of them do not go together."""

import argparse
from pathlib import Path

from mpframe.errors import ConfigError

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")


def parsed_flags(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags by name, and the `option=value` words between them, in order.

    Raises:
        ConfigError: a flag is unknown, lacks its value, or does not go with another one.
    """
    try:
        flags, rest = _parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}; see --help") from None
    _refuse_unfit(flags, rest)
    return flags, [*flags.overrides, *rest]


def _parser() -> argparse.ArgumentParser:
    """Hydra's flags, as its documentation lists them."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=_INFO)
    for switch in ("--help/-h", "--run/-r", "--multirun/-m", "--shell-completion/-sc"):
        parser.add_argument(*switch.split("/"), action="store_true")
    for switch in ("--hydra-help", "--version", "--resolve"):
        parser.add_argument(switch, action="store_true")
    for flag in ("--package/-p", "--config-path/-cp", "--config-name/-cn", "--config-dir/-cd"):
        parser.add_argument(*flag.split("/"))
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
    if flags.shell_completion and not any(
        word.startswith(("install=", "uninstall=", "query=")) for word in flags.overrides
    ):
        raise ConfigError("--shell-completion: add install=SHELL or uninstall=SHELL, e.g. bash")
    if flags.config_dir is not None and not Path(flags.config_dir).is_dir():
        raise ConfigError(
            f"--config-dir={flags.config_dir}: no such folder; name one with .yaml files"
        )
