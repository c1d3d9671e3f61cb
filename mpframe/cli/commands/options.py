"""Print the page of all options: types, defaults, ranges, meanings.

Usage: mpframe options [out=FILE.md]

    mpframe options
    mpframe options out=options.md

Options:
    out=FILE.md     default: the page is printed
"""

import sys
from pathlib import Path

from mpframe.cli.program import program, refuse_words
from mpframe.config.options_page import options_page
from mpframe.config.output_folder import refuse_unwritable
from mpframe.console import take_options
from mpframe.files.durable import write_atomically

_OPTIONS = ("out",)


def main(arguments: list[str] | None = None) -> None:
    """Print the page, or write it.

    Args:
        arguments: `out=FILE.md`; the command line if None.
    """
    with program():
        own, rest = take_options(sys.argv[1:] if arguments is None else arguments, _OPTIONS)
        refuse_words(rest, _OPTIONS)
        if not own.get("out"):
            print(options_page(), end="")
            return
        out = Path(own["out"])
        refuse_unwritable("out", out.parent)
        write_atomically(out, options_page())
