"""The schema: every option mpframe owns, its type, default, unit, range and one sentence.

The values a run starts from are in `conf/`. This file says which values are allowed, and check.py
compares a composed configuration with it.

Closed sections (`dtype`, `ops`, `trainer`, the run itself) take only the options listed here.
Open sections (`OPEN`) name a `_target_` and also take its arguments.

Importing this file registers the schema with Hydra as `schema`, the first entry of the defaults
list in conf/config.yaml. Hydra then knows the type and default of each closed option, and refuses
any other one on the command line and in every file.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hydra.core.config_store import ConfigStore

from mpframe.core.ranges import Range


def option(default: Any, sentence: str, unit: str = "", measure: str = "", **limits: Any) -> Any:
    """Make a field of the schema from its default, sentence, unit and limits (see `Range`).

    With a `measure`, a number of that unit is also allowed, such as `30min`. With `watches=True`
    it changes none of a run's numbers, only what is shown or kept of it.
    """
    watches = limits.pop("watches", False)
    metadata = {"sentence": sentence, "unit": unit, "measure": measure, "watches": watches}
    metadata["range"] = Range(**limits)
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


watching_option = partial(option, watches=True)


# What to write instead of names that other libraries use for a mode or an option, or that one may
# guess, in lower case.
_INSTEAD = {
    "dtype=fp32": "float32 32 32-true o0",
    "dtype=amp": "16-mixed 16 o1",
    "dtype=mixed": "o2 mixed_fp16 16-true",
    "dtype=mixed or dtype=amp": "fp16 float16 half",
    "dtype=mixed ops=none dtype.master_weights=false loss_scaling=none": "o3",
    "dtype=amp_bf16": "bf16-mixed",
    "dtype=mixed_bf16": "bf16-true",
    "dtype=mixed_bf16 or dtype=amp_bf16": "bf16 bfloat16",
    "dtype=mixed_bf16 dtype.products=fp8_tensorwise": "fp8 float8",
    **{f"dtype=mixed_bf16 dtype.products={name}": name for name in ("mxfp8", "mxfp4", "nvfp4")},
    "dtype=CHOICE": "precision mixed_precision opt_level",
    "trainer.accumulate=N": "iter_size gradient_accumulation_steps accumulate_grad_batches",
    "trainer.clip_norm=NUMBER": "max_grad_norm gradient_clip_val grad_clip",
    "trainer.parallel=CHOICE": "strategy",
    "torchrun --nproc-per-node N": "num_gpus use_horovod devices ranks",
    "device=NAME": "accelerator",
    "optimizer.lr=NUMBER": "learning_rate",
    "scheduler=CHOICE": "lr_policy lr_scheduler lr_scheduler_type",
    "callbacks.autopsy=null": "autopsy",
    "callbacks.ranges.every=N": "numerics numerics.every",
    "callbacks.profile.enabled=true": "profile",
    "callbacks.progress_bar.shown=CHOICE": "progress",
    "+size=small": "size",
}
_OURS = {name: f"use {words}" for words, names in _INSTEAD.items() for name in names.split()}


def use_instead(name: str, value: object = None) -> str:
    """Return a clause with our word for another library's, or an empty one.

    If that is a choice of `dtype`, the value may name it, as in `precision=bf16-mixed`.
    """
    found = _OURS.get(name.lower(), "")
    return _OURS.get(str(value).lower(), found) if found == "use dtype=CHOICE" else found


def parse_measure(value: Any, measure: str) -> float | None:
    """Return the number before `measure`, e.g. 30.0 for `30min`, or None for anything else."""
    words = re.fullmatch(rf"(\d+\.?\d*|\.\d+){measure}", str(value))
    return float(words[1]) if words and float(words[1]) > 0 else None


@dataclass
class Dtype:
    """`dtype`: in which format weights are stored and ops computed."""

    mode: str = option("mixed", "Stored and computed in half.", choices=("fp32", "mixed", "amp"))
    half: str = option("float16", "The 16-bit format of the run.", choices=("float16", "bfloat16"))
    compute: str = option(
        "auto",
        "Half ops on a CPU, and products below 16 bits: natively, or emulated in fp32 with one "
        "rounding. auto: native where supported; below 16 bits only on GPUs.",
        choices=("auto", "native", "emulated"),
    )
    master_weights: bool = option(
        True, "Keep fp32 masters of half weights. Without them is for studies."
    )
    products: str = option("none", "Recipe for matrix products and convolutions below 16 bits.")
    recipes: dict[str, Any] = option({}, "Your own recipes by name, for products and pins.")


@dataclass
class Ops:
    """`ops`: which op runs in which format."""

    allow: list[str] = option([], "Ops that run in half.")
    deny: list[str] = option([], "Ops that run in fp32.")
    infer: list[str] = option([], "Ops that run in the widest format of their inputs.")
    move: dict[str, str] = option({}, "Single ops put in another list: allow, deny, infer, none.")
    modules: dict[str, str] = option({}, "Module name patterns pinned to fp32, half or a recipe.")


@dataclass
class TrainerOptions:
    """`trainer`: how long, how often, and what a step does."""

    epochs: int = option(20, "Passes over the training data.", unit="epochs", low=1)
    max_steps: int | None = option(
        None, "Stop after this many steps; 0 only shows the dtype map.", unit="steps", low=0
    )
    find: str | None = option(
        None,
        "Measure an option in place of training, and say what to type: lr by a range test, "
        "batch_size by doubling it until memory ends.",
        choices=("lr", "batch_size"),
    )
    accumulate: int = option(1, "Micro-batches per optimizer step.", unit="batches", low=1)
    clip_norm: float | None = option(
        None, "Clip the global 2-norm of the unscaled gradients to this.", above=0.0
    )
    clip_value: float | None = option(
        None, "Clamp unscaled gradients to [-this, this]; goes without clip_norm.", above=0.0
    )
    ema_decay: float | None = option(
        None,
        "Keep an exponential moving average of the weights and validate with it. The decay of "
        "step t is warmed up: min(this, (1 + t) / (10 + t)).",
        unit="per step",
        above=0.0,
        below=1.0,
    )
    eval_every: int | None = watching_option(
        None, "Validate every so many steps; null: after each epoch.", unit="steps", low=1
    )
    monitor: str | None = watching_option(
        None,
        "Metric (or loss) for keep_best, early stopping, ReduceLROnPlateau; null: the first one.",
    )
    checkpoint_every: int | str | None = watching_option(
        None,
        "Save every so many steps, or so much time, as in 30min; null: after each epoch.",
        unit="steps",
        low=1,
        measure="min",
    )
    keep_last: int = watching_option(
        2, "Newest checkpoints to keep; 0: save only the best ones.", unit="checkpoints", low=0
    )
    keep_best: int = watching_option(
        1,
        "Best checkpoints to keep besides, by the monitored metric. The final test uses the best "
        "one; with 0, the last weights.",
        unit="checkpoints",
        low=0,
    )
    async_save: bool = watching_option(
        False, "Write checkpoints while training continues; takes memory for a second copy."
    )
    requeue: bool = watching_option(False, "Requeue the Slurm job when SIGUSR1 stops it.")
    log_every: int = watching_option(
        10, "Write scalars to TensorBoard every so many steps.", unit="steps", low=1
    )
    max_consecutive_skips: int = watching_option(
        50, "Stop as diverged after this many skipped steps in a row.", unit="steps", low=1
    )
    recompute: list[str] = watching_option(
        [], "Patterns of modules that are recomputed in the backward pass, to save memory."
    )
    channels_last: bool = option(False, "Keep weights of 2-d convolutions in channels-last order.")
    compile: bool | str = option(
        False,
        "true: compile model and casts into one graph (torch.compile). step: the whole step, with "
        "loss, backward pass, clipping, update and loss scaler.",
        choices=("false", "true", "step"),
    )
    parallel: str | None = watching_option(
        None,
        "How several processes train one model, each on its part of every batch; null: ddp if "
        "torchrun started several, else none. fsdp: each holds a part of the weights, for a model "
        "that does not fit on one device; the autopsy is then off.",
        choices=("none", "ddp", "fsdp"),
    )
    reduce: str = option(
        "in_backward",
        "When ranks average their gradients, in fp32: during the backward pass (after the last one "
        "if a step has several), or always after it.",
        choices=("in_backward", "after_backward"),
    )
    sync_batchnorm: bool = option(
        False,
        "BatchNorm uses the statistics of the whole batch, not of a rank's part. The autopsy, "
        "which replays steps on one rank, is then off.",
    )
    timeout: float = watching_option(
        600.0,
        "End the run after waiting so long for a batch from the workers, or for another rank.",
        unit="seconds",
        above=0.0,
    )
    verbosity: str = watching_option(
        "normal",
        "Shown on the console: quiet: warnings, errors and the result; normal: also a line at each "
        "validation, and a progress bar in a terminal; verbose: also a line at every log_every "
        "steps. train.log holds the lines of normal or verbose.",
        choices=("quiet", "normal", "verbose"),
    )


@dataclass
class DatasetOptions:
    """`dataset`: options that belong to every dataset, beside its own arguments."""

    batch_size: int = option(
        64, "Samples in a micro-batch, of all ranks together.", unit="samples", low=1
    )
    eval_batch_size: int | None = option(
        None, "The same outside of training; null: as in training.", unit="samples", low=1
    )
    workers: int = option(0, "Processes that load data; 0: the main one.", unit="processes", low=0)


@dataclass
class OptimizerOptions:
    """`optimizer`: options that belong to every optimizer, beside its own arguments."""

    lr: float = option(1e-3, "Learning rate.", above=0.0)
    groups: dict[str, Any] = option({}, "Parameters with settings of their own, by a name.")


@dataclass
class GroupOptions:
    """`optimizer.groups.NAME`: some of the parameters, beside any setting of the optimizer.

    `optimizer.parts.NAME` takes the same options except `frozen`.
    """

    parameters: list[str] = option(["*"], "Patterns of the parameter names it takes.")
    without: list[str] = option([], "Patterns of names it leaves to later groups.")
    ndim: int | None = option(
        None, "Takes only tensors of so many dimensions; null: any.", unit="dimensions", low=0
    )
    lr: float | str | None = option(
        None,
        "Learning rate; in a group also a factor on optimizer.lr, as in 10x; null: optimizer.lr.",
        above=0.0,
        measure="x",
    )
    frozen: bool = option(False, "Its parameters are not trained.")


@dataclass
class Part:
    """A checked part or group: its options, and its arguments of the optimizer."""

    options: GroupOptions
    node: dict[str, Any]


@dataclass
class JointOptions:
    """`optimizer` with `parts`: several optimizers, as in `optimizer=gan` or `muon_adamw`.

    Checked `parts` are a `Part` each.
    """

    skip: str = option(
        "all",
        "all: no part moves unless the gradients of all are finite; each: on its own.",
        choices=("all", "each"),
    )
    scalers: str = option(
        "shared", "One loss scaler for all losses, or one for each.", choices=("shared", "each")
    )
    parts: dict[str, Any] = option({}, "The optimizers by name; named as the losses, if several.")


@dataclass
class RunOptions:
    """The run itself."""

    run_name: str = watching_option("", "The folder under runs/ that the run goes into.")
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps.")
    seed: int = option(0, "Fixes weights, order and augmentation.", low=0, high=2**63 - 1)
    resume: str = watching_option(
        "none", "auto: the run folder's newest checkpoint; a path; or none."
    )
    init_from: str | None = option(
        None,
        "Start from these weights: a run, a checkpoint, a file of weights (safetensors, or a state "
        "dict by torch.save), an index of such files, or a folder with one.",
    )
    init_from_names: dict[str, str] | None = option(
        None, "Patterns of names in it, and the model's names for them: {backbone.*: encoder.*}."
    )
    init_from_except: list[str] = option(
        [], "Patterns of weights that may differ from it: the model's keep their first values."
    )


ONE_TARGET = {
    *("model", "dataset", "objective", "optimizer", "scheduler", "loss_scaling", "distributed")
}
"""The open sections, which name a class or function by `_target_`, and its arguments."""
OPEN = ONE_TARGET | {"callbacks", "metrics"}
"""The same, and those that hold several of them by name."""

SECTIONS: dict[str, type] = {
    "dtype": Dtype,
    "ops": Ops,
    "trainer": TrainerOptions,
    "dataset": DatasetOptions,
    "optimizer": OptimizerOptions,
}
RUN_OPTIONS = {f.name for f in dataclasses.fields(RunOptions)}
OPTIONS = {
    f"{path}.{field.name}".lstrip("."): field
    for path, section in {"": RunOptions, **SECTIONS}.items()
    for field in dataclasses.fields(section)
}
"""The field of each option by its dotted path."""
WATCHING = {path for path, field in OPTIONS.items() if field.metadata["watches"]}
"""The paths of the options that only watch."""

# Those of conf/callbacks/, except the ones that change the training.
_WATCHING_CALLBACKS = (
    *("ranges", "amax_record", "curves", "csv", "autopsy", "saturation", "log_lines"),
    *("profile", "progress_bar", "confusion_matrix", "predictions", "gradient_norms"),
    *("utilization", "jsonl", "wandb", "mlflow", "aim"),
)
EVERYWHERE = {"autopsy", "ranges", "confusion_matrix", "gradient_norms"}
"""The watching callbacks that every rank has, as they need the samples or weights of all."""


def only_watches(path: str) -> bool:
    """Return whether the option at a dotted path changes none of a run's numbers.

    A user's own callback may do anything, so it counts as one that changes them.
    """
    section, _, rest = path.partition(".")
    if section == "callbacks":
        return rest.split(".")[0] in _WATCHING_CALLBACKS
    return section == "metrics" or path in WATCHING


@dataclass
class Config:
    """A checked configuration. Open sections are plain mappings with their `_target_`.

    With several optimizers, `joint` holds them and `optimizer` has no `_target_`. `groups` are the
    optimizer's groups of parameters by name. `callbacks` and `metrics` are such mappings by name,
    without those that are null. All keep the order of the configuration.
    """

    run: RunOptions
    dtype: Dtype
    loss_scaling: dict[str, Any]
    ops: Ops
    trainer: TrainerOptions
    data: DatasetOptions
    model: dict[str, Any]
    dataset: dict[str, Any]
    objective: dict[str, Any] | None
    optimizer: dict[str, Any]
    groups: dict[str, Part]
    joint: JointOptions | None
    scheduler: dict[str, Any] | None
    callbacks: dict[str, dict[str, Any]]
    metrics: dict[str, dict[str, Any]]
    distributed: dict[str, Any] | None
    flat: dict[str, Any]

    @property
    def optimizer_nodes(self) -> list[dict[str, Any]]:
        """The node of each optimizer, `_target_` and arguments."""
        parts = self.joint.parts.values() if self.joint else ()
        return [part.node for part in parts] or [self.optimizer]


# OmegaConf would fill a typed mapping at the root with nothing, so only check.py checks that type.
@dataclass
class _Schema(RunOptions):
    """The whole configuration, in which an open section may hold anything.

    In the order of `--help`: what is changed most often first, the long lists of ops last.
    """

    init_from_names: Any = None
    model: Any = None
    dataset: Any = field(default_factory=lambda: dataclasses.asdict(DatasetOptions()))
    dtype: Dtype = field(default_factory=Dtype)
    loss_scaling: Any = None
    optimizer: Any = None
    scheduler: Any = None
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    distributed: Any = None
    objective: Any = None
    metrics: Any = None
    callbacks: Any = None
    ops: Ops = field(default_factory=Ops)


ConfigStore.instance().store(name="schema", node=_Schema, provider="mpframe")
