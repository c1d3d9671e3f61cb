"""What a run says about itself before it trains: in its log, and in TensorBoard."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.nn.parameter import is_lazy

from mpframe.config.locations import CONF
from mpframe.config.redaction import hide, redacted
from mpframe.config.schema import Config
from mpframe.data.loading import Loader
from mpframe.numerics.hints import PlannedRun, hints_on, scaling_of
from mpframe.precision import OpLists
from mpframe.run.hparams import called, hparams, precision_in_words, varied
from mpframe.tracking.environment import environment_text
from mpframe.tracking.tags import Tag, metric_tag
from mpframe.tracking.tracker import Tracker
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of

log = logging.getLogger(__name__)


def announce(config: Config, trainer: Trainer, train: Loader, folder: Path) -> None:
    """Log the dtype mode, what each module computes in, and what may go wrong."""
    device = device_of(trainer.model)
    policy = trainer.precision.policy
    emulated = policy.mode != "fp32" and policy.emulates(device)
    log.info(
        "%s on %s%s%s, loss scaling %s, run folder %s",
        trainer.precision,
        device,
        f" ({policy.half} emulated)" if emulated else "",
        f", {trainer.world.size} ranks" if trainer.world.size > 1 else "",
        scaling_of(trainer),
        folder,
    )
    log.info("%s", trainer.precision.describe(trainer.model))
    for line in trainer.precision.warnings():
        log.warning("warning: %s", line)
    for hint in hints_on(PlannedRun(trainer, train, config.flat)):
        log.warning("%s", hint)


def describe(
    tracker: Tracker,
    config: Config,
    trainer: Trainer,
    train: Loader,
    config_text: str,
    secrets: Sequence[str],
    hydra: DictConfig | None,
) -> None:
    """Write the texts, the layout of the charts and the hyperparameters to TensorBoard."""
    tracker.text(Tag.TEXT_ABOUT, hide(_about(config, trainer, train), secrets))
    tracker.text(Tag.TEXT_CONFIG, _options(config_text, trainer.precision.policy.ops))
    tracker.text(Tag.TEXT_DTYPE_MAP, f"```\n{trainer.precision.describe(trainer.model)}\n```")
    tracker.text(Tag.TEXT_ENVIRONMENT, environment_text())
    metrics = trainer.evaluator.metrics
    tracker.layout(metrics)
    results: list[str] = [Tag.LOSS_TRAIN, Tag.LOSS_VAL, Tag.LOSS_TEST]
    results += [metric_tag(name, split) for name in metrics for split in ("val", "test")]
    columns, first = hparams(config, scaling_of(trainer), varied(hydra))
    tracker.hparams(redacted(columns, secrets), results, first)


def _about(config: Config, trainer: Trainer, train: Loader) -> str:
    """The run in three lines: its precision, its model and data, its training."""
    weights = sum(own.numel() for own in trainer.model.parameters() if not is_lazy(own))
    optimizers = " + ".join(map(called, config.optimizer_nodes))
    lines = [
        f"**Precision**: {precision_in_words(config)} on {device_of(trainer.model)}, loss scaling "
        f"{scaling_of(trainer)}, ops {ops_in_words(trainer.precision.policy.ops)}",
        f"**Model and data**: {called(config.model)}, {weights:,} weights; "
        f"{called(config.dataset)}, {len(train)} batches an epoch",
        f"**Training**: {optimizers}, schedule {called(config.scheduler)}, "
        f"{config.trainer.epochs} epochs, seed {config.run.seed}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _options(config_text: str, ops: OpLists) -> str:
    """The options as Markdown, with the name of a file in place of the long lists of ops."""
    options: Any = OmegaConf.create(config_text)
    options.ops = {"modules": dict(ops.modules)}
    said = f"`ops.allow`, `ops.deny`, `ops.infer` and `ops.move`: {ops_in_words(ops)}"
    return f"{said}\n\n```yaml\n{OmegaConf.to_yaml(options)}\n```"


def ops_in_words(ops: OpLists) -> str:
    """The shipped file that lists of ops differ least from, what was moved, and what is pinned."""
    names = sorted(file.stem for file in (CONF / "ops").glob("*.yaml"))
    moved = {name: _moved(ops, OpLists.named(name)) for name in names}
    nearest = min(names, key=lambda name: len(moved[name]))
    words = [f"`{nearest}`"]
    if moved[nearest]:
        words.append("moved " + ", ".join(f"`{op}` to {to}" for op, to in moved[nearest].items()))
    if ops.modules:
        words.append("pinned " + ", ".join(f"`{name}` to {to}" for name, to in ops.modules.items()))
    return ", ".join(words)


def _moved(ops: OpLists, shipped: OpLists) -> dict[str, str]:
    """The ops that are in another list than in `shipped`, each with its list, by name."""
    lists = (ops, shipped)
    names = sorted({op for one in lists for op in one.allow | one.deny | one.infer})
    return {op: ops.list_of(op) for op in names if ops.list_of(op) != shipped.list_of(op)}
