"""Counts the ported cases for the table of README.md: `python tests/ports/test_cases.py` writes it.

A case is one collected test. Where it comes out otherwise here, it is marked
`differs("reason")`, asserts what happens here, and its reason stands in the table.
"""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
BEGIN, END = "<!-- cases -->\n", "<!-- end of cases -->\n"
COUNTED = f"Counted with torch {torch.__version__.split('+')[0]}."  # Its databases grow with it.
SUITES = {
    "test_torch_grad_scaler": "torch, GradScaler (test/test_torch.py, test/test_cuda.py)",
    "test_torch_optim_db": "torch, optimizer database (common_optimizers.optim_db)",
    "test_torch_autocast_lists": "torch, autocast lists (autocast_test_lists)",
    "test_torch_op_db": "torch, op database (common_methods_invocations.op_db)",
    "test_torch_module_db": "torch, module database (common_modules.module_db)",
    "test_apex_run_amp": "apex, tests/L0/run_amp",
    "test_trainers": "fairseq, Megatron, DeepSpeed, OpenSeq2Seq, Lightning, Accelerate: precision",
}


class Collector:
    """A plugin of pytest that counts what is collected, and what differs, by file."""

    def __init__(self) -> None:
        self.cases: Counter[str] = Counter()
        self.reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.cases[item.path.stem] += 1
        for mark in item.iter_markers("differs"):
            self.reasons[item.path.stem][mark.args[0]] += 1


def table() -> str:
    """Two Markdown tables: counts by suite, long tests too, and each difference with its reason."""
    found = Collector()
    code = pytest.main(["--collect-only", "-qq", "-m", "", str(HERE)], plugins=[found])
    assert code == pytest.ExitCode.OK, f"collecting failed: {code}"
    lines = [COUNTED, "", "| suite | test | cases | agree | differ |", "|---|---|---|---|---|"]
    for name, suite in SUITES.items():
        cases, differ = found.cases[name], found.reasons[name].total()
        lines.append(f"| {suite} | `{name}` | {cases} | {cases - differ} | {differ} |")
    lines += ["", "| test | differ | how, and why |", "|---|---|---|"]
    for name in SUITES:
        lines += [f"| `{name}` | {count} | {why} |" for why, count in found.reasons[name].items()]
    return "\n".join(lines) + "\n"


def test_the_page_is_current() -> None:
    """In a process of its own: a collection within a collection would share its modules."""
    assert {path.stem for path in HERE.glob("test_*.py")} - {"test_cases"} == SUITES.keys()
    if COUNTED not in PAGE.read_text():
        pytest.skip(f"the page was not {COUNTED.lower()}")
    words = [sys.executable, "-c", "from test_cases import BEGIN, table; print(BEGIN + table())"]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=True)
    page, current = PAGE.read_text().split(BEGIN)[1], done.stdout.split(BEGIN)[1]
    assert page.split(END)[0].strip() == current.strip(), f"mend it with python {__file__}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (before, rest), rows = PAGE.read_text().split(BEGIN), table()
    PAGE.write_text(before + BEGIN + rows + END + rest.split(END)[1])
    print(f"written: {PAGE}")
