"""Says before training what will go wrong, and which option mends it.

Each check looks at a `Patient`, a trainer built as for training, and answers with findings. Nothing
is written, and whatever a check tried is undone.

    numbers    eps, learning rate, betas in the optimizer's format
    weights    their range in half, and where they were trained
    ops        activations, BCELoss, norms, dimensions
    scaling    the loss scale against the gradients of the first batch
    speed      emulation, waits for the data
"""

from collections.abc import Callable, Iterable

from mpframe.numerics.doctor.finding import Finding, Severity
from mpframe.numerics.doctor.numbers import check_masters, check_numbers
from mpframe.numerics.doctor.ops import (
    check_activations,
    check_binary_cross_entropy,
    check_dimensions,
    check_norms,
)
from mpframe.numerics.doctor.patient import Patient
from mpframe.numerics.doctor.scaling import check_scaling
from mpframe.numerics.doctor.speed import check_emulation, check_loading
from mpframe.numerics.doctor.weights import check_birth, check_small_weights, check_weight_range

CHECKS: tuple[Callable[[Patient], Iterable[Finding]], ...] = (
    check_numbers,
    check_masters,
    check_weight_range,
    check_small_weights,
    check_birth,
    check_activations,
    check_binary_cross_entropy,
    check_norms,
    check_dimensions,
    check_scaling,
    check_emulation,
    check_loading,
)

__all__ = ["CHECKS", "Finding", "Patient", "Severity", "examine"]


def examine(patient: Patient) -> list[Finding]:
    """The findings of all checks, the worst first."""
    found = [finding for check in CHECKS for finding in check(patient)]
    return sorted(found, key=lambda finding: finding.severity)
