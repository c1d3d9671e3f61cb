"""The policy decides: what is cast, how, and what is refused."""

import pytest
import torch
from fixtures import refused

from mpframe import OpLists, Precision
from mpframe.core.casting.policy import Policy, has_native_half
from mpframe.core.errors import ConfigError


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
