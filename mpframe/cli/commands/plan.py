"""Compute what each of many ranks would hold and send, without one of them.

Usage: mpframe plan [GROUP=CHOICE] [option=value] ... [nodes=N] [gpus=N] [memory=SIZE]

    mpframe plan experiment=gpt nodes=2 gpus=8 memory=80GB
    mpframe plan model=mlp gpus=4 trainer.recompute=[hidden*]

Options:
    all of mpframe train
    nodes=N         machines, default: 1
    gpus=N          ranks on each machine, default: 1
    memory=SIZE     of each rank, as 80GB, to see what fits
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The model is made without values. A forward pass on a rank's part of a batch tells the activations,
and the `recomputed` ones of `trainer.recompute`, by default of the model's blocks. Half ops count
as native, and products below 16 bits as half.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpframe.cli.program import command, take_own
from mpframe.config.command_line import compose_named
from mpframe.config.composing import check_config
from mpframe.config.schema import Config, parse_measure
from mpframe.core.errors import ConfigError, UserCodeError, first_line
from mpframe.core.tree import map_tensors
from mpframe.data.task import Task, training_loader
from mpframe.files.text import align, say
from mpframe.precision.storage import formats_of
from mpframe.run import footprint
from mpframe.run.footprint import Way, Weight
from mpframe.run.optimizer import build_optimizers
from mpframe.run.parts import build_layout, build_model, build_precision, build_task
from mpframe.training.memory import cast_again, recompute
from mpframe.training.parallel.layout import Layout
from mpframe.training.parallel.sharding import blocks_of

_MODES = ("fp32", "amp", "mixed")


@command
def main(arguments: list[str]) -> None:
    given, words = take_own(arguments, ("nodes", "gpus", "memory"))
    nodes, gpus = (_read(name, given.get(name, "1"), "") for name in ("nodes", "gpus"))
    memory = _read("memory", given["memory"], "GB") if "memory" in given else math.inf
    config = check_config(compose_named(words)[1])
    task, layout = build_task(config), build_layout(config)
    ways = _ways(int(nodes), int(gpus), layout)
    rows = [_row(config, task, layout, way, mode) for way in ways for mode in _MODES]
    say(_table(rows, memory))


def _read(name: str, text: str, unit: str) -> float:
    number = parse_measure(text, unit)
    if number is None or not (unit or number.is_integer()):
        raise ConfigError(f"{name}={text}: must be {'a number of GB, as 80GB' if unit else '>= 1'}")
    return number


def _ways(nodes: int, gpus: int, layout: Layout) -> list[Way]:
    ranks = nodes * gpus
    fitting = {
        Way("ddp", replicas=ranks): True,
        Way("fsdp", shards=ranks): ranks > 1,
        Way("hsdp", nodes, gpus): nodes > 1 and gpus > 1,
        Way("tp", *layout.shape(ranks)): bool(layout.plan),
    }
    return [way for way, fits in fitting.items() if fits]


def _row(config: Config, task: Task, layout: Layout, way: Way, mode: str) -> dict[str, Any]:
    """Return the numbers of one way in one dtype mode, in bytes, by their names."""
    dtype = replace(config.dtype, mode=mode, compute="native", products="none")
    config = replace(config, dtype=dtype)
    names = (layout.plan or {}) if way.tensor > 1 else {}
    largest_share = -(-config.data.batch_size * way.tensor // way.ranks)
    batch = next(training_loader(task, largest_share, config.run.seed).epoch(0))
    try:
        # A model may hold tensors that were made before, or on the meta device.
        with FakeTensorMode(allow_non_fake_inputs=True) as shapes:
            model = build_model(config).train()
            batch = map_tensors(shapes.from_tensor, batch)
            styles = _styles(model, names)
            activations, recomputed, summed = _run(config, task, model, batch, styles, way)
    except (RuntimeError, NotImplementedError) as error:
        raise UserCodeError(f"model: cannot run without values: {first_line(error)}") from error
    weights = _weights(config, model, styles, way.tensor)
    average = 0 if config.trainer.ema_decay is None else 4
    masters = 4 if config.dtype.master_weights else 0  # bytes beside a half weight
    held = footprint.held(weights, way, master=masters, average=average)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    traffic = footprint.payload(weights, way, buffers=buffers, activations=summed)
    update, gathered = held["update"], held["gathered"]
    rest = sum(held.values()) + buffers - update - gathered
    total, least = (rest + max(update, gathered + n) for n in (activations, recomputed))
    held |= {"activations": activations, "recomputed": recomputed, "total": total}
    held["sent"] = round(footprint.sent(traffic))
    held["longest"] = footprint.longest_message(weights, way)
    return {"ranks": way.name, "dtype": mode, **held, "least": least}


def _run(
    config: Config, task: Task, model: nn.Module, batch: Any, styles: Any, way: Way
) -> tuple[int, int, int]:
    """Bring weights to their formats; measure activations, kept and recomputed, and sums."""
    precision, blocks = build_precision(config), blocks_of(model)

    def forward() -> None:
        with precision.cast():
            for objective in task.objectives.values():
                objective(model, batch)

    for objective in task.objectives.values():
        precision.trace(model, partial(objective, batch=batch))
    for weight, dtype in formats_of(model, precision.policy, precision.uses(model)).items():
        weight.data = weight.data.to(dtype)
    if way.shards > 1 and way.tensor == 1:
        precision.use_shards(model, {weight: weight for weight in model.parameters()}, cast_again)
    precision.attach(model)
    names = [name for name, module in model.named_modules() if module in blocks]
    saved, largest, summed = footprint.measure(model, forward, blocks, styles, way.tensor)
    recompute(model, config.trainer.recompute or names)
    kept, _, _ = footprint.measure(model, forward, (), styles, way.tensor)
    return saved, kept + largest, summed


def _styles(model: nn.Module, patterns: Mapping[str, Any]) -> dict[nn.Module, str]:
    """Return the style that `distributed.plan` gives each layer: of the last pattern that fits."""
    fitting = {
        module: style
        if isinstance(style, str)
        else type(style).__name__.lower().removesuffix("parallel")
        for pattern, style in patterns.items()
        for name, module in model.named_modules()
        if fnmatchcase(name, pattern)
    }
    return {module: s for module, s in fitting.items() if s.startswith(("colwise", "rowwise"))}


def _weights(
    config: Config, model: nn.Module, styles: Mapping[nn.Module, str], tensor: int
) -> list[Weight]:
    states = footprint.state_bytes(build_optimizers(config, model).values())
    block_of: dict[Tensor, int] = {
        p: n for n, b in enumerate(blocks_of(model), 1) for p in b.parameters()
    }
    shapes: dict[Tensor, list[int]] = {p: list(p.shape) for p in model.parameters()}
    for module, style in styles.items():
        axis = style.startswith("colwise") == isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False):
            if axis < parameter.dim():  # Each rank has the whole bias of a rowwise layer.
                shapes[parameter][axis] = parameter.shape[axis] // tensor
    return [
        Weight(shape, p.itemsize, p.requires_grad, *states.get(p, (0, 0, 0)), block_of.get(p, 0))
        for p, shape in shapes.items()
    ]


def _table(rows: list[dict[str, Any]], memory: float) -> str:
    unit, size = ("GB", 1e9) if max(row["total"] for row in rows) >= 1e9 else ("MB", 1e6)
    names = [name for name in rows[0] if name != "least"]
    lines = [[*names, "fits"]]
    for row in rows:
        cells = [row["ranks"], row["dtype"], *(f"{row[name] / size:.3g}" for name in names[2:])]
        kept, least = (row[name] / 1e9 <= memory for name in ("total", "least"))
        lines.append([*cells, "yes" if kept else "recomputed" if least else "no"])
    if memory == math.inf:
        lines = [line[:-1] for line in lines]
    head = f"{unit} that each rank holds, sends in a step, and sends at once:"
    return f"{head}\n{align(lines, right=range(2, len(names)))}"
