"""Half that a CPU emulates, or computes slowly."""

from collections.abc import Iterator

import torch

from mpframe.numerics.doctor.subject import Subject
from mpframe.numerics.hints import Finding, note, warning
from mpframe.precision.policy import has_native_half


def check_emulation(subject: Subject) -> Iterator[Finding]:
    """Half on a CPU: emulated, or in kernels that are much slower than fp32's."""
    policy = subject.policy
    if subject.half is None or subject.device.type != "cpu":
        return
    if policy.emulates(subject.device):
        yield note(
            f"dtype.half={policy.half} on cpu is emulated: the numbers are a tensor core's, the "
            "speed and memory are not",
            _native(policy.half),
        )
    elif not has_native_half(policy.half):
        yield warning(
            f"dtype.compute=native: this cpu has no {policy.half} products, and PyTorch's kernels "
            "for them are many times slower than fp32's",
            "dtype.compute=auto",
        )


def _native(half: str) -> str:
    if torch.cuda.is_available():
        return "device=cuda"
    other = half == "float16" and has_native_half("bfloat16")
    return "dtype.half=bfloat16" if other else "dtype=fp32"
