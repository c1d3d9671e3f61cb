"""Where a rank stands, what it computes on, and what it is to read and send."""

import tempfile

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mpframe.cli.commands.train import of_this_rank
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.core.precision import Precision
from mpframe.parallel import launch
from mpframe.parallel.launch import refuse_misfit
from mpframe.parallel.place import Place, place
from mpframe.run.parts import resolve_device
from mpframe.training.optimizers.lbfgs import ClosureTrainer
from mpframe.training.trainer import Trainer


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the second of three, and of two on its machine."""
    here = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "", "MASTER_PORT": ""}
    for name, value in here.items():
        monkeypatch.setenv(name, value)


def test_a_process_of_its_own_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place() == Place(0, 1, 0)
    monkeypatch.setenv("RANK", "1")  # Some clusters set it for their own ends.
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert place() == Place(0, 1, 0)


@pytest.mark.usefixtures("second")
def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place() == Place(1, 3, 1)
    devices = 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cpu") == torch.device("cpu")
    devices = 1
    said = "start torchrun with --nproc-per-node 1, or use device=cpu"
    with pytest.raises(ConfigError, match=f"has 1 CUDA devices and more ranks; {said}"):
        resolve_device("auto")
    devices = 0
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="has 0 CUDA devices and more ranks; use device=cpu"):
        resolve_device("cuda")


class Counting(Comm):
    """One of two ranks whose partner sends zeros; counts what would be sent."""

    size = 2

    def __init__(self) -> None:
        self.sent = 0

    def sum_(self, tensors: list[Tensor]) -> None:  # type: ignore[override]
        self.sent += sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("count", [1, 5, 64])
def test_the_parts_of_all_ranks_are_the_batch(count: int) -> None:
    samples, worlds = torch.arange(count), [Comm() for _ in range(3)]
    for rank, own in enumerate(worlds):
        own.rank, own.size = rank, 3
    parts = [own.part(samples) for own in worlds]
    assert torch.equal(torch.cat(parts), samples)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("mode", "accumulate"), [("fp32", 1), ("mixed", 4)])
def test_a_step_sends_each_gradient_once_in_fp32(mode: str, accumulate: int) -> None:
    model = nn.Linear(8, 4)
    precision, comm = Precision(mode), Counting()
    _, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(optimizer, MasterWeights)
    assert optimizer.comm is SINGLE_PROCESS
    trainer = Trainer(model, optimizer, supervised(nn.MSELoss()), precision, comm=comm)
    trainer.train_step(*[(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(accumulate)])
    assert comm.sent == 4 * (8 * 4 + 4)


def made(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: type[Trainer] = Trainer
) -> Trainer:
    masters = MasterWeights(optimizer)
    return kind(model, masters, supervised(nn.MSELoss()), comm=Counting())


def test_what_several_ranks_do_not_do_together() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"^trainer\.parallel=ddp: optimizer=LBFGS evaluates the"):
        made(model, torch.optim.LBFGS(model.parameters()), ClosureTrainer)
    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    trainer = made(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
    with pytest.raises(
        ConfigError, match=r"^trainer\.parallel=ddp: a gradient is sparse, and ranks"
    ):
        trainer.train_step((torch.arange(4), torch.zeros(4, 2)))


@pytest.mark.usefixtures("second")
def test_a_sweep_does_not_go_with_torchrun() -> None:
    with pytest.raises(ConfigError, match=r"^-m: torchrun has started 3 processes for one run"):
        of_this_rank(["-m", "seed=1,2"])
    assert of_this_rank(["seed=1"]) == ["seed=1", f"hydra.run.dir={tempfile.gettempdir()}"]


def test_rank_0_that_meets_an_error_late_does_not_repeat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(launch, "_WAIT", 1.0)
    for name, value in {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    lines = []
    for rank, text in (("1", "late"), ("0", "late"), ("0", "early"), ("1", "early")):
        monkeypatch.setenv("RANK", rank)
        lines.append(launch.line_of(ConfigError(text)))
    assert lines == ["rank 1: late", None, "early", None]


def test_processes_that_srun_has_started_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")  # In a batch script, too, whose one process may train.
    monkeypatch.setenv("SLURM_PROCID", "0")
    refuse_misfit(None)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError) as refused:
        refuse_misfit(None)
    assert str(refused.value) == (
        "srun has started 2 processes, and each would train by itself; let it start one torchrun "
        "on each machine: srun --ntasks-per-node 1 torchrun --nproc-per-node 2 scripts/train.py "
        "...; or, for separate runs, set trainer.parallel=none"
    )
    refuse_misfit("none")
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(ConfigError, match="srun has started 2 processes"):
        refuse_misfit("ddp")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    refuse_misfit(None)  # torchrun's, of which srun has started one on each machine.
