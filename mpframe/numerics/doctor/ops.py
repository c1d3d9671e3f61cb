"""Which ops of this model run where they should not, or slower than they could."""

from collections.abc import Iterator

from mpframe.numerics.doctor.subject import Subject
from mpframe.numerics.hints import Finding, few, note, warning
from mpframe.numerics.remedies import deny_words, pin_words
from mpframe.precision.dtype_map import Row
from mpframe.precision.module_ops import op_of

NORMS = (
    "batch_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "local_response_norm",
    "rms_norm",
)
_TILE = 8  # half values that a tensor core takes at once: 16 bytes


def check_norms(subject: Subject) -> Iterator[Finding]:
    """Norms that run in half."""
    if subject.half is None:
        return
    half = subject.policy.half
    norms = [(row, op) for row in subject.rows if (op := _op(subject, row)) in NORMS]
    stored = [row.module for row, _ in norms if row.storage == subject.half]
    computed = {op: row.module for row, op in norms if row.compute == half}
    if stored:
        yield warning(
            f"{few(stored)}: norms stored and computed in {half}; their sums lose small terms",
            *(("ops=default",) if subject.policy.ops.empty else _unlisted(subject, norms)),
        )
    elif computed:
        yield note(
            f"{few(computed.values())}: norms with {half} inputs and outputs; the kernels sum in "
            "fp32 and each output is rounded once",
            *_unlisted(subject, norms),
        )


def check_dimensions(subject: Subject) -> Iterator[Finding]:
    """Dimensions of half products, set by an option, that tensor cores pad."""
    half = subject.policy.half
    products = [row for row in subject.rows if row.compute == half]
    sizes = {size for row in products for size in _sizes(subject, row)}
    options = {
        path: value
        for path, value in subject.options.items()
        if isinstance(value, int) and not isinstance(value, bool) and value % _TILE
        if (path.startswith("model.") and value in sizes) or path == "dataset.batch_size"
    }
    fixed = {subject.options.get("dataset.classes"), subject.options.get("dataset.channels")}
    options = {path: value for path, value in options.items() if value not in fixed}
    if options and products:
        yield note(
            f"{few(f'{path}={value}' for path, value in options.items())}: not a multiple of "
            f"{_TILE}; tensor cores compute {half} products in tiles of it",
            *(f"{path}={-(-value // _TILE) * _TILE}" for path, value in options.items()),
        )


def _op(subject: Subject, row: Row) -> str:
    return op_of(subject.trainer.model.get_submodule(row.module)) or ""


def _sizes(subject: Subject, row: Row) -> list[int]:
    module = subject.trainer.model.get_submodule(row.module)
    return [size for p in module.parameters(recurse=False) if p.ndim >= 2 for size in p.shape[:2]]


def _unlisted(subject: Subject, norms: list[tuple[Row, str]]) -> tuple[str, ...]:
    """The words that run these norms in fp32: out of `allow`, and out of their pins to half."""
    concerned = [
        (row, op)
        for row, op in norms
        if row.compute == subject.policy.half or row.storage == subject.half
    ]
    pins = [row.module for row, _ in concerned if subject.policy.format_pin_of(row.module)]
    listed = sorted({op for row, op in concerned if row.module not in pins})
    return (*deny_words(listed), *pin_words(pins))
