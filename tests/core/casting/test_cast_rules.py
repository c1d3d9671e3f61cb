"""What a cast leaves alone, what it keeps within its block, and how blocks nest."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary import HALVES, Kernels, formats, same_bits

from mpframe import OpLists, Precision

FP32, FP64, HALF = torch.float32, torch.float64, torch.float16
NEVER = [torch.float64, torch.complex64, torch.int64, torch.bool]


def amp(half: str = "float16", compute: str = "emulated", **move: str) -> Precision:
    return Precision("amp", half, compute=compute, ops=OpLists.named().moved(move))


@pytest.mark.parametrize("dtype", NEVER)
def test_formats_that_are_never_cast(dtype: torch.dtype) -> None:
    x = torch.eye(4).to(dtype)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.sum(),  # deny
        lambda x: torch.cat([x, x]),  # infer
    ]
    if dtype != torch.bool:
        calls.append(lambda x: x @ x)  # allow
    for call in calls:
        plain = call(x)
        with amp().cast():
            cast = call(x)
        assert cast.dtype == plain.dtype
        assert torch.equal(cast, plain)


def test_float8_is_never_cast() -> None:
    x = torch.ones(4, 4, dtype=torch.float8_e4m3fn)
    with amp().cast():
        assert torch.cat([x, x]).dtype == torch.float8_e4m3fn
        assert torch.equal(x.float() @ x.float(), torch.full((4, 4), 4.0, dtype=HALF))


def test_half_beside_float64_follows_torch() -> None:
    x, wide = torch.ones(4, dtype=HALF), torch.ones(4, dtype=FP64)
    with amp().cast():
        assert (x + wide).dtype == FP64
        assert F.mse_loss(x, wide).dtype == FP64


def test_the_floating_tensors_beside_float64_are_left_alone() -> None:
    """1 + 2^-12 would be 1 in float16."""
    x, wide = torch.full((1,), 1 + 2.0**-12), torch.ones(1, dtype=FP64)
    with amp(mul="allow").cast():
        assert (x * wide).item() == 1 + 2.0**-12
        assert (x * torch.ones(1, dtype=torch.complex64)).real.item() == 1 + 2.0**-12


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.softmax(-1, dtype=FP64),
        lambda x: x.softmax(-1, FP64),
        lambda x: F.softmax(x, dim=-1, dtype=FP64),
        lambda x: x.sum(dtype=FP64),
        lambda x: torch.cumsum(x, 0, dtype=FP64),
    ],
)
def test_an_explicit_dtype_wins(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(4, 4).half()
    plain = call(x)
    with amp().cast():
        assert same_bits([call(x)], [plain])


@pytest.mark.parametrize(
    "call", [lambda x: x.softmax(-1, FP32), lambda x: torch.softmax(x, dim=-1, dtype=FP32)]
)
def test_an_explicit_fp32_dtype_wins_over_allow(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(4, 4)
    plain = call(x)
    with amp(softmax="allow").cast():
        assert same_bits([call(x)], [plain])


def test_an_explicit_half_dtype_wins_over_deny() -> None:
    with amp().cast():
        assert torch.rand(4).sum(dtype=HALF).dtype == HALF


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("exp_", ()), ("pow_", (2.0,)), ("addmm_", ("x", "x")), ("mul_", ("x",)), ("softmax_out", ())],
)
@pytest.mark.parametrize("dtype", [FP32, HALF])
def test_in_place_and_out_forms_keep_their_tensors_format(
    name: str, arguments: tuple[Any, ...], dtype: torch.dtype
) -> None:
    x = torch.rand(4, 4).to(dtype)
    given = [x.clone() if argument == "x" else argument for argument in arguments]
    expected, target = x.clone(), x.clone()
    if name == "softmax_out":
        torch.softmax(x, 1, out=expected)
    else:
        getattr(expected, name)(*given)
    with amp().cast():
        if name == "softmax_out":
            result = torch.softmax(x, 1, out=target)
        else:
            result = getattr(target, name)(*given)
    assert result is target
    assert same_bits([target], [expected])


def test_an_in_place_operator_keeps_the_left_side() -> None:
    x = torch.ones(4, dtype=HALF)
    with amp().cast():
        x += torch.ones(4)
        x **= 2
    assert x.dtype == HALF
    assert x.tolist() == [4.0] * 4


def test_an_in_place_product_takes_factors_of_another_format() -> None:
    x = torch.ones(4, 4)
    with amp().cast():
        x.addmm_(x.half(), x.half())
    assert torch.equal(x, torch.full((4, 4), 5.0))


def test_a_0d_tensor_is_a_number() -> None:
    with amp().cast():
        assert (torch.ones(4, dtype=HALF) * torch.tensor(2.0)).dtype == HALF
        assert (
            torch.where(torch.ones(4) > 0, torch.ones(4, dtype=HALF), torch.tensor(0.0)).dtype
            == HALF
        )


def test_two_half_formats_meet_in_fp32() -> None:
    with amp().cast():
        assert (torch.ones(4, dtype=HALF) + torch.ones(4, dtype=torch.bfloat16)).dtype == FP32


def test_kernels_called_by_hand_run_as_they_are_called() -> None:
    """A list that names `mm` does not mean `torch.ops.aten.mm`."""
    x = torch.rand(4, 4)
    assert "mm" in OpLists.named().allow
    with amp().cast():
        assert torch.ops.aten.mm(x, x).dtype == FP32
        assert torch.ops.aten.mm.default(x, x).dtype == FP32


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize("half", HALVES)
def test_script_modules_run_as_they_were_compiled(half: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), torch.rand(2, 4)
    scripted, traced = torch.jit.script(model), torch.jit.trace(model, x)
    plain = model(x)
    with amp(half).cast():
        assert model[0](x).dtype == HALVES[half]
        assert same_bits([scripted(x), traced(x)], [plain, plain])


@pytest.mark.parametrize("compute", ["native", "emulated"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("move", ["allow", "deny"])
def test_running_statistics_are_never_cast(move: str, half: str, compute: str) -> None:
    """A cast copy would be updated in their place, and the statistics would stand still."""
    norm, reference = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.rand(4, 3, 5, 5).to(HALVES[half])
    with amp(half, compute, batch_norm=move).cast():
        result = norm(x)
    reference(x.float())
    assert result.dtype == (HALVES[half] if move == "allow" else FP32)
    assert norm.running_mean is not None
    assert reference.running_mean is not None
    # Half kernels of torch sum in fp32; their order differs: some roundings of 2^-24 each.
    torch.testing.assert_close(norm.running_mean, reference.running_mean, rtol=1e-6, atol=0)


class TestWeightsOfABlock:
    """One weight is cast once in a block, and never used when it is older than its weight."""

    @staticmethod
    def casts(kernels: Kernels) -> int:
        return sum(kernel.name == "_to_copy" for kernel in kernels.ran)

    @pytest.mark.parametrize("half", HALVES)
    def test_cast_once(self, half: str) -> None:
        weight = nn.Parameter(torch.rand(4, 4))
        x = torch.rand(4, 4, dtype=HALVES[half])
        kernels = Kernels()
        with kernels, amp(half, "native").cast():
            for _ in range(5):
                F.linear(x, weight)
        assert self.casts(kernels) == 1

    def test_cast_anew_in_the_next_block(self) -> None:
        weight, x, precision = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1), amp()
        for value in (1.0, 2.0):
            weight.data.fill_(value)
            with precision.cast():
                assert F.linear(x, weight).item() == value

    def test_a_weight_updated_inside_the_block_is_seen(self) -> None:
        weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with amp().cast():
            F.linear(x, weight).sum().backward()
            optimizer.step()  # 1 - 1 * 1
            assert F.linear(x, weight).item() == 0.0

    def test_a_weight_written_in_place_is_seen(self) -> None:
        weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
        with amp().cast():
            assert F.linear(x, weight).item() == 1.0
            nn.init.zeros_(weight)
            assert F.linear(x, weight).item() == 0.0

    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
    def test_fused_optimizers_are_seen(self, kind: str, half: str) -> None:
        """Their kernels write without raising the version counter."""
        weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
        optimizer = getattr(torch.optim, kind)([weight], lr=0.5, fused=True)
        with amp(half).cast():
            F.linear(x, weight).sum().backward()
            optimizer.step()
            assert weight.item() < 1
            assert torch.equal(F.linear(x, weight), weight.detach().to(HALVES[half]))

    def test_a_fused_step_in_another_thread_is_seen(self) -> None:
        weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        with amp().cast():
            F.linear(x, weight).sum().backward()
            thread = Thread(target=optimizer.step)
            thread.start()
            thread.join()
            assert F.linear(x, weight).item() == 0.0

    def test_writes_through_data_are_seen(self) -> None:
        weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
        with amp().cast():
            assert F.linear(x, weight).item() == 1.0
            values = weight.data
            for value in (2.0, 3.0):
                values.fill_(value)
                assert F.linear(x, weight).item() == value

    def test_new_data_is_seen(self) -> None:
        weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
        with amp().cast():
            for value in (1.0, 2.0, 3.0):
                weight.data = torch.full((1, 1), value)
                assert F.linear(x, weight).item() == value

    def test_a_weight_is_kept_again_in_the_next_block(self) -> None:
        weight, x, precision = nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4).half(), amp()
        with precision.cast():
            weight.data.fill_(2.0)
        kernels = Kernels()
        with kernels, precision.cast():
            F.linear(x, weight)
            F.linear(x, weight)
        assert sum(k.name == "_to_copy" and k.gave == {HALF} for k in kernels.ran) == 1 + 2

    def test_a_cast_without_a_graph_is_not_used_with_one(self) -> None:
        weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
        with amp().cast():
            with torch.no_grad():
                F.linear(x, weight)
            F.linear(x, weight).backward()
        assert weight.grad is not None

    @torch.no_grad()
    def test_a_new_weight_at_an_old_address_is_another(self) -> None:
        """Without a graph nothing else keeps a weight alive, and its address is used again."""
        x = torch.ones(1, 1)
        with amp().cast():
            for value in range(50):
                weight = nn.Parameter(torch.full((1, 1), float(value)))
                assert F.linear(x, weight).item() == value
                del weight

    def test_gradients_of_a_weight_used_twice(self) -> None:
        weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
        with amp().cast():
            (F.linear(x, weight) + F.linear(x, weight)).sum().backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full((2, 2), 4.0))


class TestBlocks:
    """The innermost block decides; leaving one restores what was around it."""

    def test_the_same_precision_within_itself(self) -> None:
        x, precision = torch.rand(4, 4), amp()
        with precision.cast():
            with precision.cast():
                assert (x @ x).dtype == HALF
            assert (x @ x).dtype == HALF
        assert (x @ x).dtype == FP32

    def test_another_precision_within(self) -> None:
        x, outer, inner = torch.rand(4, 4), amp(), amp("bfloat16")
        with outer.cast():
            with inner.cast():
                assert (x @ x).dtype == torch.bfloat16
                with outer.cast():
                    assert (x @ x).dtype == HALF
                assert (x @ x).dtype == torch.bfloat16
            assert (x @ x).dtype == HALF

    def test_an_fp32_block_casts_nothing(self) -> None:
        x = torch.rand(4, 4)
        with amp().cast():
            with Precision("fp32").cast():
                assert (x @ x).dtype == FP32
            assert (x @ x).dtype == HALF

    def test_an_exception_leaves_no_block_open(self) -> None:
        x, precision = torch.rand(4, 4), amp()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), precision.cast():
            x @ torch.rand(3, 3)
        assert (x @ x).dtype == FP32
        with precision.cast():
            assert (x @ x).dtype == HALF

    def test_nothing_is_cast_outside(self) -> None:
        x = torch.rand(4, 4)
        amp()
        assert (x @ x).dtype == FP32

    def test_backward_outside_the_block(self) -> None:
        x = torch.rand(4, 4, requires_grad=True)
        with amp().cast():
            y = (x @ x).sum()
        y.backward()
        assert x.grad is not None
        assert x.grad.dtype == FP32


def test_function_transforms() -> None:
    model, x = nn.Linear(4, 4), torch.rand(3, 4)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).sum()

    with amp().cast():
        gradients = torch.func.grad(loss)(weights, x)
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    assert formats(gradients) == {FP32}
    assert per_sample["weight"].shape == (3, 4, 4)


def test_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4)
        with amp().cast():
            assert model(torch.rand(2, 4)).dtype == HALF


class TestCompositesAreOpened:
    """Python functions of torch that hide many ops behind one name."""

    @staticmethod
    def kernels(call: Callable[[], Any], half: str) -> set[tuple[str, torch.dtype]]:
        kernels = Kernels()
        with kernels, amp(half, "native").cast():
            call()
        return {(kernel.name, dtype) for kernel in kernels.computing() for dtype in kernel.given}

    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("training", [True, False])
    def test_attention(self, training: bool, need_weights: bool, half: str) -> None:
        attention = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
        x = torch.rand(2, 3, 8)
        ran = self.kernels(lambda: attention(x, x, x, need_weights=need_weights), half)
        assert ("addmm", HALVES[half]) in ran
        assert ("addmm", FP32) not in ran
        if need_weights:
            assert ("bmm", HALVES[half]) in ran
            assert ("_softmax", FP32) in ran

    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("norm_first", [True, False])
    def test_transformer(self, norm_first: bool, training: bool, half: str) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
        ran = self.kernels(lambda: encoder(torch.rand(2, 3, 8)), half)
        assert ("addmm", HALVES[half]) in ran
        assert ("addmm", FP32) not in ran
        assert ("native_layer_norm", FP32) in ran
        assert ("native_layer_norm", HALVES[half]) not in ran

    @pytest.mark.parametrize(
        ("call", "kernel"),
        [
            (lambda x: 1 / x, "reciprocal"),
            (lambda x: 2**x, "pow"),
            (lambda x: x.__rpow__(2), "pow"),
            (lambda x: F.gumbel_softmax(x), "_softmax"),
            (lambda x: F.softmin(x, dim=1), "_softmax"),
            (lambda x: F.normalize(x), "linalg_vector_norm"),
            (lambda x: x.norm(), "linalg_vector_norm"),
            (lambda x: F.multilabel_soft_margin_loss(x, x), None),
            (lambda x: F.local_response_norm(x[None, None], 2), "pow"),
            (lambda x: F.lp_pool2d(x[None], 2, 2), "pow"),
            (lambda x: F.gaussian_nll_loss(x, x, x.abs() + 1), "log"),
        ],
    )
    def test_what_is_hidden_in_a_function(self, call: Any, kernel: str | None) -> None:
        ran = self.kernels(lambda: call(torch.rand(4, 4).half()), "float16")
        if kernel is not None:
            assert (kernel, FP32) in ran
            assert (kernel, HALF) not in ran

    @pytest.mark.parametrize("mode", ["sum", "mean", "max"])
    def test_embedding_bag_follows_its_weight(self, mode: str) -> None:
        weight = torch.rand(5, 3)
        rows = torch.tensor([[0, 1], [2, 3]])
        with amp().cast():
            assert F.embedding_bag(rows, weight, mode=mode).dtype == FP32
            assert F.embedding_bag(rows, weight.half(), mode=mode).dtype == HALF

    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    @pytest.mark.parametrize("compute", ["native", "emulated"])
    def test_recurrent_layers(self, compute: str, kind: str, half: str) -> None:
        layer = getattr(nn, kind)(4, 3, num_layers=2, bidirectional=True)
        packed = nn.utils.rnn.pack_sequence([torch.rand(5, 4), torch.rand(2, 4)])
        with amp(half, compute).cast():
            result, _ = layer(torch.rand(5, 2, 4))
            from_packed, _ = layer(packed)
            cell = getattr(nn, f"{kind}Cell")(4, 3)(torch.rand(2, 4))
        assert formats((result, from_packed.data, cell)) == {HALVES[half]}
