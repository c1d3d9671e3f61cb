"""The program `mpframe COMMAND ...`: finds the command and starts it.

A command is a module with a function `main`. It is imported when it is started, so that help, a
version and a misspelt name are answered without torch. The module's docstring is the command's
help, and the first line of it is the command's line in `mpframe --help`.

Tab completion, after `eval "$(mpframe -sc install=bash)"`: the shell calls `mpframe -sc query=bash`
with the line that is typed in COMP_LINE. The command is completed here, its options by Hydra.
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
_COMPLETION = {"-sc", "--shell-completion"}
_LINE = "COMP_LINE"


def main(arguments: list[str] | None = None) -> None:
    """Start the command that the first word names; its words are the command line's if None."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in _HELP:
        _say(overview())
    elif given[0] == _VERSION:
        _say(versions())
    elif given[0] in _COMPLETION:
        if not _complete_command(given):
            start("train", given, "mpframe")
    else:
        name, *rest = given
        with one_line_exit():
            if name not in COMMANDS:
                hint = nearest(name, COMMANDS, 1) or "known: " + ", ".join(COMMANDS)
                raise ConfigError(f"{name}: no such command; {hint}; see mpframe --help")
        start(name, rest, f"mpframe {name}")


def start(name: str, arguments: list[str] | None = None, program: str | None = None) -> None:
    """Start a command, or answer its `--help` or `--version`.

    Without `arguments` and the `program` that was typed before them they are the command line's.
    """
    sys.argv = [program or sys.argv[0], *(sys.argv[1:] if arguments is None else arguments)]
    if _VERSION in sys.argv:
        _say(versions())
    elif name != "train" and not _HELP.isdisjoint(sys.argv):  # Hydra shows the help of train.
        _say(help_of(name))
    else:
        import_module(COMMANDS[name]).main()


def overview() -> str:
    """Return what `mpframe --help` says: a line for each command."""
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
    """Return the docstring of a command's module, which is read and not run."""
    spec = find_spec(COMMANDS[name])
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(COMMANDS[name])
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""


def versions() -> str:
    """Return the versions a bug report needs, in one line."""
    known = [f"mpframe {__version__}"]
    for name in ("torch", "hydra-core"):
        try:
            known.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            known.append(f"{name} of unknown version")
    return ", ".join([*known, f"Python {platform.python_version()}"])


def _complete_command(arguments: list[str]) -> bool:
    """Print the commands that the line may go on with; False if it is Hydra's turn.

    If the line has its command, that is taken out: Hydra reads a program and its options.
    """
    if not any(word.startswith("query=") for word in arguments):
        return False
    program, _, typed = os.environ.get(_LINE, "").partition(" ")
    name, space, options = typed.partition(" ")
    if not space:
        print(" ".join(command for command in COMMANDS if command.startswith(name)))
        return True
    os.environ[_LINE] = f"{program} {options}"
    return False


def _say(text: str) -> None:
    """Print; a reader may stop before the end, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python writes what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
