"""The program `mpframe COMMAND ...`: finds the command and starts it.

A command is a module with a function `main`. It is imported when it is started, so that help, a
version and a misspelt name are answered without torch. The module's docstring is the command's
help, and the first line of it is the command's line in `mpframe --help`.
"""

import ast
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from mpframe import __version__
from mpframe.cli import completion
from mpframe.core.errors import ConfigError, nearest
from mpframe.files.text import one_line_exit

COMMANDS = {
    "new": "mpframe.cli.commands.new",
    "train": "mpframe.cli.commands.train",
    "evaluate": "mpframe.cli.commands.evaluate",
    "predict": "mpframe.cli.commands.predict",
    "export": "mpframe.cli.commands.export",
    "report": "mpframe.cli.commands.report",
    "doctor": "mpframe.cli.commands.doctor",
    "autopsy": "mpframe.cli.commands.autopsy",
    "search": "mpframe.cli.commands.search",
    "simulate": "mpframe.cli.commands.simulate",
    "options": "mpframe.cli.commands.options",
}
"""The module of each command, in the order of the help."""
_HELP = {"--help", "-h"}
_VERSION = "--version"


def main(arguments: list[str] | None = None) -> None:
    """Start the command that the first word names.

    Args:
        arguments: the command's name and its own arguments; the command line if None.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in _HELP:
        _say(overview())
    elif given[0] == _VERSION:
        _say(versions())
    elif given[0] in completion.FLAGS:
        if not completion.complete_command(given, COMMANDS):
            start("train", given, "mpframe")
    else:
        name, *rest = given
        with one_line_exit():
            _refuse_unknown(name)
        start(name, rest, f"mpframe {name}")


def start(name: str, arguments: list[str] | None = None, program: str | None = None) -> None:
    """Start a command, or answer its `--help` or `--version`.

    Args:
        name: of the command.
        arguments: its arguments; those of the command line if None.
        program: what the user typed before them; as Python has it if None.
    """
    sys.argv = [program or sys.argv[0], *(sys.argv[1:] if arguments is None else arguments)]
    if _VERSION in sys.argv:
        _say(versions())
    elif name != "train" and not _HELP.isdisjoint(sys.argv):  # Hydra shows the help of train.
        _say(help_of(name))
    else:
        import_module(COMMANDS[name]).main()


def overview() -> str:
    """What `mpframe --help` says: a line for each command."""
    width = max(map(len, COMMANDS))
    lines = [f"    {name:{width}}  {help_of(name).splitlines()[0]}" for name in COMMANDS]
    return "\n".join(
        [
            "mpframe: training in which precision is a first-class, inspectable choice",
            "",
            "Usage: mpframe COMMAND [option=value ...]",
            "",
            *lines,
            "",
            "mpframe COMMAND --help   what a command does, examples, its options",
            "mpframe --version        the versions of mpframe and of what it runs on",
        ]
    )


def help_of(name: str) -> str:
    """The docstring of a command's module, which is read and not run."""
    spec = find_spec(COMMANDS[name])
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(COMMANDS[name])
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""


def versions() -> str:
    """The versions a bug report needs, in one line."""
    others = [f"{name} {_version_of(name)}" for name in ("torch", "hydra-core")]
    return ", ".join([f"mpframe {__version__}", *others, f"Python {platform.python_version()}"])


def _say(text: str) -> None:
    """Print; whoever reads may stop before the end, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python writes what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _refuse_unknown(name: str) -> None:
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS, 1) or "known: " + ", ".join(COMMANDS)
        raise ConfigError(f"{name}: no such command; {hint}; see mpframe --help")
