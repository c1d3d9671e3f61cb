"""Where a rank stands, what it computes on, and what it is to read and send."""

import tempfile
from typing import Any

import pytest
import torch
from fixtures import Patch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mpframe.cli.commands.train import of_this_rank
from mpframe.core.comm import Comm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.parallel import launch
from mpframe.parallel.launch import refuse_misfit
from mpframe.parallel.place import Place, place
from mpframe.run.parts import resolve_device
from mpframe.training.optimizers.lbfgs import ClosureTrainer
from mpframe.training.trainer import Trainer


def pretend(monkeypatch: Patch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def second(monkeypatch: Patch) -> None:
    """This process is the second of three, and of two on its machine."""
    here = {"LOCAL_RANK": "1", "MASTER_ADDR": "", "MASTER_PORT": ""}
    pretend(monkeypatch, RANK="1", WORLD_SIZE="3", **here)


def test_a_process_of_its_own_is_alone(monkeypatch: Patch) -> None:
    pretend(monkeypatch, RANK="1", WORLD_SIZE="3")  # Some clusters set it for their own ends.
    assert place() == Place(0, 1, 0)


@pytest.mark.usefixtures("second")
def test_each_rank_has_a_device_of_its_own(monkeypatch: Patch) -> None:
    assert place() == Place(1, 3, 1)
    given = {(2, "auto"): "cuda:1", (2, "cuda"): "cuda:1", (2, "cpu"): "cpu", (0, "auto"): "cpu"}
    for (devices, asked), device in given.items():
        monkeypatch.setattr(torch.cuda, "device_count", lambda own=devices: own)
        assert resolve_device(asked) == torch.device(device)
    start = "start torchrun with --nproc-per-node 1, or "
    for devices, asked, way in ((1, "auto", start), (0, "cuda", "")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda own=devices: own)
        said = f"has {devices} CUDA devices and more ranks; {way}use device=cpu"
        with pytest.raises(ConfigError, match=said):
            resolve_device(asked)


PARTNER = type("Partner", (Comm,), {"size": 2, "sum_": lambda *_: None})  # The other sends zeros.


def test_what_several_ranks_do_not_do_together() -> None:
    cases: list[Any] = [
        (nn.Linear(8, 4), torch.optim.LBFGS, ClosureTrainer, "optimizer=LBFGS evaluates the"),
        (nn.Embedding(4, 4, sparse=True), torch.optim.SGD, Trainer, "a gradient is sparse, and"),
    ]
    for model, optimizer, kind, said in cases:
        masters, loss = MasterWeights(optimizer(model.parameters(), lr=0.1)), nn.MSELoss()
        with pytest.raises(ConfigError, match=rf"^trainer\.parallel=ddp: {said}"):
            kind(model, masters, supervised(loss), comm=PARTNER()).train_step(
                (torch.arange(4), torch.zeros(4, 4))
            )


@pytest.mark.usefixtures("second")
def test_a_sweep_does_not_go_with_torchrun() -> None:
    with pytest.raises(ConfigError, match=r"^-m: torchrun has started 3 processes for one run"):
        of_this_rank(["-m", "seed=1,2"])
    assert of_this_rank(["seed=1"]) == ["seed=1", f"hydra.run.dir={tempfile.gettempdir()}"]


def test_rank_0_that_meets_an_error_late_does_not_repeat_it(monkeypatch: Patch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(launch, "_WAIT", 1.0)
    pretend(monkeypatch, WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    pretend(monkeypatch, MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    lines = []
    for rank, text in (("1", "late"), ("0", "late"), ("0", "early"), ("1", "early")):
        monkeypatch.setenv("RANK", rank)
        lines.append(launch.line_of(ConfigError(text)))
    assert lines == ["rank 1: late", None, "early", None]


def test_processes_that_srun_has_started_alone_are_refused(monkeypatch: Patch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    pretend(monkeypatch, SLURM_NTASKS="2", SLURM_PROCID="0")
    refuse_misfit(None)  # In a batch script, whose one process may train.
    pretend(monkeypatch, SLURM_STEP_NUM_TASKS="2")
    refuse_misfit("none")
    with pytest.raises(ConfigError) as refused:
        refuse_misfit(None)
    assert str(refused.value) == (
        "srun has started 2 processes, and each would train by itself; let it start one torchrun "
        "on each machine: srun --ntasks-per-node 1 torchrun --nproc-per-node 2 scripts/train.py "
        "...; or, for separate runs, set trainer.parallel=none"
    )
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(ConfigError, match="srun has started 2 processes"):
        refuse_misfit("ddp")
    own = {"LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    pretend(monkeypatch, RANK="1", WORLD_SIZE="2", **own)
    refuse_misfit(None)  # torchrun's, of which srun has started one on each machine.


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_processes_are_needed(parallel: str) -> None:
    with pytest.raises(ConfigError, match=f"^trainer.parallel={parallel}: needs several processes"):
        refuse_misfit(parallel)
