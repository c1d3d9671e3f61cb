"""How blocks nest, on one thread and on several, and which casts of weights a block keeps."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary import HALVES, Kernels, formats, in_another_thread, same_bits

from mpframe import OpLists, Precision

FP32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
X = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))


def amp(half: str = "float16", compute: str = "auto", **pins: str) -> Precision:
    lists = OpLists.named()
    ops = OpLists(lists.allow, lists.deny, lists.infer, pins)
    return Precision("amp", half, compute=compute, ops=ops)


class TestBlocks:
    """The innermost block decides; leaving one restores what was around it."""

    def test_blocks_within_blocks(self) -> None:
        outer, inner = amp(), amp("bfloat16")
        with outer.cast():
            with outer.cast():
                assert (X @ X).dtype == HALF
            with inner.cast():
                assert (X @ X).dtype == BF16
                with outer.cast():
                    assert (X @ X).dtype == HALF
                assert (X @ X).dtype == BF16
            with Precision("fp32").cast():
                assert (X @ X).dtype == FP32
            assert (X @ X).dtype == HALF
        assert (X @ X).dtype == FP32

    def test_an_exception_leaves_no_block_open(self) -> None:
        precision = amp()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), precision.cast():
            X @ torch.rand(3, 3)
        assert (X @ X).dtype == FP32
        with precision.cast():
            assert (X @ X).dtype == HALF

    def test_without_lists_a_pinned_module_gives_half_to_the_next(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        precision = Precision("mixed", ops=OpLists(modules={"1": "fp32"}))
        precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with precision.cast():
            assert model(X.half()).dtype == HALF

    def test_a_backward_pass_outside(self) -> None:
        x = X.clone().requires_grad_()
        with amp().cast():
            y = (x @ x).sum()
        y.backward()
        assert x.grad is not None
        assert x.grad.dtype == FP32

    def test_function_transforms(self) -> None:
        model, x = nn.Linear(4, 4), torch.rand(3, 4)
        weights = dict(model.named_parameters())

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (x,)).sum()

        with amp().cast():
            gradients = torch.func.grad(loss)(weights, x)
            per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        assert formats(gradients) == {FP32}
        assert per_sample["weight"].shape == (3, 4, 4)

    def test_inference_mode(self) -> None:
        with torch.inference_mode():
            model = nn.Linear(4, 4)
            with amp().cast():
                assert model(X).dtype == HALF


def weight_of(value: float = 1.0) -> tuple[nn.Parameter, Tensor]:
    return nn.Parameter(torch.full((1, 1), value)), torch.ones(1, 1)


class TestWeightsOfABlock:
    """One weight is cast once in a block, and never used when it is older than its weight."""

    @pytest.mark.parametrize("half", HALVES)
    def test_cast_once(self, half: str) -> None:
        weight, x, kernels = nn.Parameter(X.clone()), X.to(HALVES[half]), Kernels()
        with kernels, amp(half, "native").cast():
            for _ in range(5):
                F.linear(x, weight)
        assert sum(kernel.name == "_to_copy" for kernel in kernels.ran) == 1

    def test_cast_anew_in_the_next_block(self) -> None:
        (weight, x), precision = weight_of(), amp()
        for value in (1.0, 2.0):
            weight.data.fill_(value)
            with precision.cast():
                assert F.linear(x, weight).item() == value

    def test_a_weight_written_in_place_is_seen(self) -> None:
        weight, x = weight_of()
        with amp().cast():
            assert F.linear(x, weight).item() == 1.0
            nn.init.zeros_(weight)
            assert F.linear(x, weight).item() == 0.0

    @pytest.mark.parametrize("run", [lambda step: step(), in_another_thread])
    @pytest.mark.parametrize(
        ("kind", "fused", "half"),
        [("SGD", False, "float16"), ("SGD", True, "bfloat16"), ("AdamW", True, "float16")],
    )
    def test_an_optimizer_is_seen(self, kind: str, fused: bool, half: str, run: Any) -> None:
        """The kernels of fused ones write without raising the version counter."""
        weight, x = weight_of()
        optimizer = getattr(torch.optim, kind)([weight], lr=0.5, fused=fused)
        with amp(half).cast():
            F.linear(x, weight).sum().backward()
            run(optimizer.step)
            assert weight.item() < 1
            assert torch.equal(F.linear(x, weight), weight.detach().to(HALVES[half]))

    @pytest.mark.parametrize("replaced", [False, True])
    def test_writes_through_data_are_seen(self, replaced: bool) -> None:
        weight, x = weight_of()
        with amp().cast():
            assert F.linear(x, weight).item() == 1.0
            values = weight.data
            for value in (2.0, 3.0):
                if replaced:
                    weight.data = torch.full((1, 1), value)
                else:
                    values.fill_(value)
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
        weight, x = weight_of()
        with amp().cast():
            with torch.no_grad():
                F.linear(x, weight)
            F.linear(x, weight).backward()
        assert weight.grad is not None

    @torch.no_grad()
    def test_a_new_weight_at_an_old_address_is_another(self) -> None:
        """Without a graph nothing else keeps a weight alive, and its address is used again."""
        with amp().cast():
            for value in range(50):
                weight, x = weight_of(float(value))
                assert F.linear(x, weight).item() == value
                del weight


class Net(nn.Module):
    """A half product, a recurrent layer and a head, which may be pinned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.cell, self.head = nn.Linear(8, 8), nn.GRU(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        body = self.body(x)
        cell, _ = self.cell(body)
        return [body, cell, self.head(cell)]


@pytest.fixture
def pinned() -> tuple[Precision, Callable[[], list[Tensor]]]:
    """A precision, and a forward pass of a model whose head it pins, outside of any block."""
    precision, model, x = amp(head="fp32"), Net(), torch.rand(2, 3, 8)
    precision.attach(model)
    return precision, lambda: model(x)


def dtypes(results: list[Tensor]) -> list[torch.dtype]:
    return [tensor.dtype for tensor in results]


class TestThreads:
    """Whether casts are on is a matter of the present thread: blocks of two do not meet."""

    def test_no_block_here_although_there_is_one_in_another(self, pinned: Any) -> None:
        precision, forward = pinned
        with precision.cast():
            assert formats(in_another_thread(forward)) == {FP32}

    @pytest.mark.parametrize("first_out", [True, False])
    def test_blocks_that_overlap_end_on_their_own(self, pinned: Any, first_out: bool) -> None:
        (precision, forward), expected = pinned, [HALF, HALF, FP32]
        opened, leave, found = Event(), Event(), list[list[torch.dtype]]()

        def hold() -> None:
            with precision.cast():
                with Precision("fp32").cast():
                    opened.set()
                    leave.wait(60)
                found.append(dtypes(forward()))

        thread = Thread(target=hold)
        with precision.cast():
            thread.start()
            opened.wait(60)
            if not first_out:
                leave.set()
                thread.join()
            assert dtypes(forward()) == expected
        leave.set()
        thread.join()
        assert found == [expected]
        assert formats(forward()) == {FP32}

    def test_a_block_begun_while_another_thread_is_in_a_pinned_module(self) -> None:
        precision, model, x = amp(head="fp32"), Net(), torch.rand(2, 3, 8)
        precision.attach(model)
        inside, leave, found = Event(), Event(), list[list[torch.dtype]]()

        def hold(*_: Any) -> None:
            inside.set()
            leave.wait(60)

        def forward() -> None:
            with precision.cast():
                found.append(dtypes(model(x)))

        model.head.register_forward_pre_hook(hold)
        thread = Thread(target=forward)
        thread.start()
        inside.wait(60)
        with precision.cast():
            assert (x @ x.mT).dtype == HALF
            leave.set()
            thread.join()
        assert found == [[HALF, HALF, FP32]]

    @torch.no_grad()
    def test_many_threads_at_once(self, pinned: Any) -> None:
        (precision, forward), found = pinned, list[list[Tensor]]()
        plain = forward()

        @torch.no_grad()
        def steps() -> None:
            for _ in range(20):
                with precision.cast():
                    found.append(forward())

        steps()
        threads = [Thread(target=steps) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 100
        assert all(same_bits(result, found[0]) for result in found)
        assert same_bits(forward(), plain)
