"""The program `mpframe COMMAND ...`: finds the command and starts it.

A command is a module with a function `main`. It is imported when it is started, so that help, a
version and a misspelt name are answered without torch. The module's docstring is the command's
help, and its first line appears in `mpframe --help`.

For tab completion, after `eval "$(mpframe -sc install=bash)"`, the shell calls
`mpframe -sc query=bash` with the typed line in COMP_LINE. The command is completed here, its
options by Hydra.
"""

import ast
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from mpframe import __version__
from mpframe.core.errors import ConfigError, nearest
from mpframe.files.text import one_line_exit, say

COMMANDS = (
    *("new", "train", "evaluate", "predict", "export", "report"),
    *("doctor", "plan", "autopsy", "search", "simulate", "options"),
)
"""The commands, each a module of commands/, in the order of the help."""
_OVERVIEW = """mpframe: training in which precision is a first-class, inspectable choice

Usage: mpframe COMMAND [option=value ...]

{commands}

mpframe COMMAND --help   what a command does, examples, its options
mpframe --version        the versions of mpframe and of what it runs on"""
_HELP = {"--help", "-h"}
_VERSION = "--version"


def main(arguments: list[str] | None = None) -> None:
    """Start the command that the first word names, by default of the command line."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in _HELP:
        say(overview())
    elif given[0] == _VERSION:
        say(versions())
    elif given[0] in ("-sc", "--shell-completion"):
        _complete(given)
    else:
        name, *rest = given
        with one_line_exit():
            if name not in COMMANDS:
                hint = nearest(name, COMMANDS, 1) or "known: " + ", ".join(COMMANDS)
                raise ConfigError(f"{name}: no such command; {hint}; see mpframe --help")
        start(name, rest, f"mpframe {name}")


def start(name: str, arguments: list[str] | None = None, program: str | None = None) -> None:
    """Start a command, or answer its `--help` or `--version`.

    `arguments`, and the `program` typed before them, default to the command line's.
    """
    # Before torch is loaded. Threads that wait by spinning fight other programs for the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.argv = [program or sys.argv[0], *(sys.argv[1:] if arguments is None else arguments)]
    if _VERSION in sys.argv:
        say(versions())
    elif name != "train" and not _HELP.isdisjoint(sys.argv):  # Hydra shows the help of train.
        say(help_of(name))
    else:
        import_module(f"mpframe.cli.commands.{name}").main()


def overview() -> str:
    """Return the answer to `mpframe --help`: a line for each command."""
    width = max(map(len, COMMANDS))
    lines = [f"    {name:{width}}  {help_of(name).splitlines()[0]}" for name in COMMANDS]
    return _OVERVIEW.format(commands="\n".join(lines))


def help_of(name: str) -> str:
    """Return the docstring of a command's module, which is read and not run."""
    module = Path(__file__).parent / "commands" / f"{name}.py"
    return ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""


def versions() -> str:
    """Return the versions a bug report needs, in one line."""
    torch, hydra = version("torch"), version("hydra-core")
    python = platform.python_version()
    return f"mpframe {__version__}, torch {torch}, hydra-core {hydra}, Python {python}"


def _complete(arguments: list[str]) -> None:
    """Print the commands that complete the line, or let Hydra complete an option."""
    program, _, typed = os.environ.get("COMP_LINE", "").partition(" ")
    name, space, options = typed.partition(" ")
    if not space and any(word.startswith("query=") for word in arguments):
        print(" ".join(command for command in COMMANDS if command.startswith(name)))
    else:
        # Hydra reads a program and its options.
        os.environ["COMP_LINE"] = f"{program} {options}"
        start("train", arguments, "mpframe")
