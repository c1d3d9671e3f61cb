"""Find the fewest modules that must stay in fp32, and prove it by training.

With products below 16 bits (dtype.products): the fewest whose products must stay in half.

Usage: mpframe search [GROUP=CHOICE] [option=value] ... [target=ERROR] [prove=STEPS] ...

    mpframe search experiment=digits_mlp dtype=mixed
    mpframe search experiment=cifar10_small dtype=amp target=0.01 batches=2 prove=50
    mpframe search experiment=gpt +size=small dtype=mixed_bf16 dtype/products=nvfp4 target=0.5

Options:
    all of mpframe train
    target=ERROR    relative error of the gradients to reach (default: 0.1, for bfloat16 0.3)
    batches=N       of training data to measure on (default: 4)
    prove=STEPS     of the training that proves it (default: 100, no proof: 0)
    seeds=N         of the proof (default: 3)
    out=FOLDER      default: runs/search/DATE_TIME
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

OUT/ops.yaml has the lists and pins, as ops= takes them. OUT/search.md has the evidence: modules and
ops by rank, the sets that were tried, the proof.
"""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Self

import yaml
from tqdm import tqdm

from mpframe.cli.program import command, take_own
from mpframe.config.command_line import compose_named
from mpframe.config.composing import check_config
from mpframe.config.overrides import pin_words
from mpframe.config.schema import Config
from mpframe.core.errors import ConfigError, DivergedError
from mpframe.core.ranges import POSITIVE, require, require_whole
from mpframe.data.task import Task
from mpframe.files.durable import refuse_unwritable, write_atomically
from mpframe.files.text import markdown, say
from mpframe.lab.search import Pins, RelativeError, Search, SearchResult, Sensitivity
from mpframe.precision.policy import NO_PRODUCTS
from mpframe.precision.storage import op_of
from mpframe.run.parts import Loaders, build_loaders, build_task, in_fp32, seed_everything
from mpframe.run.trainer import build_trainer
from mpframe.tracking.dtype_map import dtype_map
from mpframe.training.callbacks.guards import SkipGuard
from mpframe.training.evaluation import Evaluation
from mpframe.training.trainer import Trainer

_OPTIONS = ("target", "batches", "prove", "seeds", "out")
Proof = dict[str, list[Evaluation]]  # the validation of each seed, by the way of training


@dataclass(frozen=True)
class Aim:
    """The format that must be kept: fp32, or half for a run with products below 16 bits."""

    pin: str  # keeps a module
    kept: str  # the format of a kept module and of the whole reference, in words
    others: str  # the format of all others
    reference: Config  # the options of the run with every module kept

    @classmethod
    def of(cls, config: Config) -> Self:
        dtype = config.dtype
        if dtype.products == NO_PRODUCTS:
            return cls("fp32", "fp32", dtype.half, in_fp32(config))
        kept = "fp32" if dtype.mode == "fp32" else "half"
        reference = replace(config, dtype=replace(dtype, products=NO_PRODUCTS))
        return cls(NO_PRODUCTS, kept, dtype.products, reference)


TARGET = {"float16": 0.1, "bfloat16": 0.3}
"""The relative error of the gradients that a healthy net stays below. It is not near 0: if rounding
changes the sign before a ReLU, or which of two values is the maximum, a whole gradient changes."""


@command
def main(arguments: list[str]) -> None:
    options, given = take_own(arguments, _OPTIONS)
    config = check_config(compose_named(given)[1])
    if config.dtype.mode == "fp32" and config.dtype.products == NO_PRODUCTS:
        raise ConfigError("dtype.mode=fp32: nothing is in half; choose dtype=mixed or dtype=amp")
    target = require("target", _given(options, "target", TARGET[config.dtype.half]), POSITIVE)
    batches = require_whole("batches", _given(options, "batches", 4))
    steps = require_whole("prove", _given(options, "prove", 100), least=0)
    seeds = require_whole("seeds", _given(options, "seeds", 3))
    out = Path(options.get("out") or f"runs/search/{time.strftime('%Y-%m-%d_%H-%M-%S')}")
    refuse_unwritable("out", out)
    found = search(config, target, batches)
    proof = prove(config, found.pinned, steps, seeds) if steps else None
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "ops.yaml", ops_yaml(config, found))
    text = report(config, found, proof)
    write_atomically(out / "search.md", text)
    say(text)
    say(f"written: {out / 'search.md'}; {out / 'ops.yaml'}: as conf/ops/NAME.yaml it is ops=NAME")


