"""Op lists as values: what they hold, how they are changed, and what is refused."""

from typing import Any

import pytest
import torchvision  # noqa: F401  its ops are registered where it is imported
from omegaconf import OmegaConf

from mpframe import OpLists
from mpframe.config.locations import CONF
from mpframe.core.casting.op_lists import _ALIASES, _parse, canonical, known_ops
from mpframe.core.errors import ConfigError


def test_the_shipped_lists() -> None:
    assert sorted(path.stem for path in CONF.glob("ops/*.yaml")) == [
        *("default", "fast", "fp32_norms", "none")
    ]
    default, fast, norms = map(OpLists.named, ("default", "fast", "fp32_norms"))
    assert {"softmax", "layer_norm", "group_norm"} <= fast.allow - default.allow
    assert (fast.deny, fast.infer) == (default.deny - fast.allow, default.infer)
    assert norms.deny - default.deny == {"batch_norm", "instance_norm", "local_response_norm"}
    assert default.modules == {}
    assert OpLists.named("none").empty
    assert not default.empty
    with pytest.raises(ConfigError, match="ops=fastest: choose default, fast, fp32_norms, none"):
        OpLists.named("fastest")


def test_shipped_lists_are_read_as_hydra_reads_them() -> None:
    for path in CONF.glob("ops/*.yaml"):
        sections: Any = OmegaConf.to_container(OmegaConf.load(path))
        parsed = _parse(path.read_text())
        assert parsed.keys() == sections.keys()
        for name, items in sections.items():
            assert (parsed[name] if isinstance(items, dict) else list(parsed[name])) == items


@pytest.mark.parametrize(
    ("alias", "op"),
    [
        ("concat", "cat"),
        ("special_softmax", "softmax"),
        ("special_expit", "sigmoid"),
        ("matmul", "matmul"),
        ("linalg_norm", "linalg_norm"),
    ],
)
def test_one_name_for_every_spelling(alias: str, op: str) -> None:
    assert canonical(alias) == op
    assert OpLists(allow=frozenset({alias})).allow == {op}
    assert OpLists(allow=frozenset({op})).list_of(alias) == "allow"


def test_aliases_lead_to_functions_of_torch() -> None:
    assert set(_ALIASES.values()) <= known_ops() - _ALIASES.keys()


@pytest.mark.parametrize("op", ["softmax", "matmul", "concat", "erf"])
@pytest.mark.parametrize("destination", ["allow", "deny", "infer", "none"])
def test_a_move_takes_an_op_out_of_every_other_list(op: str, destination: str) -> None:
    moved = OpLists.named().moved({op: destination})
    assert moved.list_of(op) == destination
    held = [name for name in ("allow", "deny", "infer") if canonical(op) in getattr(moved, name)]
    assert held == ([] if destination == "none" else [destination])


def test_a_move_keeps_pins() -> None:
    lists = OpLists.from_mapping(
        {"allow": ["mm"], "modules": {"a": "fp32"}, "move": {"mm": "deny"}}
    )
    assert (lists.deny, dict(lists.modules)) == ({"mm"}, {"a": "fp32"})


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"deny": ["Softmax_"]}, "ops.deny: 'Softmax_' is not an op of PyTorch; nearest: softmax"),
        ({"allow": ["exp_"]}, "ops.allow: 'exp_' is not an op of PyTorch; nearest: exp"),
        ({"move": {"xqzzy": "deny"}}, "ops.move: 'xqzzy' is not an op of PyTorch"),
        (
            {"deny": ["cat"], "infer": ["concat"]},
            "ops.deny and ops.infer both hold 'cat': an op runs in one format; to move it set "
            "ops.move.cat=deny or infer",
        ),
        (
            {"move": {"exp": "half"}},
            "ops.move.exp=half: choose allow, deny, infer or none (= no list)",
        ),
        (
            {"deny": ["torchvision.nmss"]},
            "ops.deny: 'torchvision.nmss' is not an op of torchvision; nearest: torchvision.nms",
        ),
        (
            {"deny": ["nolibrary.nms"]},
            "ops.deny: 'nolibrary.nms' is unknown: no library 'nolibrary' that registers ops with "
            "PyTorch is imported",
        ),
        ({"allow": "matmul"}, "ops.allow=matmul: give a list of ops: [matmul]"),
    ],
)
def test_refusals(node: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        OpLists.from_mapping(node)
    assert str(error.value).startswith(text)
    assert "\n" not in str(error.value)


def test_registered_ops_are_named_with_their_library() -> None:
    lists = OpLists(deny=frozenset({"torchvision.box_iou_rotated"}), allow=frozenset({"aten.mm"}))
    assert lists.list_of("torchvision.box_iou_rotated") == "deny"
    assert (lists.list_of("aten.mm"), lists.list_of("mm")) == ("allow", "none")


def test_shipped_ops_are_known_where_torch_is_older_or_their_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpframe.core.casting.op_lists.is_registered", lambda _: False)
    monkeypatch.setattr("mpframe.core.casting.op_lists.known_ops", lambda: frozenset({"mm"}))
    assert {"linalg_matrix_sqrth", "torchvision.nms"} <= OpLists.named().deny
    with pytest.raises(ConfigError, match="'erf' is not an op of PyTorch"):
        OpLists(deny=frozenset({"erf"}))


def test_lists_are_values() -> None:
    assert OpLists.named() == OpLists.named()
    assert OpLists.named() != OpLists.named("fast")
    with pytest.raises(TypeError):
        OpLists(modules={"a": "fp32"}).modules["a"] = "half"  # type: ignore[index]
