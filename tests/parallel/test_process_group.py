"""What ranks tell each other: sums, norms, values of one of them, and BatchNorm's statistics."""

from typing import Any

import pytest
import torch
from rank_training import CPU, assert_same, bad_input, on_ranks, trained
from ranks import Ranks
from torch import Tensor, nn

from mpframe.core.comm import SINGLE_PROCESS
from mpframe.parallel import process_group
from mpframe.parallel.launch import init_comm


def sums(large: int) -> list[Tensor]:
    """Where tensors of so many bytes are sent alone; one of them does not lie in rows."""
    with init_comm(None, lambda: CPU, 60) as comm, pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_group, "_LARGE", large)
        own = [
            torch.full((4,), 1.0 + comm.rank),
            torch.arange(6.0).view(2, 3).t() + comm.rank,
            torch.full((2,), 0.1, dtype=torch.float64),
            torch.arange(10.0) * (comm.rank + 1),
        ]
        comm.sum_(own)
        return own


@pytest.mark.parametrize("large", [1, 24, 2**22])
def test_sums_are_the_same_however_tensors_are_sent(two: Ranks, large: int) -> None:
    columns = torch.arange(6.0).view(2, 3).t() * 2 + 1
    expected = [torch.full((4,), 3.0), columns, torch.full((2,), 0.2, dtype=torch.float64)]
    expected.append(torch.arange(10.0) * 3)
    for found in two(sums, large):
        assert_same(found, expected)


def largest_norm() -> Tensor:
    with init_comm(None, lambda: CPU, 60) as comm:
        return comm.norm(torch.tensor(2e38))


def test_a_norm_of_parts_whose_squares_overflow_is_finite(two: Ranks) -> None:
    for found in two(largest_norm):
        assert torch.equal(found, torch.tensor(2e38 * 2**0.5))


class Third(process_group.ProcessGroup):
    """The third of four ranks whose weights are divided; the second has no batch."""

    def __init__(self) -> None:
        self.sharding = object()  # type: ignore[assignment]

    def any(self, flag: bool) -> bool:
        return True

    def gather_object(self, value: Any) -> list[Any]:
        return ["first", None, value, "fourth"]

    def broadcast_object(self, value: Any) -> Any:
        return value


def test_only_a_rank_without_a_batch_gets_that_of_another() -> None:
    found = [Third().broadcast_if_missing(own) for own in ("third", None)]
    assert found == ["third", "first"]


def normalized(shape: tuple[int, ...]) -> dict[str, Tensor]:
    with init_comm(None, lambda: CPU, 120) as comm:
        random = torch.Generator().manual_seed(3)
        inputs = comm.part(torch.randn(shape, generator=random) + 2).clone().requires_grad_()
        pull = comm.part(torch.randn(shape, generator=random))
        norm = nn.BatchNorm1d(3)
        comm.synchronize_batchnorm(norm)
        outputs = norm(inputs)
        (outputs * pull).sum().backward()
    grads = {"inputs": inputs.grad, "weight": norm.weight.grad, "bias": norm.bias.grad}
    return {"outputs": outputs.detach(), **grads, **dict(norm.named_buffers())}


@pytest.mark.parametrize("shape", [(6, 3, 5), (6, 3)])
def test_synchronized_batchnorm_is_that_of_one_process(two: Ranks, shape: tuple[int, ...]) -> None:
    """Outputs, input gradients, weight gradients and running statistics, to fp32 rounding.

    Each is a sum of n = 6 * 5 values of order 1, at most n u sum |terms| from any other order of
    it; the gradient multiplies a few of these.
    """
    parts, whole = two(normalized, shape), normalized(shape)
    for name in ("outputs", "inputs"):
        merged = torch.cat([part[name] for part in parts])
        assert torch.allclose(merged, whole[name], rtol=0, atol=30 * 30 * 2**-24), name
    for name in ("weight", "bias"):
        added = parts[0][name] + parts[1][name]
        assert torch.allclose(added, whole[name], rtol=0, atol=30 * 30 * 2**-24), name
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(parts[0][name], parts[1][name]), name
        assert torch.allclose(parts[0][name], whole[name], rtol=30 * 2**-24, atol=2**-22), name


def test_ranks_with_synchronized_batchnorm_stay_the_same(two: Ranks) -> None:
    options = {"sync": True, "norm": True, "whole": True, "faults": {1: bad_input}, "steps": 3}
    first, second = two(on_ranks, "mixed", options)
    assert_same(first["states"], second["states"])
    assert [own["skipped"] for own in first["results"]] == [False, True, False, False]
    # Statistics that differ in the last fp32 bit may round single half values to a neighbour.
    one = trained("mixed", SINGLE_PROCESS, {"norm": True, "whole": True, "steps": 1})
    assert first["results"][0]["loss"] == pytest.approx(one["results"][0]["loss"], rel=2**-9)


@pytest.mark.parametrize(
    ("name", "size"), [("resnet18", 2), pytest.param("gpt", 4, marks=pytest.mark.slow)]
)
def test_ranks_equal_one_process_with_the_whole_batch(
    request: pytest.FixtureRequest, name: str, size: int
) -> None:
    """With synchronised BatchNorm, in float64, where rounding leaves room for nothing else.

    Sums of at most 10^4 terms in another order differ by 10^4 * 2^-53 = 1e-12 of their size; three
    more digits are for what 18 layers and 2 steps make of it.
    """
    options = {"name": name, "double": True, "sync": True, "optimizer": torch.optim.SGD, "steps": 2}
    ranks = request.getfixturevalue({2: "two", 4: "four"}[size])
    first, *others = ranks(on_ranks, "fp32", options)
    for other in others:
        assert_same(first, other)
    alone = trained("fp32", SINGLE_PROCESS, options)
    for ours, theirs in zip(first["weights"], alone["weights"], strict=True):
        assert torch.allclose(ours.double(), theirs.double(), rtol=1e-9, atol=1e-9)
    for own, other in zip(first["results"], alone["results"], strict=True):
        assert own == pytest.approx(other, rel=1e-9)
