"""The policy decides: what is cast, how, and what is refused."""

import pytest
import torch

from mpframe import OpLists, Precision
from mpframe.core.casting.policy import Compute, Policy, has_native_half
from mpframe.core.errors import ConfigError
from mpframe.tracking.dtype_map import warnings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pinned(**modules: str) -> Policy:
    return Policy(
        "mixed", ops=OpLists(modules={k.replace("_", "."): v for k, v in modules.items()})
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "mixd"}, "dtype.mode=mixd: choose fp32, mixed, amp; nearest: mixed"),
        ({"half": "fp16"}, "dtype.half=fp16: choose float16, bfloat16"),
        (
            {"compute": "emulate"},
            "dtype.compute=emulate: choose auto, native, emulated; nearest: emulated",
        ),
    ],
)
def test_refusals(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Precision(**arguments)  # type: ignore[arg-type]
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("op", "compute"),
    [
        ("matmul", Compute.HALF),
        ("softmax", Compute.FP32),
        ("add", Compute.WIDEST),
        ("erf", Compute.PYTORCH),
        ("no_such_op", Compute.PYTORCH),
    ],
)
def test_compute_of_the_default_lists(op: str, compute: Compute) -> None:
    assert Policy("amp").compute_of(op) is compute


@pytest.mark.parametrize("op", ["matmul", "softmax"])
def test_a_pin_decides_for_allow_and_deny(op: str) -> None:
    assert Policy("amp").compute_of(op, "fp32") is Compute.FP32
    assert Policy("amp").compute_of(op, "half") is Compute.HALF


@pytest.mark.parametrize("op", ["add", "erf"])
@pytest.mark.parametrize("pin", ["fp32", "half"])
def test_a_pin_leaves_ops_that_follow(op: str, pin: str) -> None:
    assert Policy("amp").compute_of(op, pin) is Policy("amp").compute_of(op)


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("head", "head", True),
        ("head", "head.linear", True),
        ("head", "heads", False),
        ("head", "body.head", False),
        ("*.head", "body.head.linear", True),
        ("head.*", "head", False),
        ("head.*", "head.linear.weight", True),
        ("encoder.[01]", "encoder.1.norm", True),
        ("encoder.[01]", "encoder.2", False),
        ("*", "", True),
        ("*", "anything.at.all", True),
    ],
)
def test_patterns(pattern: str, module: str, matches: bool) -> None:
    assert Policy.matches(pattern, module) is matches


def test_the_last_matching_pin_wins() -> None:
    policy = Policy("mixed", ops=OpLists(modules={"a": "half", "a.b": "fp32", "c": "half"}))
    assert policy.pin_of("a.b.c") == ("a.b", "fp32")
    assert policy.pin_of("a.x") == ("a", "half")
    assert policy.pin_of("x") is None


@pytest.mark.parametrize(
    ("mode", "lists", "casts"),
    [
        ("fp32", "default", False),
        ("amp", "default", True),
        ("mixed", "default", True),
        ("amp", "none", False),
        ("mixed", "none", False),
    ],
)
def test_whether_anything_is_cast(mode: str, lists: str, casts: bool) -> None:
    assert Policy(mode, ops=OpLists.named(lists)).casts is casts


def test_pins_alone_are_casts() -> None:
    assert Policy("mixed", ops=OpLists(modules={"a": "fp32"})).casts


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_where_half_is_emulated(half: str) -> None:
    assert Policy("amp", half, compute="emulated").emulates(CPU)
    assert not Policy("amp", half, compute="native").emulates(CPU)
    assert Policy("amp", half, compute="auto").emulates(CPU) is not has_native_half(half)
    assert not any(Policy("amp", half, compute=c).emulates(CUDA) for c in ("auto", "emulated"))


def test_float16_is_emulated_on_a_cpu_by_default() -> None:
    assert Policy("amp").emulates(CPU)


def test_names() -> None:
    assert str(Policy("fp32")) == "fp32"
    assert str(Policy("mixed", "bfloat16")) == "mixed(bfloat16)"


@pytest.mark.parametrize(
    ("precision", "begins"),
    [
        (Precision("fp32"), []),
        (Precision("mixed"), []),
        (Precision("amp"), []),
        (
            Precision("mixed", master_weights=False),
            ["dtype.master_weights=false: the optimizer works on float16 weights"],
        ),
        (
            Precision("amp", master_weights=False),
            ["dtype.master_weights=false changes nothing with dtype=amp"],
        ),
        (
            Precision("mixed", "bfloat16", ops=OpLists()),
            ["ops=none: the model's norms, softmax and reductions run in bfloat16"],
        ),
        (Precision("amp", ops=OpLists()), ["ops=none casts nothing with dtype=amp"]),
        (
            Precision("mixed", ops=OpLists(), master_weights=False),
            ["dtype.master_weights=false", "ops=none"],
        ),
    ],
)
def test_each_rung_warns_of_what_it_costs(precision: Precision, begins: list[str]) -> None:
    lines = warnings(precision)
    assert len(lines) == len(begins)
    for warning, start in zip(lines, begins, strict=True):
        assert warning.startswith(start)
        assert "\n" not in warning
