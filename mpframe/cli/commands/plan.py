"""Compute what each of many ranks would hold and send, without one of them.

Usage: mpframe plan [GROUP=CHOICE] [option=value] ... [nodes=N] [gpus=N] [memory=SIZE]

    mpframe plan experiment=gpt nodes=2 gpus=8 memory=80GB
    mpframe plan experiment=gpt gpus=4 trainer.recompute=[blocks.*] out=plan.json

Options:
    all of mpframe train
    nodes=N         machines, default: 1
    gpus=N          ranks on each machine, default: 2
    memory=SIZE     of each rank, as 80GB or 64GiB, to learn what fits
    out=FILE.json   also writes the numbers there, in bytes
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The model is made without values, and a forward pass on a rank's part of the first batch tells the
activations. `recomputed` is less: with `trainer.recompute`, by default of the model's blocks. Half
ops count as native, and products below 16 bits as half.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpframe.cli.program import command, take_own
from mpframe.config.command_line import check_config, compose_named, refuse_unwritable
from mpframe.config.schema import Config, parse_measure
from mpframe.core.casting.storage import formats_of
from mpframe.core.errors import ConfigError, UserCodeError, first_line
from mpframe.core.tree import map_tensors
from mpframe.data.loading import make_loader
from mpframe.data.task import Task
from mpframe.files.durable import write_atomically
from mpframe.files.text import align
from mpframe.lab import plan
from mpframe.lab.plan import Activations, Way, Weight
from mpframe.parallel.layout import Layout
from mpframe.parallel.sharding import blocks_of
from mpframe.run.optimizer import build_optimizers
from mpframe.run.parts import build_layout, build_model, build_precision, build_task
from mpframe.training.memory import recompute

_UNITS = {"GB": 1e9, "GiB": 2**30, "MB": 1e6, "MiB": 2**20}
_MODES = ("fp32", "amp", "mixed")
_MASTERS = {"on": 4, "split": 2, "off": 0}  # bytes beside a half weight


@command
def main(arguments: list[str]) -> None:
    given, words = take_own(arguments, ("nodes", "gpus", "memory", "out"))
    nodes, gpus = (_whole(name, given.get(name, "12"[at])) for at, name in enumerate(_RANKS))
    memory, out = _size(given.get("memory")), given.get("out")
    if out:
        refuse_unwritable("out", Path(out).parent)
    config = check_config(compose_named(words)[1])
    task, layout = build_task(config), build_layout(config)
    rows = [
        row
        for way in _ways(nodes, gpus, layout)
        for mode in _MODES
        for row in [_row(config, task, layout, way, mode)]
    ]
    print(_table(rows, memory))
    if out:
        write_atomically(Path(out), json.dumps(rows, indent=2) + "\n")


_RANKS = ("nodes", "gpus")


def _whole(name: str, text: str) -> int:
    if not text.isdigit() or text == "0":
        raise ConfigError(f"{name}={text}: must be an integer >= 1")
    return int(text)


def _size(text: str | None) -> float | None:
    sizes = [n * unit for name, unit in _UNITS.items() if (n := parse_measure(text, name))]
    if text and not sizes:
        raise ConfigError(f"memory={text}: must be a number with {', '.join(_UNITS)}, as 80GB")
    return sizes[0] if sizes else None


def _ways(nodes: int, gpus: int, layout: Layout) -> Iterator[Way]:
    ranks = nodes * gpus
    yield Way("ddp", replicas=ranks)
    if ranks > 1:
        yield Way("fsdp", shards=ranks)
    if nodes > 1 and gpus > 1:
        yield Way("hsdp", nodes, gpus)
    if layout.plan:
        yield Way("tp", *layout.shape(ranks))


def _row(config: Config, task: Task, layout: Layout, way: Way, mode: str) -> dict[str, Any]:
    """Return the numbers of one way in one dtype mode, in bytes, by their names."""
    dtype = replace(config.dtype, mode=mode, compute="native", products="none")
    config = replace(config, dtype=dtype)
    planned = layout.plan if way.tensor > 1 else {}
    model, activations, recomputed = _run(config, task, way, planned)
    weights = _weights(config, model, way.tensor, planned)
    average = 0 if config.trainer.ema_decay is None else 4
    masters = _MASTERS[str(config.dtype.master_weights)] if mode == "mixed" else 0
    held = plan.held(weights, way, master=masters, average=average)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    traffic = plan.payload(weights, way, buffers=buffers, activations=activations.summed)
    return {
        "ranks": way.name, "dtype": mode, **asdict(held),
        "activations": activations.saved, "recomputed": recomputed,
        "total": held.total + buffers + activations.saved,
        "least": held.total + buffers + min(activations.saved, recomputed),
        "sent": round(plan.sent(traffic)) if way.ranks > 1 else 0,
        "longest": plan.longest_message(weights, way) if way.ranks > 1 else 0,
    }


def _run(
    config: Config, task: Task, way: Way, planned: Mapping[str, str]
) -> tuple[nn.Module, Activations, int]:
    """Make the model, in its formats, and measure its activations, kept and recomputed."""
    batch, shapes = _batch(config, task, way.ranks // way.tensor), FakeTensorMode()
    try:
        with shapes:
            model = build_model(config).train()
            batch = map_tensors(shapes.from_tensor, batch)
            precision = build_precision(config)

            def forward() -> None:
                with precision.cast():
                    for objective in task.objectives.values():
                        objective(model, batch)

            for objective in task.objectives.values():
                precision.trace(model, partial(objective, batch=batch))
            for weight, dtype in formats_of(model, precision.policy, precision.uses(model)).items():
                weight.data = weight.data.to(dtype)
            precision.attach(model)
            names = {module: name for name, module in model.named_modules()}
            patterns = config.trainer.recompute or [names[block] for block in blocks_of(model)]
            styles = {m: plan.style_of(name, planned) for m, name in names.items()}
            divided = {module: style for module, style in styles.items() if style}
            saved = plan.measure(model, forward, blocks_of(model), divided, way.tensor)
            recompute(model, patterns)
            kept = plan.measure(model, forward, (), divided, way.tensor)
    except (RuntimeError, NotImplementedError) as error:
        raise UserCodeError(f"model: cannot run without values: {first_line(error)}") from error
    return model, saved, kept.saved + saved.largest


def _batch(config: Config, task: Task, readers: int) -> Any:
    """Return the largest part of the first batch that one of the ranks reads."""
    options: dict[str, Any] = {"collate": task.collate, "batches_per_epoch": task.batches_per_epoch}
    size = -(-config.data.batch_size // readers)
    train = make_loader(
        task.train, size, seed=config.run.seed, shuffle=True, drop_last=True, **options
    )
    return next(train.epoch(0))


def _weights(
    config: Config, model: nn.Module, tensor: int, planned: Mapping[str, str]
) -> list[Weight]:
    states = plan.state_bytes(build_optimizers(config, model).values())
    block_of = {p: n for n, b in enumerate(blocks_of(model), 1) for p in b.parameters()}
    shapes: dict[Tensor, list[int]] = {p: list(p.shape) for p in model.parameters()}
    for name, module in model.named_modules():
        style = plan.style_of(name, planned)
        for parameter in module.parameters(recurse=False) if style not in ("", "sequence") else ():
            axis = style.startswith("colwise") == isinstance(module, nn.Embedding)
            if axis < parameter.dim():  # Each rank has the whole bias of a rowwise layer.
                shapes[parameter][axis] = parameter.shape[axis] // tensor
    weights = []
    for parameter, shape in shapes.items():
        alike, other = states.get(parameter, (0, 0))
        weight = Weight(shape, parameter.itemsize, parameter.requires_grad)
        alike = alike * weight.count // max(parameter.numel(), 1)
        block = block_of.get(parameter, 0)
        weights.append(replace(weight, state=alike, whole_state=other, block=block))
    return weights


def _table(rows: list[dict[str, Any]], memory: float | None) -> str:
    unit, size = ("GB", 1e9) if max(row["total"] for row in rows) >= 1e9 else ("MB", 1e6)
    names = [name for name in rows[0] if name != "least"]
    lines = [[*names, *(["fits"] if memory else [])]]
    for row in rows:
        cells = [v if isinstance(v, str) else f"{v / size:.3g}" for v in map(row.get, names)]
        lines.append(cells + ([_fits(row, memory)] if memory else []))
    return f"{unit} of each rank, and a step's sent and longest message\n" + align(
        lines, right=range(2, len(names))
    )


def _fits(row: dict[str, Any], memory: float) -> str:
    if row["total"] <= memory:
        return "yes"
    return "recomputed" if row["least"] <= memory else "no"
