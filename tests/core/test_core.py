"""The engine stands by itself."""

import re
import sys

from checkout import ROOT


def test_it_imports_torch_the_standard_library_and_itself() -> None:
    """lint-imports sees to it that it imports no other part of mpframe."""
    texts = [file.read_text() for file in (ROOT / "mpframe" / "core").rglob("*.py")]
    found = re.findall(r"^ *(?:from (?=\S+ import)|import )(\w+)", "\n".join(texts), re.M)
    assert {*found} - sys.stdlib_module_names == {"torch", "mpframe"}
