"""Devices and targets: what build makes of options, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpframe.build import build_loaders, make, resolve_device
from mpframe.errors import ConfigError


def test_auto_takes_what_there_is() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda", "mps")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gpu", "device=gpu: choose auto, cpu, cuda, cuda:N or mps"),
        ("cpu:1", "device=cpu:1: choose auto, cpu, cuda, cuda:N or mps"),
        ("cuda:x", "device=cuda:x: choose auto, cpu, cuda, cuda:N or mps"),
        ("cuda:99", r"device=cuda:99: this machine has \d+ CUDA devices; use device=cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        resolve_device(name)


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"_target_": "torch.nn"}, "_target_=torch.nn: is a module; name a class or function, as in torch.nn.Name"),
        ({"_target_": "torch.nn.Linear", "in_feature": 3}, "in_feature=3: torch.nn.Linear takes no such argument; nearest: in_features"),
        ({"_target_": "torch.nn.Linear", "in_features": 3}, "torch.nn.Linear refused its options: .*out_features"),
        ({"_target_": "nowhere.Net"}, "model._target_=nowhere.Net: "),
        ({"_target_": "torch.nn.Conv2d", "in_channels": 3, "out_channels": 4, "kernel_size": 3, "groups": 2}, "torch.nn.Conv2d refused its options: in_channels must be divisible by groups"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_made_is_refused_in_one_line(
    node: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        make("model", node)
    assert "\n" not in str(refused.value)


def test_a_target_is_called_with_its_options() -> None:
    linear = make("model", {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2})
    assert linear.weight.shape == (2, 3)


@pytest.mark.parametrize(("device", "pin"), [("cpu", False), ("cuda:0", True)])
def test_batches_are_pinned_for_a_cuda_device(
    device: str, pin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    monkeypatch.setattr(
        "mpframe.build.data.Loader", lambda *_, **options: made.append(options["pin"])
    )
    monkeypatch.setattr("mpframe.build.data.resolve_device", torch.device)
    data = SimpleNamespace(batch_size=2, workers=0, worker_timeout=None)
    config: Any = SimpleNamespace(data=data, run=SimpleNamespace(seed=0, device=device))
    task: Any = SimpleNamespace(train=[], val=[], test=[], collate=None)
    build_loaders(config, task)
    assert made == [pin, pin, pin]
