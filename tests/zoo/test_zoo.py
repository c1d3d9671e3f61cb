"""Real models train in every mode where they train under torch.autocast, to the same gradients.

These few take seconds; `pytest tests/zoo --zoo` trains them all. torchvision is always there; of
the other libraries one or two models each, where they are installed.
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from comparison import MODES, Row, compare
from fixtures import TooLong, time_limit
from other_libraries import LIBRARIES

WHOLE = ("torchvision", "timm", "transformers", "diffusers")
SHORT = (
    *("torchvision/vit", "torchvision/mobilenet_v3_small", "transformers/bert"),
    *("transformers/llama", "timm/test_vit", "diffusers/UNet2DModel"),
)
# The libraries' own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--zoo", False)
        metafunc.parametrize("model", names() if whole else SHORT)


def names() -> list[str]:
    """library/name of every model of the libraries that are installed."""
    with warnings.catch_warnings(action="ignore"):
        found = [(lib, import_module(f"{lib}_models")) for lib in WHOLE if find_spec(lib)]
        return [f"{library}/{name}" for library, models in found for name in models.names()]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_models(
    model: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    need(model.split("/")[0])
    row = row_of(model, request.config.getoption("--limit", 300.0))
    record_property("zoo", row.line())
    if model in SHORT:
        assert not row.built
        assert_measured(row)
    elif row.built:
        pytest.skip(f"not built: {row.built}")
    assert not row.failures


def row_of(model: str, limit: float) -> Row:
    library, name = model.split("/", 1)
    torch.manual_seed(0)
    try:
        with time_limit(limit):
            return compare(model, import_module(f"{library}_models").build(name))
    except TooLong:
        return Row(model, failures=[f"more than {limit:.0f} s"])
    except Exception as error:  # Plain torch cannot train it: not a matter of precision.
        reason = str(error).splitlines()[0] if str(error) else ""
        return Row(model, built=f"{type(error).__name__}: {reason}")


@pytest.mark.parametrize("name", LIBRARIES)
def test_twenty_steps(name: str) -> None:
    need(name)
    torch.manual_seed(0)
    assert_measured(compare(name, LIBRARIES[name]()))


def need(library: str) -> None:
    pytest.importorskip(library, reason=f'{library} is not installed: pip install -e ".[zoo]"')


def assert_measured(row: Row) -> None:
    assert not row.failures
    assert row.modes.keys() >= MODES.keys()
    assert all(isinstance(size, float) for size in row.modes.values())
    assert row.modes["fp32"] == 0.0
