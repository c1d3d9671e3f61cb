"""The test of a finished run: measures its best weights once, on data that chose nothing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint.folder import best_in, step_of
from mpframe.checkpoint.state import averages_of, extra_state_of, weights_of
from mpframe.training.evaluation.best import Best
from mpframe.training.loader import Loader
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


def final_test(trainer: Trainer, loader: Loader, best: Path | None) -> str:
    """Test the weights of a checkpoint, or the present ones; the callbacks are told.

    Args:
        trainer: has come to its end. Afterwards its weights are bit for bit as before.
        loader: the test samples.
        best: the checkpoint of the best validation; None tests the present weights.

    Returns:
        Whose weights were tested: `best` or `last`.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        RunInterrupted: a signal came; the callbacks were not told.
    """
    if best is None:
        _log("the last weights", trainer, loader)
        return "last"
    with weights_taken_from(trainer, best):
        _log(f"the weights of {best.name}", trainer, loader)
    return "best"


def best_checkpoint(folder: Path, keep_best: int, best: Best) -> Path | None:
    """The checkpoint of a run's best validation; if it is not there, None, and a warning says so.

    Args:
        folder: the run's.
        keep_best: `trainer.keep_best`; with 0 there is none, and nothing is said.
        best: the best validation.
    """
    kept = best_in(folder, min(1, keep_best))
    if not keep_best or best.step is None or best.step in map(step_of, kept):
        return kept[0] if kept else None
    log.warning(
        "warning: trainer.keep_best=%d: the best validation, %s %s, has no checkpoint in this "
        "folder; it could not be written or was deleted, so the last weights are tested",
        keep_best,
        best.name,
        best,
    )
    return None


@contextmanager
def weights_taken_from(trainer: Trainer, path: Path) -> Iterator[None]:
    """Within the block the trainer has a checkpoint's weights and, if it averages, its averages."""
    state = checkpoint.load(path)
    extra = trainer.extra_state
    kept = Snapshot(0, {"weights": trainer.weights(), "extra": extra.state_dict()}).detached().state
    ema = trainer.ema
    averages, updates = (ema.by_name(trainer.model), ema.updates) if ema else ({}, 0)
    try:
        extra.load_state_dict(extra_state_of(state, path))
        trainer.load_weights(weights_of(state, "trained", path))
        # Without averages the run had none yet, and validated with the weights: as they are now.
        if ema is not None and state["trainer"].get("ema") is not None:
            ema.load_by_name(trainer.model, averages_of(state, path))
        yield
    finally:
        extra.load_state_dict(kept["extra"])
        trainer.load_weights(kept["weights"])
        if ema is not None:
            ema.load_by_name(trainer.model, averages, updates)


def _log(weights: str, trainer: Trainer, loader: Loader) -> None:
    evaluation = trainer.test(loader)
    metrics = "".join(f", {name} {value:.4f}" for name, value in evaluation.metrics.items())
    log.info("tested with %s: loss %.4g%s", weights, evaluation.loss, metrics)
