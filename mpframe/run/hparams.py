"""A run's line in TensorBoard's HParams table.

What the sweep varies has a column each, and TensorBoard shows these first; a single run's are the
options that its command line gave. The other columns are the same for every run. Each open section
is one of them, with its arguments in it, because two models do not have the same arguments and
TensorBoard drops a column that some runs lack.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mpframe.config.composition.overrides import parsed
from mpframe.config.schema import Config, only_watches

_SWEEP = "multirun.yaml"  # Hydra writes it before the first job
_ONE_COLUMN = {"dtype.mode": "dtype", "dtype.half": "dtype"}
_MOST = 512  # values of an option that are looked at

Value = str | float | int | bool | None


def precision_in_words(config: Config) -> str:
    """The dtype mode with its half format, e.g. `mixed float16`."""
    mode = config.dtype.mode
    return mode if mode == "fp32" else f"{mode} {config.dtype.half}"


def called(node: Mapping[str, Any] | None) -> str:
    """An open section in one line, e.g. `cnn width=32 stages=2`."""
    if not node:
        return "none"
    arguments = [f"{key}={_typed(value)}" for key, value in node.items() if key[0] != "_"]
    return " ".join([str(node["_target_"]).rpartition(".")[2], *arguments])


def varied(hydra: DictConfig | None) -> dict[str, Sequence[str]]:
    """The options that the jobs of a sweep differ in, each with its values as they are typed.

    Args:
        hydra: Hydra's own section of the job; None: there is none. Of a run that is no sweep's job
            they are all options of the command line.
    """
    if hydra is None:
        return {}
    own = {o.key_or_group: o for o in parsed(list(hydra.overrides.task)) if not o.is_delete()}
    sweep = _sweep(hydra)
    varies = {
        key: override
        for key, override in own.items()
        if not only_watches(key) and (key not in sweep or sweep[key].is_sweep_override())
    }
    return {key: _values(sweep.get(key, word), word) for key, word in varies.items()}


def _sweep(hydra: DictConfig) -> dict[str, Override]:
    """The words of the sweep that a job belongs to; none if it belongs to none."""
    file = Path(hydra.runtime.cwd, hydra.sweep.dir, _SWEEP)
    if hydra.mode is not RunMode.MULTIRUN or not file.is_file():
        return {}
    words = list(OmegaConf.load(file).hydra.overrides.task)
    return {override.key_or_group: override for override in parsed(words)}


def hparams(
    config: Config, scaling: str, varied: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Value], list[str]]:
    """The columns of a run, and the names of those that vary.

    Args:
        config: the run's options.
        scaling: the name of the loss scaling.
        varied: of `varied`.
    """
    nodes = config.optimizer_nodes
    columns: dict[str, Value] = {
        "dtype": precision_in_words(config),
        "loss_scaling": scaling,
        "model": called(config.model),
        "optimizer": " + ".join(map(called, nodes)),
        "scheduler": called(config.scheduler),
        "dataset": called({"_target_": config.dataset["_target_"]}),
        "optimizer.lr": float(nodes[0].get("lr", float("nan"))),
        "dataset.batch_size": config.data.batch_size,
        "trainer.accumulate": config.trainer.accumulate,
        "trainer.clip_norm": config.trainer.clip_norm or 0.0,
        "trainer.ema_decay": config.trainer.ema_decay or 0.0,
        "trainer.epochs": config.trainer.epochs,
        "seed": config.run.seed,
    }
    first: dict[str, None] = {}
    for key, values in varied.items():
        name = _ONE_COLUMN.get(key, key.removesuffix("._target_"))
        first[name] = None
        if name not in columns:
            columns[name] = _value(config.flat.get(key, values[0]), values)
    return columns, list(first)


def _values(sweep: Override, own: Override) -> Sequence[str]:
    """The values of an option as far as they are known before a sweeper draws them."""
    listed = sweep.is_choice_sweep() or sweep.is_range_sweep()
    if listed and not isinstance(sweep.value(), Glob):  # Only Hydra knows what a glob matches.
        return list(islice(sweep.sweep_string_iterator(), _MOST))
    return [own.get_value_element_as_str()]


def _value(own: Any, values: Sequence[str]) -> Value:
    """A number only if every value of the column is one: TensorBoard cannot sort a mixed column."""
    numbers = all(map(_is_number, values)) and isinstance(own, int | float)
    return own if numbers and not isinstance(own, bool) else _typed(own)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _typed(value: Any) -> str:
    """A value as it is typed on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed(held)}" for key, held in value.items()) + "}"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
