"""A measurement in a new Python process: what one leaves behind does not touch the next."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mpframe.core.errors import MpframeError


def run_python(arguments: Sequence[str], folder: Path, name: str, expected: int = 0) -> str:
    """Run Python with `arguments` in `folder`, and wait for its end.

    Args:
        arguments: of Python.
        folder: the process's working folder.
        name: for the error: the group, and in quotes what is measured.
        expected: the exit code.

    Returns:
        The text it printed.

    Raises:
        MpframeError: it ended with another exit code.
    """
    scripts, root = map(str, Path(__file__).resolve().parents[1:3])
    paths = os.pathsep.join([scripts, root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if done.returncode != expected:
        lines = done.stderr.strip().splitlines() or [""]
        # torchrun frames the ranks' errors with lines of its own.
        said = [line for line in lines if re.search(r"\w(Error|Exception): \S", line)]
        raise MpframeError(
            f"{name} ended with exit code {done.returncode}, expected {expected}: "
            f"{(said or lines)[-1]}; run it by itself to see more"
        )
    return done.stdout
