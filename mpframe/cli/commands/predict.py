"""Predict with a checkpoint: a table with a row for each sample.

Usage: mpframe predict checkpoint=PATH [folder=FOLDER] [option=value] ...

    mpframe predict checkpoint=runs/mine
    mpframe predict checkpoint=runs/mine split=train outputs=raw out=outputs.csv
    mpframe predict checkpoint=runs/mine folder=holiday/pictures outputs=probabilities

Options:
    checkpoint=PATH       a run (its best checkpoint if that was tested) or one checkpoint
    split=train|val|test  the part of the run's dataset (default: test if there is one, else val)
    folder=FOLDER         images without labels instead, in all folders below it, without the run's
                          data or dataset
    outputs=class|probabilities|raw    default: class if the dataset has classes, else raw
    weights=trained|ema   default: as the run was validated
    out=FILE              a .csv file (default: predictions_..._step_N.csv in the run)
    overwrite=true        replace the file if it exists
    option=value          an option of the run to change, or GROUP=CHOICE
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The options are the run's own. A class that is not mpframe's must be named again, as in
model._target_=my_pkg.Net, or by a file of --config-dir: nothing is called because a stored file
says so.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mpframe.checkpoint.state import KINDS
from mpframe.cli.program import command, take_own, writing
from mpframe.cli.restored import Restored, checkpoint_of, restore_run, run_folder
from mpframe.core.errors import ConfigError
from mpframe.core.tree import device_of, tensors_in
from mpframe.data.image_files import FileImages, Listing, list_unlabelled
from mpframe.data.images import Normalize
from mpframe.data.prediction import OUTPUTS, Columns, Predictions
from mpframe.data.task import Task
from mpframe.files.durable import atomic_file, refuse_unwritable
from mpframe.files.text import printable, say
from mpframe.run.parts import evaluation_loader

_OPTIONS = ("checkpoint", "split", "folder", "outputs", "weights", "out", "overwrite")
_CHOICES = {
    "split": ("train", "val", "test"),
    "outputs": OUTPUTS,
    "weights": KINDS,
    "overwrite": ("true", "false"),
}


@command
def main(arguments: list[str]) -> None:
    options, given = take_own(arguments, _OPTIONS, "checkpoint", _CHOICES)
    split, folder = options.get("split"), options.get("folder")
    if split is not None and folder is not None:
        raise ConfigError(f"folder={folder}: cannot be combined with split; give only one")
    overwrite = options.get("overwrite") == "true"
    if "out" in options:
        _refuse_file(Path(options["out"]), overwrite)
    path = Path(options["checkpoint"])
    paths = None if folder is None else list_unlabelled(Path(folder))
    task_of = None if paths is None else partial(_make_task, paths, str(folder))
    run = restore_run(checkpoint_of(path, split), given, options.get("weights"), task_of)
    part = "folder" if paths else split or ("val" if run.task.test is None else "test")
    name = f"predictions_{part}_step_{run.step:08d}.csv"
    out = Path(options.get("out") or run_folder(path) / name)
    _refuse_file(out, overwrite)
    names = None if paths is None else [str(Path(p).relative_to(str(folder))) for p in paths]
    count = predict(run, part, out, options.get("outputs"), names)
    said = (
        f"{path}, step {run.step}: {count} predictions of {part} "
        f"({run.trainer.precision} on {device_of(run.trainer.model)}, weights {run.weights}); "
        f"written to {out}"
    )
    say(printable(said))


def predict(
    run: Restored, part: str, out: Path, outputs: str | None, names: Sequence[str] | None
) -> int:
    """Write a row for each sample of a part, in their order, and return how many.

    `outputs`: `class`, `probabilities` or `raw`, by default the one that fits. `names` name
    the samples of `folder`, instead of numbers. The run's metrics and callbacks are replaced.
    """
    dataset: Any = run.task.val if part == "folder" else getattr(run.task, part)
    if dataset is None:
        raise ConfigError("split=test: the dataset has no test part; use split=val")
    if hasattr(dataset, "unaugmented"):
        dataset = dataset.unaugmented()
    loader = evaluation_loader(run.config, run.task, dataset, part)
    # The bar is on stderr, if that is a terminal.
    bar = tqdm(total=len(loader), unit="batch", disable=None, leave=False)
    with closing(loader), bar, writing(out), _table(out) as write_rows:

        def write(batch: Columns) -> None:
            write_rows(batch)
            bar.update()

        named = {"samples": names, "class_names": run.task.class_names}
        predictions = Predictions(write, outputs=outputs, targets=names is None, **named)
        trainer = run.trainer
        metrics = {"predictions": lambda: predictions}
        trainer.evaluator = replace(trainer.evaluator, metrics=metrics, monitor="loss")
        trainer.callbacks = {}
        trainer.evaluate(loader)
    return predictions.count


@contextmanager
def _table(path: Path) -> Iterator[Callable[[Columns], None]]:
    """Context manager with a function that appends rows as CSV; the file appears at its end."""
    with atomic_file(path) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")

        def write(rows: Columns) -> None:
            if not file.tell():
                writer.writerow(rows)
            # The shortest text that reads back as the same float32.
            texts = ([str(value) for value in column] for column in rows.values())
            writer.writerows(zip(*texts, strict=True))

        yield write
        text.detach()


def _refuse_file(out: Path, overwrite: bool) -> None:
    if out.suffix != ".csv":
        way_out = "for Parquet convert that file, for example with pandas"
        raise ConfigError(f"out={out}: must end in .csv; {way_out}")
    if out.exists() and not overwrite:
        raise ConfigError(f"out={out}: exists; choose another file, or give overwrite=true")
    refuse_unwritable("out", out.parent)


def _make_task(paths: tuple[str, ...], folder: str, facts: Mapping[str, Any]) -> Task:
    """Make the task of images, prepared as a checkpoint says those it was trained on were."""
    told, fits = facts["preprocessing"] or {}, False
    with suppress(LookupError, TypeError, ValueError):
        mean, std = (tuple(map(float, told[key])) for key in ("mean", "std"))
        side, width = told["size"]
        channels = len(mean)
        fits = side == width and len(std) == channels and channels in (1, 3) and min(std) > 0
    shapes, reason = [given["shape"] for given in facts["inputs"] or ()], ""
    if not fits or not isinstance(side, int):
        reason = (
            "the checkpoint does not say how an image is prepared, as the Task of its dataset did "
            "not (preprocessing with size, mean and std)"
        )
    elif shapes != [[None, channels, side, side]]:
        size = f"{channels} x {side} x {side}"
        reason = f"the model takes something other than only images of {size}"
    if reason:
        raise ConfigError(f"folder={folder}: {reason}; use split, with a dataset over the folder")
    listing = Listing((), paths, torch.zeros(len(paths), dtype=torch.int64))
    images = FileImages(listing, (channels, side), Normalize(mean, std), "none")
    return Task(images, images, loss=_no_loss, class_names=facts["class_names"])


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    return next(tensors_in(outputs)).new_zeros(())
