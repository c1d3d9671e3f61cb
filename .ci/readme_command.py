"""Prints the README's command marked `<!-- command: NAME -->`, so that CI runs what it says.

python .ci/readme_command.py tests
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def readme_command(name: str) -> str:
    """The shell block that follows the marker `<!-- command: name -->`."""
    found = re.search(
        rf"<!-- command: {re.escape(name)} -->\s*```(?:bash|sh)\n(.*?)```", README.read_text(), re.S
    )
    if found is None:
        raise SystemExit(f"README.md has no block marked <!-- command: {name} -->")
    return found[1].strip()


if __name__ == "__main__":
    print(readme_command(sys.argv[1]))
