"""The place of a process among the ranks, in the variables of the program that started it.

torchrun, srun, mpirun and submitit each have their names for the rank, the number of ranks and the
rank on this machine. MASTER_ADDR and MASTER_PORT say where rank 0 is found. torchrun sets them, and
for the others they are found here. Torch is not loaded.
"""

import os
import re
from dataclasses import dataclass, field
from zlib import crc32

_AT = ("MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI, _SRUN = "OMPI_COMM_WORLD_", "SLURM_STEP_NODELIST"
# The first that has set all its variables is asked: it was started by those below it.
_STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", *_AT),
    "mpirun": tuple(_OPEN_MPI + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", _SRUN),
    "submitit": tuple(f"SUBMITIT_LOCAL_{name}" for name in ("GLOBALID", "NTASKS", "LOCALID")),
}
_PORT = 29500  # torch's own, for ranks that know no common number


@dataclass(frozen=True)
class Place:
    """A process among the others: its rank, how many there are, its number on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    starter: str = field(default="", compare=False)  # a key of `_STARTERS`, if there are others


_separate = False


def separate(parallel: str | None) -> None:
    """Take this process for the only one if `trainer.parallel` is `none`, unless by torchrun."""
    global _separate
    _separate = parallel == "none"


def place() -> Place:
    """Return the place of this process, which is the only one if nothing has started others."""
    for starter, names in _STARTERS.items():
        # `srun --pty` opens a shell, and what is typed there is one process.
        shell = starter == "srun" and os.isatty(0)
        if all(name in os.environ for name in names) and not shell:
            rank, size, local_rank = (int(os.environ[name]) for name in names[:3])
            only = size == 1 or (_separate and starter != "torchrun")
            return Place() if only else Place(rank, size, local_rank, starter)
    return Place()


def missing() -> list[str]:
    """Return torchrun's variables that are not set, if RANK or WORLD_SIZE says there are ranks."""
    names = _STARTERS["torchrun"]
    partly = "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    return [name for name in names if name not in os.environ and partly and place().size == 1]


def address() -> tuple[str, int]:
    """Return the host and the port of rank 0. The host is empty if this process cannot know it."""
    starter = place().starter
    host, job = "", ""
    if starter == "srun":
        job = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        # The first of `a[003-005,9],b7` is a003.
        host = re.sub(r"\[(\w+)[^]]*\]", r"\1", os.environ[_SRUN]).split(",")[0]
    elif starter == "submitit":
        host, job = "127.0.0.1", os.environ["SUBMITIT_LOCAL_JOB_ID"]
    elif starter != "torchrun":
        _, size, _, size_here = (os.environ[name] for name in _STARTERS[starter])
        host = "127.0.0.1" if size == size_here else ""
    port = 15000 + crc32(job.encode()) % 2**14 if job else _PORT  # Below those of connections.
    given_host, given_port = (os.environ.get(name) for name in _AT)
    return given_host or host, int(given_port or port)


def keeps_store() -> bool:
    """Return whether this process keeps the ranks' store: rank 0, if no agent of torchrun does."""
    return place().rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
