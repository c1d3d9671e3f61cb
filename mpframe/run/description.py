"""The description of a run: its log, its HParams in TensorBoard, and how to use its weights.

In the HParams table the first columns are the options of the command line. The other columns are
the same for every run. An open section is one column, arguments included, because two models do not
have the same arguments and TensorBoard drops a column that some runs lack.

Each checkpoint and each export says how a stranger uses its weights.
"""

import inspect
import logging
import os
import re
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.checkpoint.export import versions
from mpframe.config import CONF
from mpframe.config.check import as_typed
from mpframe.config.overrides import parse_words, words_again
from mpframe.config.redaction import hide, redact
from mpframe.config.schema import Config, only_watches
from mpframe.core.errors import RunInterrupted
from mpframe.core.objective import Objective
from mpframe.core.tree import HALF, device_of, dtype_name
from mpframe.data.fetching import named_tensors
from mpframe.data.loading import Loader
from mpframe.data.task import Task, make_loader
from mpframe.lab.hints import HINTS, PlannedRun, findings_of, scaling_of
from mpframe.precision.op_lists import OpLists
from mpframe.precision.trace import preserve_state
from mpframe.tracking import dtype_map
from mpframe.tracking.environment import environment_text, format_command
from mpframe.tracking.logger import Loggers
from mpframe.tracking.tags import Tag, metric_tag
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


def precision_in_words(config: Config) -> str:
    """Return the dtype mode with its half format, e.g. `mixed float16`."""
    mode = config.dtype.mode
    return mode if mode == "fp32" else f"{mode} {config.dtype.half}"


def format_section(node: Mapping[str, Any] | None) -> str:
    """Return an open section in one line, e.g. `cnn width=32 stages=2`."""
    if not node:
        return "none"
    arguments = [f"{key}={_type_out(value)}" for key, value in node.items() if key[0] != "_"]
    return " ".join([str(node["_target_"]).rpartition(".")[2], *arguments])


def find_typed(hydra: DictConfig | None) -> dict[str, str]:
    """Return the options of a run's command line that change a number, with their values."""
    words = parse_words(list(hydra.overrides.task)) if hydra else []
    return {
        word.key_or_group: word.get_value_element_as_str()
        for word in words
        if not word.is_delete() and not only_watches(word.key_or_group)
    }


def hparams(
    config: Config, scaling: str, typed: Mapping[str, str]
) -> tuple[dict[str, str | float | None], list[str]]:
    """Return the columns of a run, and the names of the ones on its command line."""
    nodes = config.optimizer_nodes
    columns: dict[str, str | float | None] = {
        "dtype": precision_in_words(config),
        "loss_scaling": scaling,
        "model": format_section(config.model),
        "optimizer": " + ".join(map(format_section, nodes)),
        "scheduler": format_section(config.scheduler),
        "dataset": format_section({"_target_": config.dataset["_target_"]}),
        "optimizer.lr": float(nodes[0].get("lr", float("nan"))),
        "dataset.batch_size": config.data.batch_size,
        "trainer.accumulate": config.trainer.accumulate,
        "trainer.clip_norm": config.trainer.clip_norm or 0.0,
        "trainer.ema_decay": config.trainer.ema_decay or 0.0,
        "trainer.epochs": config.trainer.epochs,
        "seed": config.run.seed,
    }
    first = []
    for key, word in typed.items():
        name = "dtype" if key in ("dtype.mode", "dtype.half") else key.removesuffix("._target_")
        first.append(name)
        if name not in columns:
            value = config.flat.get(key, word)
            columns[name] = value if type(value) in (int, float) else _type_out(value)
    return columns, list(dict.fromkeys(first))


def _type_out(value: Any) -> str:
    """Write nested values as they are typed on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_type_out, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_type_out(held)}" for key, held in value.items()) + "}"
    return as_typed(value)


def announce(config: Config, trainer: Trainer, train: Loader, folder: Path) -> None:
    """Log the dtype mode, each module's formats, and hints about what may go wrong."""
    device = device_of(trainer.model)
    policy = trainer.precision.policy
    emulated = policy.mode != "fp32" and policy.emulates(device)
    ranks = trainer.comm.size
    log.info(
        "%s on %s%s%s, loss scaling %s, run folder %s",
        trainer.precision,
        device,
        f" ({policy.half} emulated)" if emulated else "",
        f", {ranks} ranks ({config.trainer.parallel or 'ddp'})" if ranks > 1 else "",
        scaling_of(trainer),
        folder,
    )
    log.info("%s", dtype_map.describe(trainer.precision, trainer.model, folded=True))
    for hint in findings_of(HINTS, PlannedRun(trainer, train)):
        log.warning("%s", hint)


def describe(
    tracker: Loggers,
    config: Config,
    trainer: Trainer,
    train: Loader,
    config_text: str,
    secrets: Sequence[str],
    hydra: DictConfig | None,
) -> None:
    """Write the texts, the layout of the charts and the hyperparameters to TensorBoard."""
    tracker.text(Tag.TEXT_ABOUT, hide(_about(config, trainer, train), secrets))
    tracker.text(Tag.TEXT_CONFIG, _options_text(config_text, trainer.precision.policy.ops))
    table = dtype_map.describe(trainer.precision, trainer.model)
    tracker.text(Tag.TEXT_DTYPE_MAP, f"```\n{table}\n```")
    tracker.text(Tag.TEXT_ENVIRONMENT, environment_text())
    metrics = trainer.evaluator.metrics
    tracker.tensorboard.layout(metrics)
    results: list[str] = [Tag.LOSS_TRAIN, Tag.LOSS_VAL, Tag.LOSS_TEST]
    results += [metric_tag(name, split) for name in metrics for split in ("val", "test")]
    columns, first = hparams(config, scaling_of(trainer), find_typed(hydra))
    options = redact(columns, secrets)
    tracker.tensorboard.hparams(options, results, first)
    tracker.options(options)


