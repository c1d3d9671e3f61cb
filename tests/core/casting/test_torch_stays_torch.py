"""A precision changes functions of torch only where a block casts, and takes the changes back."""

import gc

import pytest
import torch
from vocabulary import inside

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


def test_only_a_block_that_casts_replaces_something_and_it_is_what_the_page_names(before) -> None:
    for mode in ("fp32", "amp", "mixed"):
        model, precision = torch.nn.Linear(4, 4), Precision(mode)
        precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with (precision if mode == "fp32" else Precision("fp32")).cast():
            assert functions() == before
    with Precision("amp").cast():
        now = functions()
    changed = {name for (_, name), function in now.items() if before[_, name] is not function}
    others = {"_engine_run_backward", "update_parameters"}
    assert changed == {"__init__", "apply", "__call__"} | others


def test_release_takes_it_back(before) -> None:
    first, second = Precision("amp"), Precision("mixed")
    for precision in (first, second, first):
        inside(precision, torch.exp)(A)
    first.release()
    assert functions() != before  # The second needs it.
    for precision in (second, second, Precision("fp32")):
        precision.release()
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
