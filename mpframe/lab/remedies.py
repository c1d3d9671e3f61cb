"""The remedies of autopsy, doctor and search as words for the command line: Hydra's overrides."""

import re
from collections.abc import Iterable

_DECIMAL = re.compile(r"^(\d+)\.(\d+)$")


def pin_words(modules: Iterable[str], pin: str = "fp32") -> tuple[str, ...]:
    """Return the words that pin modules, by qualified name. The empty name is the model.

    Between braces Hydra reads `0` and `0.1`, names of layers in a Sequential, as numbers. `0` gets
    a separate word, `0.1` becomes the pattern `0?1`.
    """
    names = list(modules)
    numbered = [f"ops.modules.{name}={pin}" for name in names if name.isdigit()]
    patterns = [_DECIMAL.sub(r"\1?\2", name) or "*" for name in names if not name.isdigit()]
    together = ",".join(f"{pattern}:{pin}" for pattern in patterns)
    return (*([f"ops.modules={{{together}}}"] if patterns else []), *numbered)


def deny_words(ops: Iterable[str]) -> tuple[str, ...]:
    """Return the word that moves ops to `deny`, where they run in fp32, if there are ops."""
    listed = ",".join(ops)
    return (f"ops.deny+=[{listed}]",) if listed else ()
