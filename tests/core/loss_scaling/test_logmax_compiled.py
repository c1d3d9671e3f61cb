"""LogMax's update on an accelerator: one kernel of Inductor, and op by op if there is none."""

import math

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import metrics
from vocabulary import differing

from mpframe.core.loss_scaling import LogMax, logmax


@pytest.fixture(autouse=True)
def _triton(monkeypatch) -> None:
    """As if the CPU were an accelerator that Inductor can compile for."""
    monkeypatch.setattr(logmax, "has_triton", lambda: True)
    monkeypatch.setattr(logmax, "host_waits_for", lambda _: True)
    logmax._ways.cache_clear()
    yield
    logmax._ways.cache_clear()


def observed(scaler, steps):
    """Its state after gradients of two levels, overflows, zeros and nan among them."""
    noise = torch.randn(steps, generator=torch.Generator().manual_seed(0))
    amaxes = torch.exp2(3 * noise - 10.0 * (torch.arange(steps) > steps // 2))
    amaxes[::30], amaxes[5::40], amaxes[80:84] = math.inf, 0.0, math.nan
    for amax in amaxes:
        scaler.update(amax)
    return scaler.state


@pytest.mark.slow
def test_its_update_is_one_kernel_with_the_bits_of_the_host(monkeypatch) -> None:
    metrics.reset()
    counters.clear()
    compiled = observed(LogMax(), 200)
    assert (metrics.generated_kernel_count, counters["stats"]["unique_graphs"]) == (1, 1)
    assert not counters["graph_break"]
    monkeypatch.setattr(logmax, "host_waits_for", lambda _: False)
    assert differing(compiled, observed(LogMax(), 200)) == []


def test_without_a_compiler_it_says_so_once_and_goes_on_op_by_op(monkeypatch, caplog) -> None:
    def no_compiler(*_, **__):
        def compiled(*_):
            raise RuntimeError("Failed to find C compiler")

        return compiled

    monkeypatch.setattr(torch, "compile", no_compiler)
    by_op = observed(LogMax(), 3)
    assert caplog.messages == [
        "loss_scaling=LogMax: not compiled, so it takes longer: Failed to find C compiler"
    ]
    monkeypatch.setattr(logmax, "host_waits_for", lambda _: False)
    assert differing(by_op, observed(LogMax(), 3)) == []
