"""Memory that a step frees stays with the process, for the next step (glibc on Linux).

glibc gives a large tensor memory of its own and returns it to the kernel as soon as the tensor is
freed. The next step asks for it again, and the kernel fills every page of it with zeros first: in
models with many parameters that may take longer than the computing.
"""

import ctypes
import platform
from typing import Any

# <malloc.h>; -1 and 0 are the values with which the manual of mallopt(3) turns both off.
_TRIM_THRESHOLD, _NEVER = -1, -1
_MMAP_MAX, _NONE = -4, 0


def keep_freed_memory() -> bool:
    """Let this process keep the memory it frees, from now on to its end.

    A program calls it once, before its first step. The process takes more memory, as what is kept
    does not always fit what is asked for next: before glibc 2.38 an aligned request, as all of
    torch's are, seldom fits into the space of its like.

    Returns:
        False where the C library is another one, and nothing was changed.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = _c_library()
    return all((library.mallopt(_TRIM_THRESHOLD, _NEVER), library.mallopt(_MMAP_MAX, _NONE)))


def _c_library() -> Any:
    return ctypes.CDLL(None)
