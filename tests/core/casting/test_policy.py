"""The policy decides: what is cast, how, and what is refused."""

import pytest
import torch
from fixtures import refused

from mpframe import OpLists, Precision
from mpframe.core.casting.policy import Policy, has_native_half
from mpframe.core.errors import ConfigError
from mpframe.tracking.dtype_map import warnings


def test_refusals() -> None:
    for arguments, text in (
        ({"mode": "mixd"}, "dtype.mode=mixd: choose fp32, mixed, amp; nearest: mixed"),
        ({"half": "fp16"}, "dtype.half=fp16: choose float16, bfloat16"),
        ({"ops": ["softmax"]}, "ops=['softmax']: must be OpLists(allow, deny, infer, modules)"),
        ({"compute": "emulate"}, "dtype.compute=emulate: choose auto, native, emulated; nearest: "),
    ):
        assert refused(ConfigError, Precision, **arguments).startswith(text)


def test_patterns() -> None:
    inside = ("head", "head.linear"), ("*.head", "body.head.linear"), ("*", "")
    assert all(Policy.matches(*own) for own in (*inside, ("encoder.[01]", "encoder.1.norm")))
    others = ("head", "heads"), ("head", "body.head"), ("head.*", "head")
    assert not any(Policy.matches(*own) for own in (*others, ("encoder.[01]", "encoder.2")))


def test_whether_anything_is_cast() -> None:
    lists, none, pin = OpLists.named(), OpLists.named("none"), OpLists(modules={"a": "fp32"})
    casts = [(m, ops) for m in ("fp32", "amp", "mixed") for ops in (lists, none, pin)]
    found = [Policy(mode, ops=ops).casts for mode, ops in casts]
    assert found == [False] * 3 + [True, False, True] * 2


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_where_half_is_emulated(half) -> None:
    computes = {c: Policy("amp", half, compute=c) for c in ("auto", "native", "emulated")}
    on_cpu = {"auto": not has_native_half(half), "native": False, "emulated": True}
    assert {c: own.emulates(torch.device("cpu")) for c, own in computes.items()} == on_cpu
    assert not any(own.emulates(torch.device("cuda")) for own in computes.values())
    assert not has_native_half("float16")


def test_each_rung_warns_of_what_it_costs() -> None:
    no_masters, no_lists = {"master_weights": False}, {"ops": OpLists()}
    for mode, options, begins in (
        ("mixed", {}, []),
        ("mixed", no_masters, ["dtype.master_weights=false: the optimizer works on float16 we"]),
        ("amp", no_masters, ["dtype.master_weights=false changes nothing with dtype=amp"]),
        ("mixed", no_lists, ["ops=none: the model's norms, softmax and reductions run in float16"]),
        ("amp", no_lists, ["ops=none casts nothing with dtype=amp"]),
        ("mixed", no_lists | no_masters, ["dtype.master_weights=false", "ops=none"]),
    ):
        lines = warnings(Precision(mode, **options))
        assert [line[: len(begin)] for line, begin in zip(lines, begins, strict=True)] == begins
