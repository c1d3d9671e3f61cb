"""The loop everybody writes first, with the logging people write around it."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

LOG_EVERY = 10  # steps, as in conf/trainer/default.yaml

Loop = Callable[[], None]


class HandLog:
    """Loss, learning rate, gradient norm and speed, every `LOG_EVERY` steps.

    Args:
        folder: the event file goes there.
    """

    def __init__(self, folder: Path) -> None:
        self._writer: Any = SummaryWriter(str(folder))
        self._step = 0
        self._since = time.perf_counter()

    def on_optimizer_step(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        """Log the step if it is due, while its gradients are there."""
        self._step += 1
        if self._step % LOG_EVERY:
            return
        now = time.perf_counter()
        for tag, value in (
            ("loss/train", loss.item()),
            ("optim/lr", optimizer.param_groups[0]["lr"]),
            ("grad/norm", grad_norm(model).item()),
            ("speed/steps_per_second", LOG_EVERY / (now - self._since)),
        ):
            self._writer.add_scalar(tag, value, self._step)
        self._since = now

    def on_validation(self, loss: float, accuracy: float) -> None:
        """Log a validation at the last step."""
        for tag, value in (("loss/val", loss), ("metric/accuracy/val", accuracy)):
            self._writer.add_scalar(tag, value, self._step)


def grad_norm(model: nn.Module) -> Tensor:
    """The global 2-norm of the gradients, 0-d."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def hand_loop(
    model: nn.Module,
    optimizer: Optimizer,
    data: Iterable[tuple[Tensor, Tensor]],
    log: HandLog | None,
    *,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    checked: bool = False,
) -> Loop:
    """A function that trains one pass.

    Args:
        model, optimizer: what is trained.
        data: batches (inputs, targets).
        log: None logs nothing.
        backward: called with the loss.
        checked: measure the gradients of every step, and leave it out if they are not finite.
    """
    loss_function = nn.CrossEntropyLoss()

    def loop() -> None:
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = loss_function(model(inputs), targets)
            backward(loss)
            if not checked or bool(torch.isfinite(grad_norm(model))):
                optimizer.step()
            if log is not None:
                log.on_optimizer_step(loss, model, optimizer)

    return loop
