"""The runs of the other trainers: what a loop by hand does, told to each as its manual has it.

Loss, learning rate, gradient norm and speed are logged to TensorBoard every ten steps, loss and
accuracy at each validation. No progress bar, no checkpoints, no summary of the model.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.hand_loop import LOG_EVERY, HandLog
from bench.rivals import lightning_module
from bench.whole.loaders import SEED, cut, dataloaders
from bench.whole.loop_time import LoopTime
from bench.whole.workloads import Workload

BY_HAND = "by hand"
CUT = "by hand, batches cut from tensors"


@dataclass
class Done:
    """A run that has ended."""

    time: LoopTime  # of its loop
    model: nn.Module  # as it was trained


@dataclass
class Parts:
    """The parts of a loop by hand. `train` and `val` give batches (inputs, classes)."""

    model: nn.Module
    optimizer: Optimizer
    train: Any
    val: Any
    loss: nn.Module


def parts_of(work: Workload, loaders: Callable[[Workload], tuple[Any, Any]] = dataloaders) -> Parts:
    """The data, a model from the seed, and its optimizer."""
    train, val = loaders(work)
    torch.manual_seed(SEED)
    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr)
    return Parts(model, optimizer, train, val, nn.CrossEntropyLoss())


def by_hand(
    work: Workload, folder: Path, loaders: Callable[[Workload], tuple[Any, Any]] = dataloaders
) -> Done:
    """The loop everybody writes first."""
    parts, log = parts_of(work, loaders), HandLog(folder)
    return Done(_run(parts, work.epochs, log), parts.model)


def accelerate(work: Workload, folder: Path) -> Done:
    """The same with Accelerate."""
    parts, log = parts_of(work), HandLog(folder)
    runner = import_module("accelerate").Accelerator(cpu=True)
    parts.model, parts.optimizer, parts.train, parts.val = runner.prepare(
        parts.model, parts.optimizer, parts.train, parts.val
    )
    time = _run(parts, work.epochs, log, runner.backward)
    return Done(time, runner.unwrap_model(parts.model))


def lightning(work: Workload, folder: Path) -> Done:
    """Lightning's Trainer."""
    package: Any = import_module("lightning.pytorch")
    loggers = import_module("lightning.pytorch.loggers")
    parts, times = parts_of(work), list[LoopTime]()

    class Clock(package.Callback):  # type: ignore[misc]
        def on_train_start(self, *_: Any) -> None:
            times.append(LoopTime.now())

        def on_train_end(self, *_: Any) -> None:
            times.append(LoopTime.now())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It advises workers, for data that need none.
        trainer = package.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=work.epochs,
            num_sanity_val_steps=0,
            logger=loggers.TensorBoardLogger(folder, name="lightning"),
            log_every_n_steps=LOG_EVERY,
            callbacks=[Clock()],
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        module = lightning_module(package, parts.model, parts.optimizer)
        trainer.fit(module, parts.train, parts.val)
    return Done(times[1].since(times[0]), parts.model)


def fastai(work: Workload, folder: Path) -> Done:
    """fastai's Learner."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Its imports use what torch has deprecated.
        learner = import_module("fastai.learner")
        core = import_module("fastai.data.core")
        wrapper = import_module("fastai.optimizer").OptimWrapper
        accuracy = import_module("fastai.metrics").accuracy
        callback: Any = import_module("fastai.callback.core").Callback
        import_module("fastai.callback.progress")  # Gives the learner its `no_bar`.
    parts, log = parts_of(work), HandLog(folder)

    class CurvesByHand(callback):  # type: ignore[misc]
        order = 60  # After the recorder, whose values it logs.

        def after_step(self) -> None:
            log.on_optimizer_step(self.learn.loss.detach(), self.learn.model, self.learn.opt.opt)

        def after_epoch(self) -> None:
            log.on_validation(*self.learn.recorder.values[-1][-2:])

    learn = learner.Learner(
        core.DataLoaders(parts.train, parts.val),
        parts.model,
        loss_func=parts.loss,
        opt_func=partial(wrapper, opt=torch.optim.AdamW),
        lr=work.lr,
        metrics=accuracy,
        cbs=[CurvesByHand()],
    )
    with learn.no_bar(), learn.no_logging():
        began = LoopTime.now()
        learn.fit(work.epochs)
        return Done(LoopTime.now().since(began), parts.model)


TRAINERS: dict[str, tuple[str, Callable[[Workload, Path], Done]]] = {
    BY_HAND: ("torch", by_hand),
    CUT: ("torch", partial(by_hand, loaders=cut)),
    "Accelerate": ("accelerate", accelerate),
    "Lightning": ("lightning", lightning),
    "fastai": ("fastai", fastai),
}
"""Each with the package that it needs."""


def installed() -> list[str]:
    """Those that can take part."""
    return [name for name, (package, _) in TRAINERS.items() if find_spec(package)]


def skipped() -> list[str]:
    """A line for each that cannot."""
    return [
        f"{name}: skipped, {package} is not installed"
        for name, (package, _) in TRAINERS.items()
        if not find_spec(package)
    ]


def _run(
    parts: Parts, epochs: int, log: HandLog, backward: Callable[[Tensor], Any] = Tensor.backward
) -> LoopTime:
    began = LoopTime.now()
    for _ in range(epochs):
        parts.model.train()
        for inputs, targets in parts.train:
            parts.optimizer.zero_grad()
            loss = parts.loss(parts.model(inputs), targets)
            backward(loss)
            parts.optimizer.step()
            log.on_optimizer_step(loss, parts.model, parts.optimizer)
        log.on_validation(*_validated(parts))
    return LoopTime.now().since(began)


@torch.no_grad()
def _validated(parts: Parts) -> tuple[float, float]:
    """The mean loss, and the accuracy."""
    parts.model.eval()
    total, right, count = 0.0, 0, 0
    for inputs, targets in parts.val:
        outputs = parts.model(inputs)
        total += parts.loss(outputs, targets).item() * len(targets)
        right += int((outputs.argmax(1) == targets).sum())
        count += len(targets)
    return total / count, right / count
