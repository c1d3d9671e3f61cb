"""The peak memory of a run, and a table of its versions, hardware, commit and command line.

Environment variables are never shown, nor secrets on the command line: the value of an option named
like one or holding a key named like one, passwords inside addresses, and the value of an
environment variable named like one.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from mpframe.config.redaction import HIDDEN, SECRET_NAME, hide, secrets_of
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.files.text import markdown

# In a mapping, `{API_KEY: abc}`, or in an address, `?token=abc`.
_SECRET_KEY = re.compile(rf"(?:{SECRET_NAME.pattern})[\w.-]*['\"]?\s*[:=]", re.IGNORECASE)
PASSWORD_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def environment_text() -> str:
    """Return a Markdown table of the surroundings of a run, which its config does not have."""
    rows = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _package("torchvision"),
        "mpframe": _package("mpframe"),
        "device": _accelerators(),
        "cpu": _cpu(),
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
        "platform": platform.platform(),
        "git commit": _commit(),
        "command": f"`{format_command(sys.argv, os.environ)}`",
    }
    return markdown([("", ""), *rows.items()])


def arithmetic(device: torch.device, comm: Comm = SINGLE_PROCESS) -> dict[str, str]:
    """Return the facts besides the configuration that may change the last bit of a sum."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "world_size": str(comm.size),
        "weights": "whole" if comm.sharding is None else "divided",
    }


def format_command(arguments: Iterable[str], environment: Mapping[str, str]) -> str:
    """Return the command line, each secret in it, from `environment` or by name, as `***`."""
    arguments = list(arguments)
    secrets = secrets_of(arguments, environment)
    program, *words = (_without_secrets(argument, secrets) for argument in arguments)
    return f"{program} {shlex.join(words)}".rstrip()  # "mpframe train" is two words, not a name.


def _without_secrets(argument: str, secrets: Sequence[str]) -> str:
    name, equals, value = argument.partition("=")
    if SECRET_NAME.search(name) or _SECRET_KEY.search(value):
        return f"{name}={HIDDEN}" if equals else HIDDEN
    return PASSWORD_IN_ADDRESS.sub(HIDDEN, hide(argument, secrets))


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _accelerators() -> str:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{', '.join(names)} (CUDA {torch.version.cuda})"
    return "mps" if torch.backends.mps.is_available() else "cpu only"


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    text = facts.read_text() if facts.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit of the working folder, `-dirty` if tracked files differ from it."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.strip()


if sys.platform != "win32":  # Imported now: later a process may have no file left to open.
    import resource


def peak_memory() -> int:
    """Return the most memory in use at once so far, in bytes: torch's with CUDA, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":  # Not known there.
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes elsewhere than on macOS
