"""A precision changes functions of torch only where a block casts, and takes the changes back."""

import gc
import sys

import pytest
import torch
import torch.utils.checkpoint
from vocabulary import inside

import mpframe
from mpframe import Precision
from mpframe.core.casting import torch_functions

A = torch.rand(4, 4)


def functions():
    names = [(owner, name) for owner, name, _ in torch_functions._REPLACED]
    return {(owner, name): getattr(owner, name) for owner, name in names}


@pytest.fixture(autouse=True)
def before():
    for user in tuple(torch_functions._users):  # Those of other tests, which still live.
        torch_functions.stop_following(user)
    return functions()


class Double(torch.autograd.Function):
    forward = backward = staticmethod(lambda ctx, x: x * 2)


def frames_of_mpframe():
    """How many of its functions a custom function and a checkpoint run outside of any block."""
    seen, x = [], A.clone().requires_grad_()

    def count(frame, event, _) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(mpframe.__path__[0]):
            seen.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        y = torch.utils.checkpoint.checkpoint(torch.exp, Double.apply(x), use_reentrant=False)
        y.sum().backward()
    finally:
        sys.setprofile(None)
    return seen


def test_what_is_replaced_is_what_the_page_names(before) -> None:
    with Precision("amp").cast():
        now = functions()
        assert frames_of_mpframe()
    changed = {name for (_, name), function in now.items() if before[_, name] is not function}
    others = {"_engine_run_backward", "update_parameters"}
    assert changed == {"__init__", "apply", "__call__"} | others


@pytest.mark.parametrize("mode", ["fp32", "amp", "mixed"])
def test_preparing_or_a_block_in_fp32_changes_nothing(mode, before) -> None:
    model, precision = torch.nn.Linear(4, 4), Precision(mode)
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with (precision if mode == "fp32" else Precision("fp32")).cast():
        assert functions() == before
        assert not frames_of_mpframe()


def test_release_takes_it_back(before) -> None:
    first, second = Precision("amp"), Precision("mixed")
    for precision in (first, second, first):
        inside(precision, torch.exp)(A)
    first.release()
    assert functions() != before  # The second needs it.
    for precision in (second, second, Precision("fp32")):
        precision.release()
    assert functions() == before
    assert not frames_of_mpframe()
    with first.cast():
        assert functions() != before
    first.release()
    assert functions() == before


def test_the_end_of_a_precision_takes_it_back_and_a_graph_outlives_it(before) -> None:
    """The graph keeps the casts that its backward pass needs."""
    precision, x = Precision("amp"), A.clone().requires_grad_()
    y = inside(precision, Double.apply)(x)
    del precision
    gc.collect()
    assert functions() != before
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 2.0))
    del y
    gc.collect()
    assert functions() == before


def test_a_backward_pass_under_torch_autocast_is_torchs(before) -> None:
    precision, found = Precision("amp", "bfloat16"), []
    inside(precision, torch.exp)(A)
    for _ in range(2):
        x = A.clone().requires_grad_()
        y = x @ x
        with torch.autocast("cpu", torch.bfloat16):
            y.sum().backward()
        found.append(x.grad)
        precision.release()
    assert functions() == before
    assert torch.equal(*found)