def search(config: Config, target: float, batches: int) -> SearchResult:
    """Find the smallest set of modules to keep for the target, on some batches of training data."""
    task, loaders = _data(config)
    aim = Aim.of(config)
    reference = _trainer(aim.reference, task)
    lists = reference.precision.policy.ops
    run = set(map(op_of, reference.model.modules()))
    used = [op for op in sorted(lists.allow) if op in run and aim.pin == "fp32"]

    def make(pins: Pins, alone: str | None) -> Trainer:
        ops = replace(config.ops, modules={**config.ops.modules, **pins})
        if alone is not None:
            others = {op: "deny" for op in lists.allow if op != alone}
            ops = replace(ops, move={**config.ops.move, **others})
        return _trainer(replace(config, ops=ops), task)

    # By default tqdm asks whether stderr is a terminal.
    quiet = True if config.trainer.verbosity == "quiet" else None
    with tqdm(unit="trial", leave=False, disable=quiet) as bar:

        def show(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        data = list(islice(loaders.train.epoch(0), batches))
        modules = None
        if aim.pin != "fp32":  # The modules whose products are below 16 bits, in the model's order.
            fresh = _trainer(config, task)
            rows = dtype_map(fresh.precision, fresh.model)
            modules = [r.module for r in rows if not r.products.startswith(("-", "in half"))]
        return Search(reference, make, data, target, show, aim.pin, modules).run(used)


def prove(config: Config, pinned: Sequence[str], steps: int, seeds: int) -> Proof:
    """Train `steps` steps with each seed, and validate: the reference, the found pins, no pins.

    The loss of a training that diverged is nan.
    """
    aim = Aim.of(config)
    runs = {aim.kept: aim.reference, "found": _pin(config, pinned)}
    runs |= {f"all in {aim.others}": config} if pinned else {}
    first = config.run.seed
    return {
        name: [_train(options, steps, seed) for seed in range(first, first + seeds)]
        for name, options in runs.items()
    }


def _pin(config: Config, pinned: Sequence[str]) -> Config:
    modules = {**config.ops.modules, **dict.fromkeys(pinned, Aim.of(config).pin)}
    return replace(config, ops=replace(config.ops, modules=modules))


def _train(config: Config, steps: int, seed: int) -> Evaluation:
    limits = replace(config.trainer, max_steps=steps, epochs=10**6, eval_every=10**9)
    config = replace(config, trainer=limits, run=replace(config.run, seed=seed))
    task, loaders = _data(config)
    trainer = _trainer(config, task)
    trainer.callbacks = {"skip_guard": SkipGuard(limits.max_consecutive_skips)}
    try:
        trainer.fit(loaders.train)
    except DivergedError:
        return Evaluation(math.nan)
    evaluation: Evaluation = trainer.evaluate(loaders.val)
    return evaluation


def _data(config: Config) -> tuple[Task, Loaders]:
    seed_everything(config.run.seed)
    task = build_task(config)
    return task, build_loaders(config, task)


def _trainer(config: Config, task: Task) -> Trainer:
    seed_everything(config.run.seed)
    return build_trainer(config, task, len(build_loaders(config, task).train))


def ops_yaml(config: Config, found: SearchResult) -> str:
    """Write lists and pins as a file of `conf/ops/`."""
    aim = Aim.of(config)
    head = (
        f"# The modules that stay in {aim.kept} for a relative gradient error <= {found.target:g} "
        f"in {aim.others}.\n# It is {found.reached.worst:.3g}; "
        f"with nothing in {aim.kept} {found.all_half.worst:.3g}.\n"
    )
    return head + str(yaml.safe_dump(vars(_pin(config, found.pinned).ops), sort_keys=False))


def report(config: Config, found: SearchResult, proof: Proof | None) -> str:
    aim = Aim.of(config)
    pins = shlex.join(pin_words(found.pinned, aim.pin))
    missed = "" if found.reached.worst <= found.target else "; the target is NOT reached"
    of_all = f"{len(found.pinned)} of {len(found.modules)} modules in {aim.kept}"
    sets = {", ".join(names) or f"none in {aim.kept}": e for names, e in found.trail.items()}
    parts = [
        f"# What must stay in {aim.kept} ({config.dtype.mode}, {aim.others})",
        f"Relative error of the gradients against {aim.kept}; target {found.target:g}, loss scale "
        f"2^{math.log2(found.scale):g}.",
        f"- all in {aim.others}: {_format_error(found.all_half)}\n"
        f"- found: {of_all}, {_format_error(found.reached)}{missed}"
        + "".join(f"\n    - `{name}`" for name in found.pinned),
        f"    {pins}" if pins else f"Nothing needs to stay in {aim.kept}.",
        *_table(f"Modules, each alone in {aim.others}, the worst first", found.modules),
        *_table(f"Ops, each alone in {aim.others}, the worst first", found.ops),
        "## Sets that were tried",
        "\n".join(f"- {_format_error(error)}: {names}" for names, error in sets.items()),
        *(_prove_section(proof, aim.kept) if proof else []),
    ]
    return "\n\n".join(parts) + "\n"


def _prove_section(proof: Proof, reference: str) -> list[str]:
    """Compare the found set with the noise of other seeds."""
    rows = [
        (run, _spread([e.loss for e in results]), _spread([e.value for e in results]))
        for run, results in proof.items()
    ]
    full, found = ([e.loss for e in proof[run]] for run in (reference, "found"))
    gap, noise = fmean(found) - fmean(full), max(full) - min(full)
    verdict = "within" if abs(gap) <= noise else "BEYOND"
    return [
        "## Proof",
        f"Validation after training, {len(full)} seeds: mean (lowest to highest)",
        markdown([("", "loss", proof[reference][0].monitor), *rows]),
        f"The gap in loss is {gap:.3g}, {verdict} the range of {reference}'s seeds, {noise:.3g}.",
    ]


def _spread(values: Sequence[float]) -> str:
    if any(map(math.isnan, values)):
        return f"{sum(map(math.isnan, values))} of {len(values)} diverged"
    return f"{fmean(values):.5g} ({min(values):.5g} to {max(values):.5g})"


def _table(title: str, sensitivities: Sequence[Sensitivity]) -> list[str]:
    if not sensitivities:
        return []
    rows = [
        (f"`{trial.name}`", trial.kind, f"{trial.error.gradients:.3g}", f"{trial.error.loss:.3g}")
        for trial in sensitivities
    ]
    return [f"## {title}", markdown([("name", "kind", "gradients", "loss"), *rows])]


def _format_error(error: RelativeError) -> str:
    return f"gradients {error.gradients:.3g}, loss {error.loss:.3g}"


def _given(options: Mapping[str, str], name: str, default: float) -> object:
    """Return the number given for an option, or the text if it is none."""
    text = options.get(name, str(default))
    with suppress(ValueError):
        return type(default)(text)
    return text
