"""What summary.json says about a run, however it ended."""

import time
from typing import Any

import torch

from mpframe import assembly
from mpframe.config.schema import Config
from mpframe.run.callbacks import RunCallbacks
from mpframe.tracking.memory import peak_memory
from mpframe.tracking.summary import Status, Summary
from mpframe.training.callbacks.results import Results
from mpframe.training.evaluation import Evaluation
from mpframe.training.plan import Progress
from mpframe.training.trainer import Trainer


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
    """The summary of a run.

    Args:
        config: the options.
        scaling: the name of the loss scaling.
        trainer, callbacks: None if the run ended before they were made.
        began: when the run began, as `time.perf_counter` says it.
        status: how it ended.
        reason: why it ended, in one line, or None.
        tested: whose weights were tested, `best` or `last`; None if the run was not tested.
    """
    progress = trainer.progress if trainer else Progress()
    results = callbacks.results if callbacks else Results()
    throughput = callbacks.throughput if callbacks else None
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
        **_test(results.test, tested),
        seconds=throughput.seconds if throughput else time.perf_counter() - began,
        samples=throughput.samples if throughput else 0,
        train_seconds=throughput.train_seconds if throughput else None,
        samples_per_second=throughput.samples_per_second if throughput else None,
        median_step_seconds=throughput.median_step_seconds if throughput else None,
        peak_memory_bytes=peak_memory(),
        dtype=config.dtype.mode,
        half=None if config.dtype.mode == "fp32" else config.dtype.half,
        loss_scaling=scaling,
        final_scale=_final_scale(trainer) if trainer else None,
        seed=config.run.seed,
        device=str(assembly.resolve_device(config.run.device)) if trainer else config.run.device,
        torch=torch.__version__,
    )


def worsening_of(config: Config, callbacks: RunCallbacks | None) -> str | None:
    """A line if the last validation is much worse than the best one, with the way out."""
    line = callbacks.results.worsening if callbacks else None
    if line is None:
        return None
    kept = "is kept" if config.trainer.keep_best else "is kept with trainer.keep_best=1"
    return (
        f"{line}; the best checkpoint {kept}, callbacks=early_stopping ends the run in time, and a "
        "lower optimizer.lr may prevent it"
    )


def _validation(evaluation: Evaluation | None) -> dict[str, Any]:
    """The last validation, as the fields of a summary."""
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


def _test(evaluation: Evaluation | None, tested: str | None) -> dict[str, Any]:
    """The test, as the fields of a summary."""
    if evaluation is None:
        return {}
    metrics = dict(evaluation.metrics)
    return {"test_loss": evaluation.loss, "test_metrics": metrics, "tested": tested}


def _final_scale(trainer: Trainer) -> float | dict[str, float] | None:
    scales = {name: float(scaler.scale) for name, scaler in trainer.scalers.items()}
    return scales.get("", scales or None)
