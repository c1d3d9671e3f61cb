"""Which processes are ranks of one run, by the variables that real starters set.

The variables are those of Slurm 22.05, Open MPI 5.0, MPICH 5.0, Intel MPI 2021 and submitit 1.5.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from fixtures import Patch, refused
from ranked import NET, summary_in
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mpframe.cli.commands.train import of_this_rank
from mpframe.core.errors import ConfigError
from mpframe.run.parts import resolve_device
from mpframe.training.parallel import launch
from mpframe.training.parallel.launch import init_comm, line_of, refuse_misfit
from mpframe.training.parallel.place import Place, address, missing, place, separate

_KNOWN = re.compile("RANK|WORLD_SIZE|LOCAL_RANK|MASTER_|TORCHELASTIC|SLURM|OMPI|PMI|MPI_|SUBMITIT")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "first", "MASTER_PORT": "29400"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = {**BATCH, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
SRUN |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[003-005,9],other7"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SUBMITIT = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2"}
SUBMITIT |= {"SUBMITIT_LOCAL_LOCALID": "1"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: Patch) -> Iterator[None]:
    for name in [name for name in os.environ if _KNOWN.match(name)]:
        monkeypatch.delenv(name)
    yield
    separate(None)


def pretend(monkeypatch: Patch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [(TORCHRUN, Place(1, 2, 1)), (SRUN, Place(3, 4, 1)), (OPEN_MPI, Place(3, 4, 1)),
     (HYDRA, Place(1, 2, 1)), (SUBMITIT, Place(1, 2, 1)), (BATCH, Place()),
     ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, Place()), ({**SRUN, **TORCHRUN}, Place(1, 2, 1)),
     ({**SRUN, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}, Place(0, 4, 1)),
     ({**SRUN, **TORCHRUN, "WORLD_SIZE": "1"}, Place())],
)  # fmt: skip
def test_a_starter_s_variables_give_the_place(
    monkeypatch: Patch, variables: dict[str, str], expected: Place
) -> None:
    """A batch script is one process, and srun may have started one torchrun or mpirun."""
    pretend(monkeypatch, variables)
    assert place() == expected


def test_ranks_find_the_first_one(monkeypatch: Patch) -> None:
    pretend(monkeypatch, SRUN)
    first = address()
    assert first[0] == "gpu003"
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert address() == first
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert address()[1] != first[1]
    assert 15000 <= first[1] < 32768
    pretend(monkeypatch, {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert address() == ("head", 1234)


def test_ranks_of_one_machine_meet_there_each_job_of_submitit_by_itself(
    monkeypatch: Patch,
) -> None:
    with monkeypatch.context() as patched:
        pretend(patched, HYDRA)
        assert address() == ("127.0.0.1", 29500)
    ports = set()
    for job in ("7", "8"):
        pretend(monkeypatch, {**SUBMITIT, "SUBMITIT_LOCAL_JOB_ID": job})
        host, port = address()
        assert host == "127.0.0.1"
        ports.add(port)
    assert len(ports) == 2


def test_mpirun_on_several_machines_must_name_the_first(monkeypatch: Patch) -> None:
    pretend(monkeypatch, OPEN_MPI)
    with pytest.raises(ConfigError) as error, init_comm(None, lambda: None, 1.0):  # type: ignore[arg-type,return-value]
        pass
    assert str(error.value) == (
        "mpirun has started 4 processes on several machines, which do not know the first one; name "
        "it in MASTER_ADDR, by -x MASTER_ADDR=FIRST or -genv MASTER_ADDR FIRST"
    )
    assert line_of(error.value) is None  # Rank 0 prints it.
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert line_of(error.value) == str(error.value)
    monkeypatch.setenv("MASTER_ADDR", "first")
    assert address() == ("first", 29500)


def test_separate_runs_are_asked_for_or_started_in_a_shell_of_srun(monkeypatch: Patch) -> None:
    pretend(monkeypatch, SRUN)
    with monkeypatch.context() as patched:
        patched.setattr(os, "isatty", lambda descriptor: descriptor == 0)
        assert place() == Place()
    assert place() == Place(3, 4, 1)
    words = ["trainer.parallel=none", "seed=1"]
    assert of_this_rank(words) == words
    assert place() == Place()
    pretend(monkeypatch, TORCHRUN)
    assert place() == Place(1, 2, 1)  # torchrun's ranks are never separate: that is refused.


def test_a_second_process_by_hand_is_told_what_lacks(monkeypatch: Patch) -> None:
    pretend(monkeypatch, {"RANK": "1", "WORLD_SIZE": "2"})
    assert refused(ConfigError, refuse_misfit, None) == (
        "RANK=1, WORLD_SIZE=2: says that there are other processes, and LOCAL_RANK, MASTER_ADDR, "
        "MASTER_PORT must be set as well; start them as torchrun --nproc-per-node 2 "
        "scripts/train.py ...; or, for a run of this process only, set trainer.parallel=none"
    )
    refuse_misfit("none")


def test_a_start_that_does_not_fit_the_option_is_refused(monkeypatch: Patch) -> None:
    for variables in ({"WORLD_SIZE": "1"}, {**SRUN, "WORLD_SIZE": "4"}):
        with monkeypatch.context() as patched:  # As scripts for torch.distributed set it.
            pretend(patched, variables)
            assert missing() == []
    for parallel in ("ddp", "fsdp"):
        assert refused(ConfigError, refuse_misfit, parallel) == (
            f"trainer.parallel={parallel}: needs several processes; start it as {launch.START}"
        )
    for variables, started in ((OPEN_MPI, "mpirun has started 4"), (TORCHRUN, "torchrun has st")):
        pretend(monkeypatch, variables)
        said = refused(ConfigError, refuse_misfit, "none")
        assert said.startswith(f"trainer.parallel=none: {started}")
        assert said.endswith(
            " processes, and each would train the same; use trainer.parallel=ddp, or start one "
            "process"
        )


SECOND = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "", "MASTER_PORT": ""}


def test_each_rank_has_a_device_of_its_own(monkeypatch: Patch) -> None:
    """The second of three, and of two on its machine."""
    pretend(monkeypatch, SECOND)
    given = {(2, "auto"): "cuda:1", (2, "cuda"): "cuda:1", (2, "cpu"): "cpu", (0, "auto"): "cpu"}
    for (devices, asked), device in given.items():
        monkeypatch.setattr(torch.cuda, "device_count", lambda own=devices: own)
        assert resolve_device(asked) == torch.device(device)
    for devices, asked in ((1, "auto"), (0, "cuda")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda own=devices: own)
        said = f"has {devices} CUDA devices and more ranks; start fewer, or use device=cpu"
        with pytest.raises(ConfigError, match=said):
            resolve_device(asked)


def test_a_sweep_does_not_go_with_torchrun(monkeypatch: Patch) -> None:
    pretend(monkeypatch, SECOND)
    assert refused(ConfigError, of_this_rank, ["-m", "seed=1,2"]) == (
        "-m: torchrun has started 3 processes for one run; start one torchrun for each job of the "
        "sweep, or start one process, and let Slurm start those of each job: -m ... "
        "hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=3"
    )
    assert of_this_rank(["seed=1"]) == ["seed=1", f"hydra.run.dir={tempfile.gettempdir()}"]


def test_rank_0_that_meets_an_error_late_does_not_repeat_it(monkeypatch: Patch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(launch, "_WAIT", 1.0)
    place_of_store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    own_store = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    pretend(monkeypatch, {**TORCHRUN, "LOCAL_RANK": "0", **place_of_store, **own_store})
    lines = []
    for rank, text in (("1", "late"), ("0", "late"), ("0", "early"), ("1", "early")):
        monkeypatch.setenv("RANK", rank)
        lines.append(line_of(ConfigError(text)))
    assert lines == ["rank 1: late", None, "early", None]


@pytest.mark.slow
def test_two_processes_train_as_srun_starts_them(monkeypatch: Patch, tmp_path: Path) -> None:
    """One run, and an error that both meet is printed once though rank 0 keeps the store."""
    pretend(monkeypatch, {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid())})
    monkeypatch.setenv("SLURM_STEP_NODELIST", "localhost")

    def run(*words: str) -> tuple[list[int], list[str]]:
        start, ranks = [sys.executable, f"{ROOT}/scripts/train.py", *NET, *words], []
        for rank in "01":
            own: Any = {"env": os.environ | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}}
            own |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(start, **own))
        said = [rank.communicate(timeout=200)[1] for rank in ranks]
        return [r.returncode for r in ranks], re.findall("^mpframe: .*", "".join(said), re.M)

    assert run(f"hydra.run.dir={tmp_path}/run")[0] == [0, 0]
    assert summary_in(tmp_path / "run")["steps"] == 8
    line = "mpframe: trainer.max_stepz: no such option; nearest: trainer.max_steps"
    assert run("trainer.max_stepz=1") == ([1, 1], [line])
