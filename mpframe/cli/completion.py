"""Tab completion of `mpframe COMMAND option=value`: the command here, the options by Hydra.

    eval "$(mpframe -sc install=bash)"

The shell then calls `mpframe -sc query=bash`, with the line that is typed in COMP_LINE.
"""

import os
from collections.abc import Iterable

FLAGS = {"-sc", "--shell-completion"}
_LINE = "COMP_LINE"


def complete_command(arguments: list[str], commands: Iterable[str]) -> bool:
    """Print the commands that the line may go on with; False if it is Hydra's turn.

    If the line has its command, that is taken out: Hydra reads a program and its options.

    Args:
        arguments: of the program.
        commands: all there are.
    """
    if not any(word.startswith("query=") for word in arguments):
        return False
    program, _, typed = os.environ.get(_LINE, "").partition(" ")
    name, space, options = typed.partition(" ")
    if not space:
        print(" ".join(own for own in commands if own.startswith(name)))
        return True
    os.environ[_LINE] = f"{program} {options}"
    return False
