"""One training run, from its configuration to its summary.

Whatever way a run ends, `summary.json` says so: finished, interrupted, diverged or failed.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from omegaconf import DictConfig

from mpframe import build, checkpoint
from mpframe.checkpoint import retention
from mpframe.checkpoint.saved_weights import fitted, rounding, weights_of
from mpframe.config.redaction import hidden_from_logs, hide, redacted, secrets_of, values_of
from mpframe.config.schema import Config
from mpframe.data import Loader, Task
from mpframe.errors import (
    ConfigError,
    DataError,
    DivergedError,
    MpframeError,
    RunInterrupted,
    UserCodeError,
)
from mpframe.numerics.doctor import Subject, hints_on
from mpframe.run.callbacks import RunCallbacks
from mpframe.run.folder import RunFolder, unwritable_in_one_line
from mpframe.run.lock import RunLock
from mpframe.run.requeue import requeue
from mpframe.run.resuming import Resume
from mpframe.tracking.environment import environment_text
from mpframe.tracking.memory import peak_memory
from mpframe.tracking.summary import Status, Summary
from mpframe.tracking.tracker import Tag, Tracker, metric_tag
from mpframe.training.callback import set_up
from mpframe.training.callbacks.results import Results
from mpframe.training.evaluation import Evaluation
from mpframe.training.interruption import Interruption
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of
from mpframe.user_code import raised

log = logging.getLogger(__name__)


class Run:
    """A run in its folder.

    Args:
        config: the checked options.
        composed: the same, as composed; written to the folder.
        folder: the run's folder; exists.
        hydra: Hydra's own section; without it neither `.hydra` nor a log is written.

    Raises:
        ConfigError: `loss_scaling` makes no scaler.
    """

    def __init__(
        self, config: Config, composed: DictConfig, folder: Path, hydra: DictConfig | None = None
    ) -> None:
        self.config = config
        self.scaling = build.scaling_name(config)  # A scaler is refused before the folder is taken.
        self.secrets = secrets_of(values_of(composed), os.environ)
        self.place = RunFolder(folder, composed, hydra, self.secrets)
        self.config_text = self.place.config
        self.folder = folder
        self.started = time.perf_counter()
        self.trainer: Trainer | None = None
        self.callbacks: RunCallbacks | None = None
        self.interruption = Interruption()

    def train(self) -> Summary:
        """Train, and write the summary however it ends.

        Raises:
            MpframeError: the run could not start or go on; the summary is written, unless the
                folder holds the record of a run that was not taken up again.
            RunInterrupted: a signal stopped it; checkpoint and summary are written.
        """
        with (
            hidden_from_logs(self.secrets),
            self.place,
            RunLock(self.folder),
            self.interruption,
        ):
            _refuse_to_forget(self.config)
            self.place.refuse_unfit(self.config.run.resume)
            retention.tidy(self.folder)
            if not self.place.holds_a_run():
                self.place.take()
            return self._train()

    def _train(self) -> Summary:
        try:
            with unwritable_in_one_line(self.folder), _exit_refused():
                self._fit()
        except DivergedError as error:
            self._finish(Status.DIVERGED, str(error))
            raise
        except BaseException as error:
            received = self.interruption.received
            # Where a signal raised at once, a library may have made anything of it on the way.
            at_once = self.interruption.raised
            if received is not None and (at_once or isinstance(error, RunInterrupted)):
                raise self._stopped(received) from None
            self._fail(error)
            raise
        mostly_skipped = self.trainer.progress.mostly_skipped if self.trainer else None
        if mostly_skipped:
            log.warning("warning: %s", mostly_skipped)
        stopped = self.trainer.stop_reason if self.trainer else None
        return self._finish(Status.FINISHED, stopped or mostly_skipped)

    def _stopped(self, received: Signals) -> RunInterrupted:
        self._finish(Status.INTERRUPTED, str(RunInterrupted(received)))
        if self.config.trainer.requeue:
            requeue(received)
        return RunInterrupted(received, f"continue with resume=auto hydra.run.dir={self.folder}")

    def _fit(self) -> None:
        config = self.config
        build.seed_everything(config.run.seed)
        task = build.build_task(config)
        train, val = build.build_loaders(config, task)
        with closing(train), closing(val):
            self._fit_with(task, train, val)

    def _fit_with(self, task: Task, train: Loader, val: Loader) -> None:
        config = self.config
        # Again: what a dataset imports may draw, but only if it was not imported before.
        build.seed_everything(config.run.seed)
        trainer = self.trainer = build.build_trainer(config, task, len(train))
        self._announce(trainer, train)
        if config.trainer.max_steps == 0:
            return
        if config.run.init_from is not None:
            self._take_weights(trainer, config.run.init_from)
        resume = Resume(config.run.resume, self.folder, self.config_text)
        identity = resume.into(trainer, self._renew_callbacks)
        trainer.refuse_overrun(len(train))
        self.place.take()
        global_step = trainer.progress.global_step
        for moved in retention.set_aside_after(self.folder, global_step):
            log.warning("warning: newer than where the run goes on, now %s", moved)
        # The curves of a checkpoint's own step are in it, and are written again.
        first_step = max(1, global_step)
        with (
            self.interruption.deferred(),
            Tracker(self.folder, first_step, config.trainer.on_save_error) as tracker,
        ):
            self._describe(tracker, trainer)
            self._train_with(trainer, train, val, self._context(identity, tracker, train))
            tracker.finished()

    def _train_with(
        self, trainer: Trainer, train: Loader, val: Loader, context: RunContext
    ) -> None:
        assert self.callbacks is not None
        with (
            set_up(trainer, context),
            self.callbacks.checkpoints.around(trainer),
            _errors_dated(trainer),
        ):
            trainer.fit(train, val)

    def _renew_callbacks(self, trainer: Trainer) -> None:
        """Give the trainer callbacks that hold no state yet."""
        self.callbacks = RunCallbacks(self.config, self.started, self.interruption)
        trainer.callbacks = self.callbacks.by_name

    def _context(self, identity: str, tracker: Tracker, train: Loader) -> RunContext:
        assert self.callbacks is not None
        throughput = self.callbacks.throughput
        return RunContext(self.folder, self.config_text, identity, tracker, train, throughput)

    def _announce(self, trainer: Trainer, train: Loader) -> None:
        device = device_of(trainer.model)
        emulated = trainer.precision.policy.mode != "fp32" and trainer.precision.policy.emulates(
            device
        )
        log.info(
            "%s on %s%s, loss scaling %s, run folder %s",
            trainer.precision,
            device,
            f" ({trainer.precision.policy.half} emulated)" if emulated else "",
            self.scaling,
            self.folder,
        )
        log.info("%s", trainer.precision.describe(trainer.model))
        for line in trainer.precision.warnings():
            log.warning("warning: %s", line)
        for hint in hints_on(Subject(trainer, train, self.config.flat)):
            log.warning("%s", hint)

    def _describe(self, tracker: Tracker, trainer: Trainer) -> None:
        tracker.text(Tag.TEXT_CONFIG, f"```yaml\n{self.config_text}\n```")
        tracker.text(Tag.TEXT_DTYPE_MAP, f"```\n{trainer.precision.describe(trainer.model)}\n```")
        tracker.text(Tag.TEXT_ENVIRONMENT, environment_text())
        tracker.layout(trainer.metrics)
        results = [Tag.LOSS_TRAIN, Tag.LOSS_VAL, *map(metric_tag, trainer.metrics)]
        tracker.hparams(redacted(self._hparams(), self.secrets), results)

    def _hparams(self) -> dict[str, str | float | int]:
        """The same keys in every run: TensorBoard drops a column that some runs lack."""
        config = self.config
        return {
            "model": str(config.model["_target_"]),
            "dataset": str(config.dataset["_target_"]),
            "dtype": config.dtype.mode,
            "half": config.dtype.half,
            "loss_scaling": self.scaling,
            "optimizer": " + ".join(str(node["_target_"]) for node in config.optimizer_nodes),
            "lr": float(config.optimizer_nodes[0].get("lr", float("nan"))),
            "batch_size": config.data.batch_size,
            "accumulate": config.trainer.accumulate,
            "clip_norm": config.trainer.clip_norm or 0.0,
            "ema_decay": config.trainer.ema_decay or 0.0,
            "epochs": config.trainer.epochs,
            "seed": config.run.seed,
        }

    def _take_weights(self, trainer: Trainer, source: str) -> None:
        """Start from another run's weights, all but those that may differ."""
        path, left_out = Path(source), self.config.run.init_from_except
        saved = weights_of(checkpoint.load(path), "trained", path)
        weights = fitted(saved, trainer.weights(), left_out, source)
        trainer.load_weights(weights)
        log.info(
            "weights taken from %s%s: %s",
            source,
            f", but for {', '.join(left_out)}" if left_out else "",
            rounding(trainer.model, weights),
        )

    def _finish(self, status: Status, reason: str | None = None) -> Summary:
        summary = self._summary(status, None if reason is None else hide(reason, self.secrets))
        if not self.place.taken:
            log.info("the record in %s stays as it was", self.folder)
            return summary
        self._write(summary)
        value = summary.monitored
        metric = f"val_{summary.monitor} {value:.4f}, " if value is not None else ""
        log.info(
            "%s: %s%d steps, %d skipped, %.1f s, in %s",
            status.value,
            metric,
            summary.steps,
            summary.skipped_steps,
            summary.seconds,
            self.folder,
        )
        return summary

    def _fail(self, error: BaseException) -> None:
        self._finish(Status.FAILED, str(error).splitlines()[0] if str(error) else repr(error))
        self.place.log_traceback(error)

    def _write(self, summary: Summary) -> None:
        """Write the summary; where the disk is full that stops none but a run that ended well."""
        try:
            with unwritable_in_one_line(self.folder):
                summary.write(self.folder)
        except MpframeError as error:
            ended_well = summary.status is Status.FINISHED
            if ended_well and self.config.trainer.on_save_error == "stop":
                raise
            log.warning("warning: %s", error)

    def _summary(self, status: Status, reason: str | None) -> Summary:
        config, trainer = self.config, self.trainer
        progress = trainer.progress if trainer else None
        results = self.callbacks.results if self.callbacks else Results()
        train_loss, evaluation = results.loss, results.evaluation
        throughput = self.callbacks.throughput if self.callbacks else None
        return Summary(
            status=status,
            reason=reason,
            steps=progress.steps if progress else 0,
            skipped_steps=progress.skipped if progress else 0,
            epochs=progress.epoch if progress else 0,
            train_loss=None if train_loss is None else float(train_loss),
            val_loss=evaluation.loss if evaluation else None,
            **_metrics_of(evaluation),
            seconds=throughput.seconds if throughput else time.perf_counter() - self.started,
            samples=throughput.samples if throughput else 0,
            train_seconds=throughput.train_seconds if throughput else None,
            samples_per_second=throughput.samples_per_second if throughput else None,
            median_step_seconds=throughput.median_step_seconds if throughput else None,
            peak_memory_bytes=peak_memory(),
            dtype=config.dtype.mode,
            half=None if config.dtype.mode == "fp32" else config.dtype.half,
            loss_scaling=self.scaling,
            final_scale=_final_scale(trainer) if trainer else None,
            seed=config.run.seed,
            device=str(build.resolve_device(config.run.device)) if trainer else config.run.device,
            torch=torch.__version__,
        )


