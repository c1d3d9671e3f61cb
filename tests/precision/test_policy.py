"""The policy and its op lists as values: what they decide, how they change, what is refused."""

from pathlib import Path

import pytest
import torch
import torchvision  # noqa: F401  its ops are registered where it is imported
from fixtures import refused
from omegaconf import OmegaConf

import mpframe
from mpframe import OpLists, Precision
from mpframe.config import CONF
from mpframe.core.errors import ConfigError
from mpframe.precision import op_lists
from mpframe.precision.op_lists import _ALIASES, _parse, canonical, known_ops
from mpframe.precision.policy import Policy, has_native_half


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


def test_where_half_is_emulated() -> None:
    for half in ("float16", "bfloat16"):
        computes = {c: Policy("amp", half, compute=c) for c in ("auto", "native", "emulated")}
        on_cpu = {"auto": not has_native_half(half), "native": False, "emulated": True}
        assert {c: own.emulates(torch.device("cpu")) for c, own in computes.items()} == on_cpu
        assert not any(own.emulates(torch.device("cuda")) for own in computes.values())
    assert not has_native_half("float16")


def test_the_shipped_lists_are_read_as_hydra_reads_them_and_are_values() -> None:
    for path in CONF.glob("ops/*.yaml"):
        sections = OmegaConf.to_container(OmegaConf.load(path))
        parsed = _parse(path.read_text())
        assert parsed.keys() == sections.keys()
        for name, items in sections.items():
            assert (parsed[name] if isinstance(items, dict) else list(parsed[name])) == items
    default, fast, norms, none = map(OpLists.named, ("default", "fast", "fp32_norms", "none"))
    assert {"softmax", "layer_norm", "group_norm"} <= fast.allow - default.allow
    assert (fast.deny, fast.infer) == (default.deny - fast.allow, default.infer)
    assert norms.deny - default.deny == {"batch_norm", "instance_norm", "local_response_norm"}
    assert (dict(default.modules), default.empty, none.empty) == ({}, False, True)
    assert OpLists.named() == default != fast


def test_one_name_for_every_spelling() -> None:
    own = {"concat": "cat", "special_softmax": "softmax", "special_expit": "sigmoid"}
    for alias, op in (own | {"matmul": "matmul", "linalg_norm": "linalg_norm"}).items():
        assert canonical(alias) == op
        assert OpLists(allow=frozenset({alias})).allow == {op}
        assert OpLists(allow=frozenset({op})).list_of(alias) == "allow"
    assert set(_ALIASES.values()) <= known_ops() - _ALIASES.keys()
    of_a_library = OpLists(allow=frozenset({"torchvision.roi_align", "aten.mm"}))
    held = [of_a_library.list_of(op) for op in ("torchvision.roi_align", "aten.mm", "mm")]
    assert held == ["allow", "allow", "none"]


@pytest.mark.parametrize("destination", ["allow", "deny", "infer", "none"])
def test_a_move_takes_an_op_out_of_every_other_list(destination) -> None:
    for op in ("softmax", "matmul", "concat", "erf"):
        moved = OpLists.named().moved({op: destination})
        assert moved.list_of(op) == destination
        held = {n for n in ("allow", "deny", "infer") if canonical(op) in getattr(moved, n)}
        assert held == {destination} - {"none"}
    node = {"allow": ["mm"], "modules": {"a": "fp32"}, "move": {"mm": destination}}
    moved = OpLists.from_mapping(node)
    assert (moved.list_of("mm"), dict(moved.modules)) == (destination, {"a": "fp32"})


def test_refusals() -> None:
    unknown = "is not an op of PyTorch"
    both = "ops.deny and ops.infer both hold 'cat': an op runs in one format; to move it set"
    missing = "is unknown: no library 'nolibrary' that registers ops with PyTorch is imported"
    for node, text in (
        ({"deny": ["Softmax_"]}, f"ops.deny: 'Softmax_' {unknown}; nearest: softmax"),
        ({"allow": ["exp_"]}, f"ops.allow: 'exp_' {unknown}; nearest: exp"),
        ({"move": {"xqzzy": "deny"}}, f"ops.move.xqzzy=deny: 'xqzzy' {unknown}"),
        ({"deny": ["cat"], "infer": ["concat"]}, f"{both} ops.move.cat=deny or infer"),
        ({"move": {"exp": "half"}}, "ops.move.exp=half: choose allow, deny, infer or none (= no "),
        ({"deny": ["torchvision.nmss"]}, "ops.deny: 'torchvision.nmss' is not an op of torchvis"),
        ({"deny": ["nolibrary.nms"]}, f"ops.deny: 'nolibrary.nms' {missing}"),
        ({"allow": "matmul"}, "ops.allow=matmul: give a list of ops: [matmul]"),
    ):
        assert refused(ConfigError, OpLists.from_mapping, node).startswith(text)
    for arguments, text in (
        ({"mode": "mixd"}, "dtype.mode=mixd: choose fp32, mixed, amp; nearest: mixed"),
        ({"half": "fp16"}, "dtype.half=fp16: choose float16, bfloat16"),
        ({"ops": ["softmax"]}, "ops=['softmax']: must be OpLists(allow, deny, infer, modules)"),
        ({"compute": "emulate"}, "dtype.compute=emulate: choose auto, native, emulated; nearest: "),
    ):
        assert refused(ConfigError, Precision, **arguments).startswith(text)
    said = refused(ConfigError, OpLists.named, "fastest")
    assert said.startswith("ops=fastest: choose default, fast, fp32_norms, none")


def test_shipped_ops_are_known_to_an_older_torch_and_without_their_library(monkeypatch) -> None:
    monkeypatch.setattr(op_lists, "is_registered", lambda _: False)
    monkeypatch.setattr(op_lists, "known_ops", lambda: frozenset({"mm"}))
    assert {"linalg_matrix_sqrth", "torchvision.nms"} <= OpLists.named().deny
    with pytest.raises(ConfigError, match="'erf' is not an op of PyTorch"):
        OpLists(deny=frozenset({"erf"}))


def test_the_lists_are_found_in_a_wheel_and_in_a_clone() -> None:
    """A wheel has conf/ inside the package, a clone has it beside the package."""
    package = Path(mpframe.__file__).resolve().parent
    assert [package / "conf", package.parent / "conf"] == op_lists._PLACES
