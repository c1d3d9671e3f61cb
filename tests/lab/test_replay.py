"""A replay draws what the step drew, and leaves the model as it was."""

import copy
from dataclasses import replace

import pytest
import torch
from faulty_steps import case_of, net, times
from torch import nn
from vocabulary import differing

from mpframe.checkpoint.state import RandomState
from mpframe.lab.autopsy.diagnosis import diagnose
from mpframe.lab.autopsy.replay import Setting, replay

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_nothing_is_left_changed(mode: str) -> None:
    middle = nn.Sequential(times(1e6), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
    model = (case := case_of(net(middle), mode, random=RandomState.now(CPU))).model.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    torch.rand(5)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), hooks()
    diagnose(case)
    assert differing((model.state_dict(), torch.get_rng_state(), hooks()), before) == []
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_the_random_numbers_of_the_step_are_drawn() -> None:
    case = case_of(net(nn.Dropout(0.5)), "fp32", scale=1.0)
    case = replace(case, random=RandomState.now(CPU))
    inputs, targets = case.batches[0]
    loss = float(nn.functional.cross_entropy(case.model(inputs), targets).detach())
    torch.rand(7)
    assert replay(case, Setting()).loss == replay(case, Setting(fp32=True)).loss == loss
