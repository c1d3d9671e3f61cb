"""The evidence of a failed step: a folder with all that a replay needs.

    autopsy/step_00000012/state.pt        weights before the step (a skipped one changes none),
                                          batches, random states, scales
                          config.yaml     the run's resolved options
                          manifest.json   digests
                          report.md       the diagnosis

It is written, verified and trusted like a checkpoint. A batch is stored as tensors, numbers and
text in tuples, lists and dicts, without classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint.saving import save_as
from mpframe.checkpoint.state import RandomState
from mpframe.core.callback import Batch
from mpframe.core.comm import part_of
from mpframe.core.errors import CheckpointError
from mpframe.core.tree import device_of, fields_of, map_tensors, with_fields
from mpframe.lab.autopsy.replay import Case
from mpframe.training.optimizers.whole_weights import gather
from mpframe.training.trainer import Trainer


def plain(batch: Any) -> Any:
    """Return the batch in plain tuples, lists and dicts, its tensors on the CPU.

    Arrays become tensors. Other objects, for example paths, become their text.
    """
    if isinstance(batch, Tensor):
        tensor = batch.detach().cpu()
        strided = tensor.layout is torch.strided
        # A view is copied: its whole storage would be saved, which may be a whole dataset.
        is_view = strided and tensor.untyped_storage().nbytes() > tensor.nbytes
        return tensor.clone() if is_view else tensor
    if isinstance(batch, dict) or fields_of(batch):
        return {name: plain(item) for name, item in fields_of(batch).items()}
    if isinstance(batch, tuple | list):
        return (list if isinstance(batch, list) else tuple)(map(plain, batch))
    if isinstance(batch, np.ndarray | np.generic):
        return torch.as_tensor(batch) if isinstance(batch, np.ndarray) else batch.item()
    return batch if type(batch) in (bool, int, float, str, type(None)) else str(batch)


def as_in(example: Any, batch: Any) -> Any:
    """Give a batch of `plain` the classes that the containers of `example` have.

    Lists may have another length. An item without a counterpart in `example` stays plain.
    """
    if isinstance(batch, dict):
        known = fields_of(example)
        items = {name: as_in(known.get(name), item) for name, item in batch.items()}
        return with_fields(example, items) if known.keys() == items.keys() else items
    if isinstance(batch, tuple | list) and isinstance(example, tuple | list) and example:
        last = len(example) - 1
        return type(batch)(as_in(example[min(n, last)], item) for n, item in enumerate(batch))
    return batch


FOLDER = "autopsy"
WITHOUT = "try a step from a checkpoint with mpframe doctor OPTIONS init_from=CHECKPOINT"


@dataclass(frozen=True)
class Evidence:
    """A step and its circumstances. `Case` explains the fields that both have."""

    step: int  # counting skipped ones
    reason: str  # why it is examined
    batches: Sequence[Batch]  # with several ranks each one's part of the first, then of the next
    samples: Sequence[Sequence[int]]
    epoch: int  # with `batch` the position of the first micro-batch in the data
    batch: int
    scales: dict[str, float]
    floors: dict[str, float]
    scaling: str
    random: RandomState | None = None
    first_loss: float | None = None
    skipped: frozenset[str] | None = None
    world_size: int = 1  # ranks that shared each micro-batch
    updates: int = 1  # steps that were applied before

    def like(self, example: Batch) -> "Evidence":
        """Return it with the classes that the containers of a batch `example` have."""
        return replace(self, batches=[as_in(example, b) for b in self.batches])

    def case(self, trainer: Trainer) -> Case:
        """Return the step, to be replayed with a trainer that holds its weights and buffers."""
        device = device_of(trainer.model)
        batches = [map_tensors(lambda t: t.to(device), batch) for batch in self.batches]
        parts = (trainer.model, trainer.precision, trainer.objectives, batches)
        scaling = (self.scales, self.floors, self.scaling)
        return Case(*parts, *scaling, self.samples, self.random, self.first_loss, self.skipped)


def gather_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Gather divided weights on rank 0's host, one at a time."""
    host = {}
    for name, weight in trainer.weights().items():
        whole = gather(weight, part_of(weight))
        if trainer.comm.is_main:
            host[name] = whole.cpu()
    return host


def folder_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step_{step:08d}"


def all_in(run: Path) -> list[Path]:
    """Return the evidence in a run's folder, the oldest step first."""
    found = (run / FOLDER).glob("step_*")
    return sorted(path for path in found if (path / "manifest.json").exists())


def save(run: Path, evidence: Evidence, weights: dict[str, Tensor], config: str) -> Path:
    """Write the evidence of a step into a run's folder, and return the path of the evidence.

    `weights` has parameters as fp32 masters, and buffers, by name. `config` is YAML.
    """
    random = evidence.random
    state = vars(evidence) | {
        "batches": [plain(batch) for batch in evidence.batches],
        "samples": [list(ids) for ids in evidence.samples],
        "random": None if random is None else [random.cpu, random.device],
        "skipped": None if evidence.skipped is None else sorted(evidence.skipped),
        "weights": weights,
    }
    return save_as(folder_of(run, evidence.step), Snapshot(evidence.step, state, config))


def load(folder: Path) -> tuple[Evidence, dict[str, Tensor], str]:
    """Read verified evidence, its weights, and the options. CheckpointError: there is none.

    Of a stranger's file only the names of the entries are checked: the replay finds the rest.
    """
    snapshot = checkpoint.read(folder)
    try:
        weights = snapshot.state["weights"]
        if not all(isinstance(tensor, Tensor) for tensor in weights.values()):
            raise TypeError("weights are tensors")
        entries = {entry.name: snapshot.state[entry.name] for entry in fields(Evidence)}
        if entries["random"] is not None:
            entries["random"] = RandomState(*entries["random"])
        if entries["skipped"] is not None:
            entries["skipped"] = frozenset(entries["skipped"])
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{folder}: not the evidence of a step; name a run's folder, and step=N for one of "
            f"several; {WITHOUT}"
        ) from None
    return Evidence(**entries), dict(weights), snapshot.config
