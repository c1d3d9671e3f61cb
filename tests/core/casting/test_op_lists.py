"""Op lists as values: what they hold, how they are changed, and what is refused."""

import pytest
import torchvision  # noqa: F401  its ops are registered where it is imported
from fixtures import refused
from omegaconf import OmegaConf

from mpframe import OpLists
from mpframe.config import CONF
from mpframe.core.casting import op_lists
from mpframe.core.casting.op_lists import _ALIASES, _parse, canonical, known_ops
from mpframe.core.errors import ConfigError


def test_the_shipped_lists() -> None:
    default, fast, norms, none = map(OpLists.named, ("default", "fast", "fp32_norms", "none"))
    assert {"softmax", "layer_norm", "group_norm"} <= fast.allow - default.allow
    assert (fast.deny, fast.infer) == (default.deny - fast.allow, default.infer)
    assert norms.deny - default.deny == {"batch_norm", "instance_norm", "local_response_norm"}
    assert (dict(default.modules), default.empty, none.empty) == ({}, False, True)
    assert OpLists.named() == default != fast  # They are values.
    with pytest.raises(ConfigError, match="ops=fastest: choose default, fast, fp32_norms, none"):
        OpLists.named("fastest")


def test_shipped_lists_are_read_as_hydra_reads_them() -> None:
    for path in CONF.glob("ops/*.yaml"):
        sections = OmegaConf.to_container(OmegaConf.load(path))
        parsed = _parse(path.read_text())
        assert parsed.keys() == sections.keys()
        for name, items in sections.items():
            assert (parsed[name] if isinstance(items, dict) else list(parsed[name])) == items


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


def test_shipped_ops_are_known_to_an_older_torch_and_without_their_library(monkeypatch) -> None:
    monkeypatch.setattr(op_lists, "is_registered", lambda _: False)
    monkeypatch.setattr(op_lists, "known_ops", lambda: frozenset({"mm"}))
    assert {"linalg_matrix_sqrth", "torchvision.nms"} <= OpLists.named().deny
    with pytest.raises(ConfigError, match="'erf' is not an op of PyTorch"):
        OpLists(deny=frozenset({"erf"}))
