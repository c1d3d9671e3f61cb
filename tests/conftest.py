"""Makes what the tests share importable from every folder of tests."""

import gc
import logging
import pickle
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from hydra._internal.core_plugins import file_config_source
from omegaconf import OmegaConf
from ranks import Ranks


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for no garbage among modules and tests: it takes a third of the time of collecting."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_unconfigure() -> None:
    gc.unfreeze()


class Parsed:
    """Hydra's reader of YAML: each text is parsed once, a third of the time of composing."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}

    def load(self, file: TextIO) -> Any:
        text = file.read()
        if text not in self._texts:
            file.seek(0)  # With its name, for an error.
            self._texts[text] = pickle.dumps(OmegaConf.load(file))
        return pickle.loads(self._texts[text])


file_config_source.OmegaConf = Parsed()


@pytest.fixture(autouse=True)
def _logging_left_as_found() -> Iterator[None]:
    """What Hydra sets up in a test, handlers and level, would change what the next one sees."""
    root = logging.getLogger()
    level, before = root.level, _handlers(root)
    yield
    for handler in _handlers(root) - before:
        root.removeHandler(handler)
        handler.close()
    for handler in before:
        root.addHandler(handler)  # One that is there is not added again.
    root.setLevel(level)


def _handlers(root: logging.Logger) -> set[logging.Handler]:
    """But pytest's own, which come and go with each phase of a test."""
    return {own for own in root.handlers if not type(own).__module__.startswith("_pytest")}


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the device, as for a GPU: torch's fused optimizers skip by themselves."""
    for module in ("objective", "optim.master_weights", "loss_scaling.logmax"):
        monkeypatch.setattr(f"mpframe.core.{module}.host_waits_for", lambda device: True)


@pytest.fixture
def only_new_tensors() -> Iterator[None]:
    """Garbage collection, and who asks it for objects, knows those only that the test makes."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    with Ranks(2) as own:
        yield own


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    with Ranks(4) as own:
        yield own


@pytest.fixture(scope="module", autouse=True)
def modules_of_temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forgets what the tests of a file imported from their folders: others use the same names."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
    for name in (name for name, file in files.items() if file.startswith(base)):
        del sys.modules[name]
    sys.path[:] = [place for place in sys.path if not place.startswith(base)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder, which is the current one during the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start_run() -> Callable[..., Any]:
    """Train as a command line would, in this process: start_run(folder, "dtype=fp32", ...)."""
    from in_process import train  # Few tests need what it imports.

    return train


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few samples for each dataset that reads files, in the formats those have."""
    from tiny_data import write_tiny_data

    return write_tiny_data(tmp_path_factory.mktemp("data"))
