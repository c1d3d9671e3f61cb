"""The machine that a benchmark ran on: without it, a time says nothing."""

import datetime
import os
import platform
import re
import sys
from pathlib import Path

import torch

from mpframe.precision.policy import has_native_half


def machine() -> dict[str, str]:
    """Date, hardware, versions and how busy the machine was, in words."""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{_cpu()}, {_cores()} cores usable, load average {load} at the start",
        "CPU instructions": f"{torch.backends.cpu.get_cpu_capability()}, bfloat16 products "
        + ("native" if has_native_half("bfloat16") else "emulated"),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "waiting threads": os.environ.get("OMP_WAIT_POLICY", "as OpenMP likes"),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "command": ("python " if sys.argv[0].endswith(".py") else "") + " ".join(sys.argv),
    }


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", facts.read_text()) if facts.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def _cores() -> int:
    """Those this process may use, which a container can limit below those there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
