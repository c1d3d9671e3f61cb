"""Real models train in every mode where they train under torch.autocast, to the same gradients.

These few take seconds; `python tests/zoo/run.py` trains them all. torchvision is always there; of
the other libraries one or two models each, where they are installed.
"""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from comparison import MODES, compare
from example import Example, called, loss_of
from other_libraries import LIBRARIES
from torch import nn
from torch.overrides import _get_current_function_mode_stack

SHORT = (
    *("torchvision/vit", "torchvision/mobilenet_v3_small", "transformers/bert"),
    *("transformers/llama", "timm/test_vit", "diffusers/UNet2DModel"),
)
# The libraries' own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


def assert_agrees(library: str, name: str, build: Callable[[], Example]) -> None:
    pytest.importorskip(library, reason=f'{library} is not installed: pip install -e ".[zoo]"')
    torch.manual_seed(0)
    row = compare(name, build())
    assert not row.failures
    assert row.modes.keys() >= MODES.keys()
    assert all(isinstance(size, float) for size in row.modes.values())
    assert row.modes["fp32"] == 0.0


@pytest.mark.parametrize("name", SHORT)
def test_models(name: str) -> None:
    library, model = name.split("/")
    assert_agrees(library, name, lambda: import_module(f"{library}_models").build(model))


@pytest.mark.parametrize("name", LIBRARIES)
def test_twenty_steps(name: str) -> None:
    assert_agrees(name, name, LIBRARIES[name])


class Refuses(nn.Linear):
    """Works under torch.autocast, and raises where something else than torch casts its ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        cast = y.dtype != torch.float32 and _get_current_function_mode_stack()
        return self.change(y) if cast else y

    def change(self, y: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("half")


class Coarse(Refuses):
    def change(self, y: torch.Tensor) -> torch.Tensor:
        return y + (y * 16).round().detach() - (y * 16).detach()


@pytest.mark.parametrize(("kind", "said"), [(Refuses, "RuntimeError: half"), (Coarse, "from fp32")])
def test_a_failure_is_seen(kind: type[nn.Linear], said: str) -> None:
    torch.manual_seed(0)
    row = compare("own/model", called(kind(4, 4), torch.randn(8, 4)))
    assert len(row.failures) == 4
    assert all(said in failure for failure in row.failures)


def test_gradients_of_normalised_outputs_say_something() -> None:
    """The mean square of a norm's outputs is constant; the distance to noise is not."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    loss_of(layer(torch.randn(4, 8))).backward()
    assert layer[0].weight.grad.norm() > 1e-2
