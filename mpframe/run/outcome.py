"""The end of a run: the test of its best weights, and its summary, however it ended."""

import logging
import time
from pathlib import Path
from typing import Any

import torch

from mpframe import checkpoint
from mpframe.checkpoint.folder import best_in, step_of
from mpframe.checkpoint.state import averages_of, extra_state_of, weights_of
from mpframe.config.schema import Config
from mpframe.run.parts import RunCallbacks, resolve_device
from mpframe.tracking.environment import peak_memory
from mpframe.tracking.summary import Status, Summary
from mpframe.training.callbacks.ema import ema_of
from mpframe.training.evaluation import Best, Evaluation
from mpframe.training.plan import Progress
from mpframe.training.results import Results
from mpframe.training.trainer import Loader, Trainer

log = logging.getLogger(__name__)


def summary_of(
    config: Config,
    scaling: str,
    trainer: Trainer | None,
    callbacks: RunCallbacks | None,
    began: float,
    status: Status,
    reason: str | None,
    tested: str | None = None,
) -> Summary:
    """Make the summary of a run."""
    progress = trainer.progress if trainer else Progress()
    results = callbacks.results if callbacks else Results()
    throughput = callbacks.throughput if callbacks else None
    scalers = trainer.scalers if trainer else {}
    scales: dict[str, Any] = {name: float(scaler.scale) for name, scaler in scalers.items()}
    return Summary(
        status=status,
        reason=reason,
        steps=progress.steps,
        skipped_steps=progress.skipped,
        epochs=progress.epoch,
        train_loss=None if results.loss is None else float(results.loss),
        **_validation(results.evaluation),
        best=results.best.value,
        best_step=results.best.step,
        test_loss=None if results.test is None else results.test.loss,
        test_metrics=dict(results.test.metrics) if results.test else {},
        tested=None if results.test is None else tested,
        seconds=throughput.seconds if throughput else time.perf_counter() - began,
        samples=throughput.samples if throughput else None,
        train_seconds=throughput.train_seconds if throughput else None,
        samples_per_second=throughput.samples_per_second if throughput else None,
        median_step_seconds=throughput.median_step_seconds if throughput else None,
        peak_memory_bytes=peak_memory(),
        dtype=config.dtype.mode,
        half=None if config.dtype.mode == "fp32" else config.dtype.half,
        loss_scaling=scaling,
        final_scale=scales.get("", scales or None),
        seed=config.run.seed,
        device=str(resolve_device(config.run.device)) if trainer else config.run.device,
        torch=torch.__version__,
    )


def _validation(evaluation: Evaluation | None) -> dict[str, Any]:
    """Return the last validation as the fields of a summary."""
    if evaluation is None:
        return {}
    metrics = dict(evaluation.metrics)
    name = evaluation.monitor if evaluation.monitor in metrics else next(iter(metrics), None)
    return {
        "val_loss": evaluation.loss,
        "monitor": evaluation.monitor,
        "metric": name,
        "val_metric": None if name is None else metrics.pop(name),
        "other_metrics": metrics,
    }


def final_test(trainer: Trainer, loader: Loader, best: Path | None) -> str:
    """Test the weights and averages of a checkpoint, which the trainer keeps, or the present ones.

    Returns `best` or `last`.
    """
    weights = "the last weights"
    if best is not None:
        weights = f"the weights of {best.name}"
        state, ema = checkpoint.load(best, trainer.comm), ema_of(trainer)
        trainer.extra_state.load_state_dict(extra_state_of(state, best))
        trainer.load_weights(weights_of(state, "trained", best))
        # A run that had no averages yet was validated with its weights, which are loaded now.
        if ema is not None and state["trainer"].get("ema") is not None:
            ema.load_by_name(averages_of(state, best))
    evaluation = trainer.test(loader)
    metrics = "".join(f", {name} {value:.4f}" for name, value in evaluation.metrics.items())
    log.info("tested with %s: loss %.4g%s", weights, evaluation.loss, metrics)
    return "last" if best is None else "best"


def best_checkpoint(folder: Path, keep_best: int, best: Best) -> Path | None:
    """Return the checkpoint of a run's best validation, or warn and return None if it is lost."""
    kept = best_in(folder, min(1, keep_best))
    if not keep_best or best.step is None or best.step in map(step_of, kept):
        return kept[0] if kept else None
    log.warning(
        "warning: trainer.keep_best=%d: the best validation, %s %s, has no checkpoint in this "
        "folder, so the last weights are tested",
        keep_best,
        best.name,
        best,
    )
    return None
