"""Pictures of a validation: which classes are taken for which, and what the model makes of samples.

Both callbacks see every batch that is validated or tested, with what the objective made of it. They
count on the device, and draw once the pass is complete.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpframe.core.callback import Batch, Callback
from mpframe.core.errors import ConfigError
from mpframe.core.objective import StepOutput
from mpframe.core.ranges import require_whole
from mpframe.core.tree import device_of, tensors_in
from mpframe.core.user_code import describe
from mpframe.lab.exponents import tally
from mpframe.lab.pictures import new_figure, save, short
from mpframe.training.evaluation import Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

FOLDER = "validation"
_WRITTEN = 20  # classes, up to which each cell has its number
_NAMED = 40  # classes, up to which each row has its name


class _Pictures(Callback):
    """Draws at the end of a validation and of the test, for the run's folder and TensorBoard."""

    name: str

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._context = context
        self._class_names = context.usage.get("class_names")

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._draw(trainer, "validation")

    def on_test(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._draw(trainer, "test")

    def _draw(self, trainer: Trainer, split: str) -> None:
        step = trainer.progress.global_step
        path = self._context.folder / FOLDER / f"{self.name}_{split}.png"
        if self.draw(trainer, f"{split}, step {step}", path):
            self._context.tracker.image(f"{split}/{self.name}", path.read_bytes(), step)

    def draw(self, trainer: Trainer, title: str, path: Path) -> bool:
        """Draw into a PNG what the pass has shown, and forget it. False if it has shown nothing."""
        raise NotImplementedError

    def _name_of(self, label: int) -> str:
        names = self._class_names or ()
        return short(names[label]) if 0 <= label < len(names) else str(label)


class ConfusionMatrix(_Pictures):
    """Draws how many samples of each class were taken for each class.

    Outputs are logits or probabilities, [N, classes] or [N, classes, ...], and targets the numbers
    of classes, [N] or [N, ...]. Targets beyond the classes, as -100, count nowhere. The counts are
    of all ranks. ConfigError at the first batch if outputs or targets are something else.
    """

    name = "confusion_matrix"

    def __init__(self) -> None:
        # Of the last complete pass, [true classes, predicted classes] int64 on the host.
        self.counts: Tensor | None = None
        self._counting: Tensor | None = None

    def on_prediction_end(
        self, trainer: Trainer, number: int, batch: Batch, output: StepOutput
    ) -> None:
        logits, labels = output.outputs, output.targets
        if not _is_classified(logits, labels):
            raise ConfigError(
                f"callbacks.{self.name}: the objective gives outputs {describe(logits)} and "
                f"targets {describe(labels)}; it needs [N, classes, ...] and the numbers of the "
                f"classes, [N, ...]: set callbacks.{self.name}=null"
            )
        classes = logits.shape[1]
        if number == 0 or self._counting is None:
            self._counting = torch.zeros(classes**2 + 1, dtype=torch.int64, device=logits.device)
        cells = (labels * classes + logits.argmax(1)).where(
            (labels >= 0) & (labels < classes),
            classes**2,  # a cell that is not shown
        )
        self._counting += tally(cells.flatten(), len(self._counting))

    def draw(self, trainer: Trainer, title: str, path: Path) -> bool:
        here, self._counting = self._counting, None
        (cells,) = trainer.comm.max_of([0 if here is None else len(here)])
        if not cells:
            return False
        if here is None:  # Other ranks had all samples.
            here = torch.zeros(cells, dtype=torch.int64, device=device_of(trainer.model))
        trainer.comm.sum_([here])
        classes = round((cells - 1) ** 0.5)
        self.counts = here[:-1].reshape(classes, classes).cpu()
        if trainer.comm.is_main:
            self._draw_counts(self.counts.numpy(), title, path)
        return trainer.comm.is_main

    def _draw_counts(self, counts: Any, title: str, path: Path) -> None:
        classes = len(counts)
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        size = 3.2 + min(6.0, 0.34 * classes)
        figure = new_figure(size + 0.8, size)
        axes = figure.subplots()
        image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
        if classes <= _WRITTEN:
            for (row, column), count in np.ndenumerate(counts):
                if count:
                    color = "white" if shares[row, column] > 0.6 else "black"
                    axes.text(column, row, count, ha="center", va="center", size=9, color=color)
        if classes <= _NAMED:
            names = [self._name_of(label) for label in range(classes)]
            upright = 90 if max(map(len, names)) > 2 else 0
            axes.set_xticks(range(classes), names, rotation=upright)
            axes.set_yticks(range(classes), names)
        axes.set(xlabel="predicted class", ylabel="true class")
        right = counts.trace() / max(counts.sum(), 1)
        axes.set_title(f"{title}: {right:.1%} of {counts.sum()} right", size=11)
        figure.colorbar(image, ax=axes, shrink=0.8).set_label("share of the true class")
        save(figure, path)


class Predictions(_Pictures):
    """Draws the first pictures of a pass, with their true and their predicted class.

    A batch has pictures [N, 1 or 3, height, width] or [N, height, width] as its first tensor.
    Outputs are [N, classes] with targets [N], or a class for each pixel: [N, classes, height,
    width] and [N, height, width], drawn side by side. ConfigError at the first batch otherwise.

    Args:
        count: how many pictures, 1 to 64. A batch may have fewer.
    """

    name = "predictions"

    def __init__(self, count: int = 16) -> None:
        require_whole("callbacks.predictions.count", count, least=1, most=64)
        self._count = count
        self._shown: tuple[Any, Any, Any] | None = None

    def on_prediction_end(
        self, trainer: Trainer, number: int, batch: Batch, output: StepOutput
    ) -> None:
        if number:
            return
        pictures: Any = next(tensors_in(batch), None)
        logits, labels = output.outputs, output.targets
        if not _are_pictures(pictures) or not _is_classified(logits, labels):
            raise ConfigError(
                f"callbacks.predictions: a batch begins with {describe(pictures)} and its outputs "
                f"are {describe(logits)}; it needs pictures [N, 1 or 3, height, width] and the "
                "classes' outputs [N, classes, ...]: set callbacks.predictions=null"
            )
        first = slice(self._count)
        predicted = logits[first].argmax(1)
        self._shown = pictures[first].float().cpu(), labels[first].cpu(), predicted.cpu()

    def draw(self, trainer: Trainer, title: str, path: Path) -> bool:
        shown, self._shown = self._shown, None
        if shown is None or not trainer.comm.is_main:
            return False
        pictures, labels, predicted = shown
        pixels = labels.dim() == 3
        columns = min(2 if pixels else 8, len(pictures))
        rows, wide = -(-len(pictures) // columns), 3 if pixels else 1
        figure = new_figure(max(1.25 * columns * wide, 3.0), (1.3 if pixels else 1.7) * rows + 0.5)
        figure.suptitle(f"{title}: {'picture, true, predicted' if pixels else 'predicted'}")
        axes = figure.subplots(rows, columns * wide, squeeze=False).flatten()
        for one in axes:
            one.set_axis_off()
        images = _as_seen(pictures, self._context.usage.get("preprocessing") or {})
        most = max(int(labels.max()), int(predicted.max()), 1)  # Classes have the same colours.
        colours = {"vmin": 0, "vmax": most, "cmap": "tab20", "interpolation": "nearest"}
        for place, image in enumerate(images):
            first, *beside = axes[place * wide : (place + 1) * wide]
            first.imshow(image, cmap="gray")
            if pixels:
                beside[0].imshow(labels[place].numpy(), **colours)
                beside[1].imshow(predicted[place].numpy(), **colours)
            else:
                self._name_class(first, int(labels[place]), int(predicted[place]))
        save(figure, path)
        return True

    def _name_class(self, axes: Any, true: int, guess: int) -> None:
        right, said = guess == true, self._name_of(guess)
        said += "" if right else f"\nnot {self._name_of(true)}"
        axes.set_title(said, size=9, color="black" if right else "firebrick")


def _is_classified(logits: Any, labels: Any) -> bool:
    return (
        isinstance(logits, Tensor)
        and isinstance(labels, Tensor)
        and logits.dim() >= 2
        and logits.shape[1] > 1
        and not labels.is_floating_point()
        and labels.shape == logits.shape[:1] + logits.shape[2:]
    )


def _are_pictures(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return False
    return tensor.dim() == 3 or (tensor.dim() == 4 and tensor.shape[1] in (1, 3))


def _as_seen(pictures: Tensor, preprocessing: Any) -> list[Any]:
    """Undo the normalisation, if it is known. Else each picture has its own black and white."""
    pictures = pictures[:, None] if pictures.dim() == 3 else pictures
    try:
        mean, std = (torch.tensor(preprocessing[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
        pictures = (pictures * std + mean).clamp(0, 1)
    except (KeyError, TypeError, RuntimeError):
        low, high = pictures.amin((1, 2, 3), True), pictures.amax((1, 2, 3), True)
        pictures = (pictures - low) / (high - low).clamp(min=1e-12)
    return [picture.permute(1, 2, 0).squeeze(-1).numpy() for picture in pictures]
