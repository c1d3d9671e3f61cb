"""Write docs/options.md: the twin of `mpframe options`, with a place for the page."""

import sys
from pathlib import Path

from mpframe.cli.main import start

PAGE = Path(__file__).parent.parent / "docs" / "options.md"

if __name__ == "__main__":
    start("options", sys.argv[1:] or [f"out={PAGE}"])
