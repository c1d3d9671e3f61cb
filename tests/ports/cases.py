"""Counts the ported cases, and writes the table of README.md beside this file.

python tests/ports/cases.py        after a change of the ports

A case is one collected test. Where it comes out otherwise here, it is marked
`differs("reason")`, asserts what happens here, and its reason stands in the table.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
BEGIN, END = "<!-- cases -->\n", "<!-- end of cases -->\n"

# The databases of torch grow with it.
COUNTED = f"Counted with torch {torch.__version__.split('+')[0]}."

SUITES = {
    "test_torch_grad_scaler": "torch, GradScaler (test/test_torch.py, test/test_cuda.py)",
    "test_torch_optim_db": "torch, optimizer database (common_optimizers.optim_db)",
    "test_torch_autocast_lists": "torch, autocast lists (autocast_test_lists)",
    "test_torch_op_db": "torch, op database (common_methods_invocations.op_db)",
    "test_torch_module_db": "torch, module database (common_modules.module_db)",
    "test_apex_run_amp": "apex, tests/L0/run_amp",
    "test_openseq2seq": "OpenSeq2Seq, mp_wrapper_test, optimizers_test, automatic_loss_scaler",
    "test_deepspeed_dynamic_scale": "DeepSpeed, dynamic_loss_scale, loss_scale_validation",
    "test_trainers": "fairseq, Megatron, Lightning, Accelerate: what they test of precision",
}


@dataclass
class Suite:
    """The cases of one file.

    Attributes:
        cases: how many.
        reasons: why some differ, and how many for each reason.
    """

    cases: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Collector:
    """A plugin of pytest that counts what is collected."""

    def __init__(self) -> None:
        self.suites: dict[str, Suite] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Count `item` in its file's suite."""
        suite = self.suites.setdefault(item.path.stem, Suite())
        suite.cases += 1
        for mark in item.iter_markers("differs"):
            suite.reasons[mark.args[0]] += 1


def collected() -> dict[str, Suite]:
    """The suites of this folder by file, those that run in long tests included."""
    collector = Collector()
    code = pytest.main(["--collect-only", "-qq", "-m", "", str(HERE)], plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"collecting failed: {code}")
    return collector.suites


def table(suites: dict[str, Suite]) -> str:
    """Two Markdown tables: counts by suite, and each difference with its reason."""
    known = {name: suites[name] for name in SUITES if name in suites}
    lines = [COUNTED, "", "| suite | test | cases | agree | differ |", "|---|---|---|---|---|"]
    for name, suite in known.items():
        differ = sum(suite.reasons.values())
        lines.append(
            f"| {SUITES[name]} | `{name}` | {suite.cases} | {suite.cases - differ} | {differ} |"
        )
    lines += ["", "| test | differ | how, and why |", "|---|---|---|"]
    for name, suite in known.items():
        lines += [f"| `{name}` | {count} | {why} |" for why, count in suite.reasons.items()]
    return "\n".join(lines) + "\n"


def written(text: str, rows: str) -> str:
    """`text` with the table between its marks replaced."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + rows + END + rest.split(END)[1]


def main() -> None:
    """Write the page."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    PAGE.write_text(written(PAGE.read_text(), table(collected())))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
