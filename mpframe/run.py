"""One training run, from its configuration to its summary.

Whatever way a run ends, `summary.json` says so: finished, interrupted, diverged or failed.
"""

import logging
import time
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from mpframe import build, checkpoint
from mpframe.callbacks import (
    Bar,
    Checkpoints,
    Curves,
    RecordAmax,
    SaturationWarning,
    SkipGuard,
    SpikeReport,
)
from mpframe.check import flatten
from mpframe.config import Config
from mpframe.conversion import rounding
from mpframe.environment import environment_text
from mpframe.errors import CheckpointError, ConfigError, DivergedError
from mpframe.evaluation import Evaluation
from mpframe.memory import peak_memory
from mpframe.precision import as_table
from mpframe.saved_weights import fitted, weights_of
from mpframe.summary import Status, Summary, write_atomically
from mpframe.tracking import Tag, Tracker, metric_tag
from mpframe.trainer import Callback, Trainer

log = logging.getLogger(__name__)


class LastEvaluation(Callback):
    """Keeps the last validation for the summary."""

    def __init__(self) -> None:
        self.value: Evaluation | None = None

    def after_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Keep it."""
        self.value = evaluation


class Run:
    """A run in its folder.

    Args:
        config: the checked options.
        composed: the same, as composed; written to the folder.
        folder: the run's folder; exists.
    """

    def __init__(self, config: Config, composed: DictConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.started = time.perf_counter()
        self.trainer: Trainer | None = None
        self.curves: Curves | None = None
        self.evaluation = LastEvaluation()
        _refuse_used_folder(folder, config.run.resume)
        write_atomically(folder / "config_resolved.yaml", _resolved_text(composed))

    def train(self) -> Summary:
        """Train, and write the summary however it ends.

        Raises:
            MpframeError: the run could not start or go on; the summary is written.
            KeyboardInterrupt: the user stopped it; the summary is written.
        """
        try:
            self._fit()
        except DivergedError as error:
            self._finish(Status.DIVERGED, str(error))
            raise
        except KeyboardInterrupt:
            self._finish(Status.INTERRUPTED, "stopped from the keyboard")
            raise
        except BaseException as error:
            self._finish(Status.FAILED, str(error).splitlines()[0] if str(error) else repr(error))
            raise
        return self._finish(Status.FINISHED)

    def _fit(self) -> None:
        config = self.config
        build.seed_everything(config.run.seed)
        task = build.build_task(config)
        train, val = build.build_loaders(config, task)
        trainer = self.trainer = build.build_trainer(config, task, len(train))
        self._announce(trainer)
        if config.trainer.max_steps == 0:
            return
        self._load(trainer)
        total = trainer.plan.total_steps(len(train))
        record = RecordAmax(self.folder, trainer.progress.attempts)
        bar = Bar(total, trainer.progress.attempts, config.trainer.progress)
        try:
            with Tracker(self.folder, purge_step=trainer.progress.attempts + 1) as tracker:
                trainer.callbacks = [record, *self._watchers(tracker), bar]
                self._describe(tracker, trainer)
                trainer.fit(train, val)
                tracker.finished()
        finally:
            record.flush()
            bar.close()

    def _watchers(self, tracker: Tracker) -> list[Callback]:
        options = self.config.trainer
        self.curves = Curves(tracker, options.log_every, self.config.data.batch_size)
        saves = Checkpoints(self.folder, options.checkpoint_every, options.keep_last, tracker)
        guard = SkipGuard(options.max_consecutive_skips)
        return [self.curves, SpikeReport(), guard, SaturationWarning(), self.evaluation, saves]

    def _announce(self, trainer: Trainer) -> None:
        rows = trainer.precision.dtype_map(trainer.model)
        device = next(trainer.model.parameters()).device
        emulated = trainer.precision.policy.mode != "fp32" and trainer.precision.policy.emulates(
            device
        )
        log.info(
            "%s on %s%s, loss scaling %s, run folder %s",
            trainer.precision,
            device,
            f" ({trainer.precision.policy.half} emulated)" if emulated else "",
            build.scaling_name(self.config),
            self.folder,
        )
        log.info("%s", as_table(rows))
        for line in trainer.precision.warnings():
            log.warning("warning: %s", line)

    def _describe(self, tracker: Tracker, trainer: Trainer) -> None:
        name = trainer.metric().name if trainer.metric else "none"
        rows = trainer.precision.dtype_map(trainer.model)
        text = (self.folder / "config_resolved.yaml").read_text()
        tracker.text(Tag.TEXT_CONFIG, f"```yaml\n{text}\n```")
        tracker.text(Tag.TEXT_DTYPE_MAP, f"```\n{as_table(rows)}\n```")
        tracker.text(Tag.TEXT_ENVIRONMENT, environment_text())
        tracker.layout([name])
        tracker.hparams(self._hparams(), [Tag.LOSS_TRAIN, Tag.LOSS_VAL, metric_tag(name)])

    def _hparams(self) -> dict[str, str | float | int]:
        """The same keys in every run: TensorBoard drops a column that some runs lack."""
        config = self.config
        return {
            "model": str(config.model["_target_"]),
            "dataset": str(config.dataset["_target_"]),
            "dtype": config.dtype.mode,
            "half": config.dtype.half,
            "loss_scaling": build.scaling_name(config),
            "optimizer": " + ".join(str(node["_target_"]) for node in config.optimizer_nodes),
            "lr": float(config.optimizer_nodes[0].get("lr", float("nan"))),
            "batch_size": config.data.batch_size,
            "accumulate": config.trainer.accumulate,
            "clip_norm": config.trainer.clip_norm or 0.0,
            "ema_decay": config.trainer.ema_decay or 0.0,
            "epochs": config.trainer.epochs,
            "seed": config.run.seed,
        }

    def _load(self, trainer: Trainer) -> None:
        """Take the weights of `init_from`, or continue what `resume` names."""
        run = self.config.run
        if run.init_from is not None:
            self._take_weights(trainer, run.init_from)
        source = _resume_from(run.resume, self.folder)
        if source is None:
            return
        state = checkpoint.load(source)
        trainer.load_state_dict(state["trainer"])
        checkpoint.restore_rng(state["rng"])
        log.info("resumed from %s at step %d", source, trainer.progress.attempts)

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
        summary = self._summary(status, reason)
        summary.write(self.folder)
        metric = (
            f"val_{summary.metric} {summary.val_metric:.4f}, "
            if summary.val_metric is not None
            else ""
        )
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

    def _summary(self, status: Status, reason: str | None) -> Summary:
        config, trainer, last = self.config, self.trainer, self.curves and self.curves.last
        progress = trainer.progress if trainer else None
        evaluation = self.evaluation.value
        return Summary(
            status=status,
            reason=reason,
            steps=progress.steps if progress else 0,
            skipped_steps=progress.skipped if progress else 0,
            epochs=progress.epoch if progress else 0,
            train_loss=float(last.loss) if last and last.loss is not None else None,
            val_loss=evaluation.loss if evaluation else None,
            metric=evaluation.metric if evaluation else None,
            val_metric=evaluation.value if evaluation else None,
            seconds=time.perf_counter() - self.started,
            samples_per_second=self.curves.samples_per_second if self.curves else None,
            peak_memory_bytes=peak_memory(),
            dtype=config.dtype.mode,
            half=None if config.dtype.mode == "fp32" else config.dtype.half,
            loss_scaling=build.scaling_name(config),
            final_scale=_final_scale(trainer) if trainer else None,
            seed=config.run.seed,
            device=str(build.device_of(config.run.device)) if trainer else config.run.device,
            torch=torch.__version__,
        )


def _final_scale(trainer: Trainer) -> float | dict[str, float] | None:
    scales = {name: float(scaler.scale) for name, scaler in trainer.scalers.items()}
    return scales.get("", scales or None)


def _resolved_text(composed: DictConfig) -> str:
    """The resolved configuration as YAML; what comes from the environment stays a reference.

    An environment variable may hold a secret, and the file is meant to be passed on.
    """
    raw = flatten(OmegaConf.to_container(composed, resolve=False))  # type: ignore[arg-type]
    shown = OmegaConf.create(OmegaConf.to_container(composed, resolve=True))
    for path, value in raw.items():
        if "${oc.env" in str(value):
            OmegaConf.update(shown, path, str(value).replace("$", "\\$"), force_add=True)
    return OmegaConf.to_yaml(shown)


def _resume_from(resume: str, folder: Path) -> Path | None:
    if resume == "none":
        return None
    if resume != "auto":
        if not Path(resume).exists():
            raise CheckpointError(
                f"resume={resume}: no such folder; name a run's folder or a checkpoint"
            )
        return Path(resume)
    found = checkpoint.all_in(folder)
    if not found:
        log.info("resume=auto: no checkpoint in %s, starting from the beginning", folder)
    return found[-1] if found else None


def _refuse_used_folder(folder: Path, resume: str) -> None:
    """Never train over another run: its checkpoints and curves would be mixed with the new ones."""
    if resume == "none" and checkpoint.all_in(folder):
        raise ConfigError(
            f"hydra.run.dir={folder}: holds the checkpoints of a run; "
            "continue it with resume=auto or choose another folder"
        )
