"""Python calls of a tiny step: what a reader has to follow, and what a small model waits for."""

import pytest
import torch
from bench.calls import calls_of_a_step
from prepared import prepared
from torch import nn

from mpframe import Backoff
from mpframe.core.casting import torch_functions
from mpframe.training.evaluation import Evaluator
from mpframe.training.plan import Plan


@pytest.mark.parametrize(("mode", "limit"), [("fp32", 56), ("mixed", 63)])
def test_no_call_is_added_to_a_step(mode, limit) -> None:
    """On Python 3.11. Newer ones inline comprehensions, and make fewer calls."""
    for user in [*torch_functions._users]:  # Precisions that other tests left.
        torch_functions.stop_following(user)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    options = {"scaler": Backoff(), "plan": Plan(max_steps=10), "evaluator": Evaluator()}
    trainer = prepared(model, nn.CrossEntropyLoss(), mode, optimizer=torch.optim.AdamW, **options)
    batch = torch.randn(4, 8), torch.randint(0, 4, (4,))
    assert 0 < calls_of_a_step(trainer, batch) <= limit
