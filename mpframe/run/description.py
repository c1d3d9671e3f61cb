"""What a run says of itself before it trains: in its log, and in TensorBoard."""

import logging
from collections.abc import Sequence
from pathlib import Path

from mpframe.config.redaction import redacted
from mpframe.config.schema import Config
from mpframe.data import Loader
from mpframe.numerics.autopsy.evidence import scaling_of
from mpframe.numerics.doctor import Subject, hints_on
from mpframe.tracking.environment import environment_text
from mpframe.tracking.tracker import Tag, Tracker, metric_tag
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of

log = logging.getLogger(__name__)


def announce(config: Config, trainer: Trainer, train: Loader, folder: Path) -> None:
    """Log the dtype mode, what each module computes in, and what may go wrong."""
    device = device_of(trainer.model)
    policy = trainer.precision.policy
    emulated = policy.mode != "fp32" and policy.emulates(device)
    log.info(
        "%s on %s%s, loss scaling %s, run folder %s",
        trainer.precision,
        device,
        f" ({policy.half} emulated)" if emulated else "",
        scaling_of(trainer),
        folder,
    )
    log.info("%s", trainer.precision.describe(trainer.model))
    for line in trainer.precision.warnings():
        log.warning("warning: %s", line)
    for hint in hints_on(Subject(trainer, train, config.flat)):
        log.warning("%s", hint)


def describe(
    tracker: Tracker, config: Config, trainer: Trainer, config_text: str, secrets: Sequence[str]
) -> None:
    """Write the texts, the layout of the charts and the hyperparameters to TensorBoard."""
    tracker.text(Tag.TEXT_CONFIG, f"```yaml\n{config_text}\n```")
    tracker.text(Tag.TEXT_DTYPE_MAP, f"```\n{trainer.precision.describe(trainer.model)}\n```")
    tracker.text(Tag.TEXT_ENVIRONMENT, environment_text())
    tracker.layout(trainer.metrics)
    results: list[str] = [Tag.LOSS_TRAIN, Tag.LOSS_VAL, Tag.LOSS_TEST]
    results += [metric_tag(name, split) for name in trainer.metrics for split in ("val", "test")]
    tracker.hparams(redacted(_hparams(config, trainer), secrets), results)


def _hparams(config: Config, trainer: Trainer) -> dict[str, str | float | int]:
    """The same keys in every run: TensorBoard drops a column that some runs lack."""
    return {
        "model": str(config.model["_target_"]),
        "dataset": str(config.dataset["_target_"]),
        "dtype": config.dtype.mode,
        "half": config.dtype.half,
        "loss_scaling": scaling_of(trainer),
        "optimizer": " + ".join(str(node["_target_"]) for node in config.optimizer_nodes),
        "lr": float(config.optimizer_nodes[0].get("lr", float("nan"))),
        "batch_size": config.data.batch_size,
        "accumulate": config.trainer.accumulate,
        "clip_norm": config.trainer.clip_norm or 0.0,
        "ema_decay": config.trainer.ema_decay or 0.0,
        "epochs": config.trainer.epochs,
        "seed": config.run.seed,
    }
