"""A profile: module, format and time of each op, the table of the costs, and the same run."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log
from in_process import StartRun, assert_same_run, texts
from torch import nn
from torch.profiler import profile

from mpframe.training.callbacks.profile import (
    MARK,
    MODEL,
    OPTIMIZER,
    OUTSIDE,
    Op,
    describe_costs,
    mark_modules,
    read_ops,
)

HALVES = ["c10::Half", "c10::Half", "Scalar"]


def event(name: str, begin: float, end: float, *types: str, **args: Any) -> Any:
    """A range from `begin` to `end` in microseconds."""
    cat = "user_annotation" if name.startswith((MARK, "Optimizer.")) else "cpu_op"
    named = {key.replace("_", " "): value for key, value in args.items()}
    own = {"name": name, "ts": begin, "dur": end - begin, "tid": 1}
    return {"ph": "X", "cat": cat, **own, "args": {**named, "Input type": list(types)}}


def read(folder: Path, *events: Any) -> list[Op]:
    path = folder / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return read_ops(path)


def test_an_op_has_its_innermost_module_its_formats_and_the_time_of_its_kernels(
    tmp_path: Path,
) -> None:
    events = [
        event(MARK, 0, 100),
        event("aten::to", 1, 5, "float"),
        event("aten::copy_", 2, 4, "c10::Half", "float", "Scalar"),
        event(f"{MARK}head", 11, 30),
        event("aten::linear", 12, 22, *HALVES, External_id=1),
        event("aten::addmm", 13, 21, *HALVES, External_id=2),  # Part of linear.
        event("aten::copy_", 120, 130, "float", "float"),
        event("Optimizer.step#AdamW.step", 200, 300),
        event("aten::argmax", 230, 231, "long int"),
    ]
    assert read(tmp_path, *events) == [
        Op("aten::to", MODEL, "float32 to float16", False, 0.004),
        Op("aten::linear", "head", "float16", False, 0.01),
        Op("aten::copy_", OUTSIDE, "float32", False, 0.01),
        Op("aten::argmax", OPTIMIZER, "no float", False, 0.001),
    ]
    for op, microseconds in ((1, 1.0), (2, 30.0), (2, 4.0)):
        own = {"name": "k", "ts": 500.0, "dur": microseconds, "tid": 7}
        events.append({"ph": "X", "cat": "kernel", **own, "args": {"External id": op}})
    assert [op.milliseconds for op in read(tmp_path, *events)] == [0.0, 0.035, 0.0, 0.0]


def test_the_table_has_the_five_largest_costs_and_the_rest() -> None:
    ops = [Op("x", f"m{n}", "float16", False, 2.0**-n) for n in range(7)]
    ops += [Op("x", "m0", "float16", True, 1.0), Op("x", "m0", "float32 to float16", False, 1.5)]
    assert describe_costs(ops, steps=2).splitlines() == [
        "module       format              ms a step  share  backward",
        "m0           float16                 1.000  44.6%       50%",
        "m0           float32 to float16      0.750  33.4%        0%",
        "m1           float16                 0.250  11.1%        0%",
        "m2           float16                 0.125   5.6%        0%",
        "m3           float16                 0.062   2.8%        0%",
        "(3 smaller)                          0.055   2.4%        0%",
        "by format: float16 66.6%, float32 to float16 33.4%; casts 33.4%",
    ]


class Recursive(nn.Linear):
    """Calls itself, and may fail."""

    def forward(self, inputs: torch.Tensor, depth: int = 1) -> torch.Tensor:
        if depth < 0:
            raise ValueError("too deep")
        return super().forward(self(inputs, depth - 1) if depth else inputs)


def test_marks_of_a_real_trace_and_no_hook_left(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Linear(2, 2), Recursive(2, 2)), tmp_path / "trace.json.gz"
    with profile(record_shapes=True, acc_events=True) as recorded, mark_modules(model):
        with pytest.raises(ValueError, match="too deep"):
            model[1](torch.ones(1, 2), -1)
        model(torch.ones(1, 2)).sum().backward()
    recorded.export_chrome_trace(str(path))
    ops = read_ops(path)
    linear = [(op.module, op.backward) for op in ops if op.name in ("aten::linear", "aten::mm")]
    assert linear[:3] == [("0", False), ("1", False), ("1", False)]
    # Each backward pass has a product for the weight, and one for the input but in the first.
    assert sorted(linear[3:]) == [("0", True), *[("1", True)] * 4]
    assert {op.module for op in ops if op.name == "aten::sum" and not op.backward} == {OUTSIDE}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


SMALL = ["model=mlp", "model.hidden=8", "dtype=mixed", "trainer.max_steps=12"]
ON = "callbacks.profile.enabled=true"


def test_a_profile_of_three_steps(start_run: StartRun, tmp_path: Path, caplog: Log) -> None:
    caplog.set_level("INFO")
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    start_run(plain, *SMALL)
    start_run(profiled, *SMALL, ON)
    assert_same_run(plain, profiled)
    assert not (plain / "profile").exists()
    (path,) = (profiled / "profile").iterdir()
    assert path.name == "step_00000007.pt.trace.json.gz"
    names = {e["name"] for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"module: ", "module: hidden1.linear", "module: head"} <= names
    (said,) = (text for text in caplog.messages if text.startswith("profile of steps 7 to 9: "))
    assert re.search("\nby format: .*float32 to float16", said)
    assert said.endswith(f"\ntrace: {path}")
    ((_, text),) = texts(profiled, "text/profile")
    assert re.search("\n```\nmodule +format +ms a step ", text)


SHORT, WHOLE = f"warning: {ON}: the run ended before step 7", "profile of steps 7 to "


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("trainer.max_steps=6", SHORT),  # as a warm-up
        ("trainer.eval_every=8", f"{WHOLE}8: "),  # A validation ends it.
        ("trainer.eval_every=6", f"{WHOLE}9: "),  # It ended the warm-up only.
        ("trainer.eval_every=1", f"{WHOLE}7: "),
    ],
)
def test_a_short_run_and_validations_in_between(
    start_run: StartRun, tmp_path: Path, caplog: Log, option: str, said: str
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "profile").mkdir()
    # A link in a folder that may be foreign is not written through.
    planted = tmp_path / "profile" / ".step_00000007.pt.trace.json.gz"
    planted.symlink_to(tmp_path / "precious")
    start_run(tmp_path, *SMALL, ON, option)
    assert (tmp_path / "precious").read_text() == "years of work"
    assert sum(text.startswith(said) for text in caplog.messages) == 1
