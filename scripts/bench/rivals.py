"""The same tiny loop in other trainers, from the optional extra `bench`.

Each gets what its manual asks for and nothing more: no progress bar, no checkpoints, no model
summary, and batches that need no moving. Imported only when they run.
"""

import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bench.hand_loop import LOG_EVERY, HandLog, Loop, grad_norm, hand_loop
from bench.measure import Stopwatch

Rival = Callable[[nn.Module, Optimizer, Stopwatch, Path], Loop]


def fabric(model: nn.Module, optimizer: Optimizer, data: Stopwatch, folder: Path) -> Loop:
    """One pass of a Lightning Fabric loop."""
    runner = import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer = runner.setup(model, optimizer)
    return hand_loop(model, optimizer, data, HandLog(folder / "fabric"), backward=runner.backward)


def accelerate(model: nn.Module, optimizer: Optimizer, data: Stopwatch, folder: Path) -> Loop:
    """One pass of an Accelerate loop."""
    runner = import_module("accelerate").Accelerator(cpu=True)
    model, optimizer = runner.prepare(model, optimizer)
    return hand_loop(
        model, optimizer, data, HandLog(folder / "accelerate"), backward=runner.backward
    )


def lightning(model: nn.Module, optimizer: Optimizer, data: Stopwatch, folder: Path) -> Loop:
    """One pass of Lightning's Trainer, which logs no speed."""
    package = import_module("lightning.pytorch")
    loggers = import_module("lightning.pytorch.loggers")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = lightning_module(package, model, optimizer)

    def loop() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It advises workers, for data that need none.
            trainer = package.Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=1,
                logger=loggers.TensorBoardLogger(folder, name="lightning"),
                log_every_n_steps=LOG_EVERY,
                enable_progress_bar=False,
                enable_checkpointing=False,
                enable_model_summary=False,
            )
            trainer.fit(module, data)

    return loop


_RIVALS: dict[str, tuple[str, Rival]] = {
    "Lightning Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate),
    "Lightning": ("lightning", lightning),
}


def installed() -> dict[str, Rival]:
    """The rivals that can take part, by name."""
    return {name: rival for name, (package, rival) in _RIVALS.items() if find_spec(package)}


def skipped() -> list[str]:
    """A line for each rival that cannot."""
    return [
        f"{name}: skipped, {package} is not installed; pip install 'mpframe[bench]'"
        for name, (package, _) in _RIVALS.items()
        if not find_spec(package)
    ]


def lightning_module(package: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    """Lightning's module for a classifier that logs what the loop by hand logs, except the speed.

    Args:
        package: `lightning.pytorch`.
        model, optimizer: what is trained.
    """

    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = model, nn.CrossEntropyLoss()

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss: Tensor = self.loss(self.model(batch[0]), batch[1])
            self.log("loss/train", loss)
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
            outputs = self.model(batch[0])
            right = (outputs.argmax(1) == batch[1]).float().mean()
            values = {"loss/val": self.loss(outputs, batch[1]), "metric/accuracy/val": right}
            self.log_dict(values, batch_size=len(batch[1]))

        def on_before_optimizer_step(self, _: Optimizer) -> None:
            if (self.global_step + 1) % LOG_EVERY == 0:
                self.log("grad/norm", grad_norm(self.model))

        def configure_optimizers(self) -> Optimizer:
            return optimizer

        def configure_callbacks(self) -> list[Any]:
            return [package.callbacks.LearningRateMonitor(logging_interval="step")]

    return Module()
