"""How much memory a run has used at most."""

import sys

import torch

if sys.platform != "win32":  # Imported now: later a process may have no file left to open.
    import resource


def peak_memory() -> int:
    """The most memory in use at once so far, in bytes.

    On CUDA what torch allocated on the device; elsewhere the process's resident memory (0 on
    Windows, which does not tell).
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes elsewhere than on macOS