def _metrics_of(evaluation: Evaluation | None) -> dict[str, Any]:
    """The metrics of the last validation, as the fields of a summary."""
    if evaluation is None:
        return {}
    metrics = dict(evaluation.metrics)
    name = evaluation.monitor if evaluation.monitor in metrics else next(iter(metrics), None)
    value = None if name is None else metrics.pop(name)
    return {
        "monitor": evaluation.monitor,
        "metric": name,
        "val_metric": value,
        "other_metrics": metrics,
    }


def _final_scale(trainer: Trainer) -> float | dict[str, float] | None:
    scales = {name: float(scaler.scale) for name, scaler in trainer.scalers.items()}
    return scales.get("", scales or None)


@contextmanager
def _exit_refused() -> Iterator[None]:
    """Whoever calls `sys.exit`, with whatever code: the run has not come to its end."""
    try:
        yield
    except SystemExit as error:
        raise UserCodeError(f"the run was ended by {raised(error)}; let it return") from error


@contextmanager
def _errors_dated(trainer: Trainer) -> Iterator[None]:
    """Say of an error in the data or in users' code how far the run had come."""
    try:
        yield
    except (DataError, UserCodeError) as error:
        error.args = (f"after step {trainer.progress.global_step}: {error}",)
        raise


def _refuse_to_forget(config: Config) -> None:
    """A job that is requeued runs the same command line again, and must go on where it was."""
    if config.trainer.requeue and config.run.resume != "auto":
        raise ConfigError(
            f"trainer.requeue=true: needs resume=auto, not resume={config.run.resume}, and a fixed "
            "hydra.run.dir, so that the job goes on from its checkpoint"
        )
