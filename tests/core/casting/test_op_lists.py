"""Op lists as values: what they hold, how they are changed, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torchvision  # noqa: F401  its ops are registered where it is imported
from omegaconf import OmegaConf

from mpframe import OpLists
from mpframe.config.locations import CONF
from mpframe.core.casting.op_lists import _ALIASES, _parse, canonical, is_registered, known_ops
from mpframe.core.errors import ConfigError

SHIPPED = sorted(path.stem for path in Path(CONF).glob("ops/*.yaml"))


def names(text: str) -> set[str]:
    return set(text.split())


# `lower_precision_fp` of torch's CUDA autocast, under the names a caller can reach.
CUDA_HALF = names("""
addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d conv_transpose3d convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear
lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
""")
# Its `fp32`, `fp32_set_opt_dtype` and `fp32_append_dtype`.
CUDA_FP32 = names("""
acos asin cosh erfinv exp expm1 log log10 log1p log2 pow reciprocal rsqrt sinh softplus tan
layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity
poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss
huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp interpolate
prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm
""")
# Its `promote`.
CUDA_WIDEST = names("""
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")


def test_the_default_lists_hold_cuda_autocasts() -> None:
    lists = OpLists.named()
    assert lists.allow >= CUDA_HALF
    assert lists.deny >= CUDA_FP32 | {"binary_cross_entropy"}
    assert lists.infer | {"grid_sampler"} >= CUDA_WIDEST  # in deny here: its CPU kernel's fault


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_lists_are_disjoint_and_known(name: str) -> None:
    lists = OpLists.named(name)
    assert not lists.allow & lists.deny | lists.allow & lists.infer | lists.deny & lists.infer
    listed = lists.allow | lists.deny | lists.infer
    assert all(op in known_ops() or is_registered(op) for op in listed)
    assert lists.modules == {}


def test_the_shipped_names() -> None:
    assert SHIPPED == ["default", "fast", "fp32_norms", "none"]


def test_fast_moves_norms_and_softmax_to_half() -> None:
    default, fast = OpLists.named(), OpLists.named("fast")
    assert {"softmax", "layer_norm", "group_norm"} <= fast.allow - default.allow
    assert fast.deny == default.deny - fast.allow
    assert fast.infer == default.infer


def test_fp32_norms_adds_norms_to_deny() -> None:
    default, norms = OpLists.named(), OpLists.named("fp32_norms")
    assert norms.deny - default.deny == {"batch_norm", "instance_norm", "local_response_norm"}


def test_none_is_empty() -> None:
    assert OpLists.named("none").empty
    assert not OpLists.named().empty


@pytest.mark.parametrize(
    ("alias", "op"),
    [
        ("arccos", "acos"),
        ("concat", "cat"),
        ("linalg_matmul", "matmul"),
        ("multiply", "mul"),
        ("special_softmax", "softmax"),
        ("true_divide", "div"),
        ("trapz", "trapezoid"),
        ("matmul", "matmul"),
        ("linalg_norm", "linalg_norm"),
    ],
)
def test_one_name_for_every_spelling(alias: str, op: str) -> None:
    assert canonical(alias) == op
    assert OpLists(allow=frozenset({alias})).allow == {op}
    assert OpLists(allow=frozenset({op})).list_of(alias) == "allow"


@pytest.mark.parametrize(("alias", "op"), _ALIASES.items())
def test_aliases_lead_to_functions_of_torch(alias: str, op: str) -> None:
    assert op in known_ops() - _ALIASES.keys()


@pytest.mark.parametrize("destination", ["allow", "deny", "infer", "none"])
@pytest.mark.parametrize("op", ["softmax", "matmul", "add", "erf"])
def test_a_move_takes_an_op_out_of_every_other_list(op: str, destination: str) -> None:
    moved = OpLists.named().moved({op: destination})
    assert moved.list_of(op) == destination
    held = [name for name in ("allow", "deny", "infer") if op in getattr(moved, name)]
    assert held == ([] if destination == "none" else [destination])


def test_a_move_by_an_alias_moves_the_op() -> None:
    assert OpLists.named().moved({"concat": "deny"}).list_of("cat") == "deny"


def test_a_move_keeps_pins() -> None:
    lists = OpLists.from_mapping(
        {"allow": ["mm"], "modules": {"a": "fp32"}, "move": {"mm": "deny"}}
    )
    assert (lists.deny, dict(lists.modules)) == ({"mm"}, {"a": "fp32"})


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (
            {"allow": ["matmull"]},
            "ops.allow: 'matmull' is not an op of PyTorch; nearest: matmul",
        ),
        (
            {"deny": ["Softmax_"]},
            "ops.deny: 'Softmax_' is not an op of PyTorch; nearest: softmax",
        ),
        ({"allow": ["exp_"]}, "ops.allow: 'exp_' is not an op of PyTorch; nearest: exp"),
        ({"move": {"xqzzy": "deny"}}, "ops.move: 'xqzzy' is not an op of PyTorch"),
        (
            {"allow": ["exp"], "deny": ["exp"]},
            "ops.allow and ops.deny both hold 'exp': an op runs in one format; to move it set "
            "ops.move.exp=allow or deny",
        ),
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


@pytest.mark.parametrize("path", sorted((CONF / "ops").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_lists_are_read_as_hydra_reads_them(path: Path) -> None:
    sections: Any = OmegaConf.to_container(OmegaConf.load(path))
    parsed = _parse(path.read_text())
    assert parsed.keys() == sections.keys()
    for name, items in sections.items():
        assert (parsed[name] if isinstance(items, dict) else list(parsed[name])) == items


def test_unknown_lists_name_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="ops=fastest: choose default, fast, fp32_norms, none"):
        OpLists.named("fastest")


@pytest.mark.parametrize("name", ["torchvision.nms", "torchvision.box_iou_rotated", "aten.mm"])
def test_registered_ops_are_named_with_their_library(name: str) -> None:
    assert OpLists(deny=frozenset({name})).list_of(name) == "deny"


def test_shipped_ops_are_known_where_torch_is_older_or_their_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpframe.core.casting.op_lists.is_registered", lambda _: False)
    monkeypatch.setattr("mpframe.core.casting.op_lists.known_ops", lambda: frozenset({"mm"}))
    assert "linalg_matrix_sqrth" in OpLists.named().deny
    assert "torchvision.nms" in OpLists.named().deny
    with pytest.raises(ConfigError, match="'erf' is not an op of PyTorch"):
        OpLists(deny=frozenset({"erf"}))


def test_lists_are_values() -> None:
    assert OpLists.named() == OpLists.named()
    assert OpLists.named() != OpLists.named("fast")
    with pytest.raises(TypeError):
        OpLists(modules={"a": "fp32"}).modules["a"] = "half"  # type: ignore[index]