def _about(config: Config, trainer: Trainer, train: Loader) -> str:
    """Describe the run in three lines: its precision, its model and data, its training."""
    weights = sum(p.numel() for p in trainer.model.parameters() if not is_lazy(p))
    optimizers = " + ".join(map(format_section, config.optimizer_nodes))
    lines = [
        f"**Precision**: {precision_in_words(config)} on {device_of(trainer.model)}, loss scaling "
        f"{scaling_of(trainer)}, ops {ops_in_words(trainer.precision.policy.ops)}",
        f"**Model and data**: {format_section(config.model)}, {weights:,} weights; "
        f"{format_section(config.dataset)}, {len(train)} batches an epoch",
        f"**Training**: {optimizers}, schedule {format_section(config.scheduler)}, "
        f"{config.trainer.epochs} epochs, seed {config.run.seed}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _options_text(config_text: str, ops: OpLists) -> str:
    """Write the options as Markdown, with a file's name in place of the long lists of ops."""
    pins = OmegaConf.to_yaml({"ops": {"modules": dict(ops.modules)}})
    options = re.sub(r"(?m)^ops:\n(?: .*\n)+", lambda _: pins, config_text)
    said = f"`ops.allow`, `ops.deny`, `ops.infer` and `ops.move`: {ops_in_words(ops)}"
    return f"{said}\n\n```yaml\n{options}\n```"


def ops_in_words(ops: OpLists) -> str:
    """Name the shipped file that is nearest to the op lists, and the moved ops and the pins."""
    names = sorted(file.stem for file in (CONF / "ops").glob("*.yaml"))
    moved = {name: _moves_from(ops, OpLists.named(name)) for name in names}
    nearest = min(names, key=lambda name: len(moved[name]))
    words = [f"`{nearest}`"]
    if moved[nearest]:
        words.append("moved " + ", ".join(f"`{op}` to {to}" for op, to in moved[nearest].items()))
    if ops.modules:
        words.append("pinned " + ", ".join(f"`{name}` to {to}" for name, to in ops.modules.items()))
    return ", ".join(words)


def _moves_from(ops: OpLists, shipped: OpLists) -> dict[str, str]:
    """Return the ops that are in another list than in `shipped`, each with its list, by name."""
    lists = (ops, shipped)
    names = sorted({op for one in lists for op in one.allow | one.deny | one.infer})
    return {op: ops.list_of(op) for op in names if ops.list_of(op) != shipped.list_of(op)}


def usage_of(task: Task, trainer: Trainer, hydra: DictConfig | None = None) -> dict[str, Any]:
    """Return how to use the weights, as JSON values (null if unknown)."""
    names = task.class_names
    parts: dict[str, Any] = {"train": task.train, "val": task.val, "test": task.test}
    words = ["mpframe train", *words_again(hydra)] if hydra else []
    return {
        "command": format_command(words, os.environ) if words else None,
        "inputs": _inputs_of(task, trainer.model),
        "class_names": None if names is None else list(names),
        "preprocessing": None if task.preprocessing is None else dict(task.preprocessing),
        "precision": _precision_of(trainer),
        "versions": versions(),
        "samples": {name: len(held) for name, held in parts.items() if isinstance(held, Sized)},
    }


def _precision_of(trainer: Trainer) -> dict[str, Any]:
    policy = trainer.precision.policy
    weights = trainer.model.named_parameters()
    return {
        "mode": policy.mode,
        "half": None if policy.mode == "fp32" else policy.half,
        "ops": None if policy.mode == "fp32" else ops_in_words(policy.ops).replace("`", ""),
        "half_weights": [name for name, weight in weights if weight.dtype in HALF],
        "evaluated_in": str(trainer.precision),
        "loss_scaling": scaling_of(trainer),
    }


def _inputs_of(task: Task, model: nn.Module) -> list[dict[str, Any]] | None:
    """Describe the model's inputs, as the objective gives them for one validation sample."""
    if isinstance(task.objective, Mapping):
        return None  # Several losses call the model's parts, each in another way.
    try:
        sample = next(make_loader(task.val, 1, shuffle=False, collate=task.collate).epoch(0))
        arguments, keywords = _call_of(task.objective, sample)
        given = inspect.signature(model.forward).bind(*arguments, **keywords).arguments
    except RunInterrupted:
        raise
    except (Exception, SystemExit):  # Users' code, whose errors the run will report.
        return None
    return [
        {
            "name": name,
            "shape": [None, *tensor.shape[1:]] if tensor.dim() else [],
            "dtype": dtype_name(tensor.dtype),
        }
        for name, tensor in named_tensors(dict(given))
    ]


def _call_of(objective: Objective, batch: Any) -> tuple[Any, Any]:
    """Return the arguments and keywords that the objective calls its model with."""
    model, calls = nn.Identity(), list[tuple[Any, Any]]()

    def note(module: nn.Module, arguments: Any, keywords: Any) -> None:
        calls.append((arguments, keywords))
        raise RuntimeError("not an error, but the way out of the objective")

    model.register_forward_pre_hook(note, with_kwargs=True)
    with preserve_state(model):
        try:
            objective(model, batch)
        except Exception:
            if not calls:
                raise
    return calls[0]
