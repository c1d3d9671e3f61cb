"""What the loggers of tracking services share: each is a callback that opens a run there."""

from importlib import import_module
from io import BytesIO
from typing import Any

from PIL import Image

from mpframe.core.callback import Callback
from mpframe.core.errors import ConfigError, DivergedError, RunInterrupted
from mpframe.core.user_code import UserCode
from mpframe.tracking.logger import Logger
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

_ON_ERROR = ("warn", "stop")


class TrackingService(Callback, Logger):
    """A callback that gives a run's results to a service, whose package is `self.api`.

    Args:
        package: to import, and the name of the extra that installs it.
        on_error: `warn` to go on without the service if it raises while it logs, or `stop`.

    Raises:
        ConfigError: the package is not installed, or another `on_error`.
    """

    def __init__(self, package: str, on_error: str) -> None:
        self.option, self._on_error = f"callbacks.{package}", on_error
        if on_error not in _ON_ERROR:
            allowed = ", ".join(_ON_ERROR)
            raise ConfigError(f"{self.option}.on_error={on_error}: must be one of {allowed}")
        try:
            self.api: Any = import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            raise ConfigError(
                f"{self.option}: {package} is not installed; get it with pip install "
                f"mpframe[{package}]"
            ) from None

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Open the run. UserCodeError: the service refused."""
        with UserCode(f"{self.option}:", type(self)):
            self.open(context, trainer.progress.global_step)
        context.tracker.add(self, self._on_error)

    def open(self, context: RunContext, step: int) -> None:
        """Begin a run of the service, or go on with this run's at `step`, 0 if it is new."""
        raise NotImplementedError


def default_name(context: RunContext) -> str:
    """Return the last two folders of the run's path, as TensorBoard names a run of a sweep."""
    return "/".join(context.folder.absolute().parts[-2:])


def status_of(error: BaseException | None) -> str:
    """Return how a run ended: finished, interrupted, diverged or failed."""
    ends = {RunInterrupted: "interrupted", DivergedError: "diverged", BaseException: "failed"}
    return next((word for kind, word in ends.items() if isinstance(error, kind)), "finished")


def picture(png: bytes) -> Image.Image:
    """Decode a PNG, as the services take pictures of Pillow."""
    return Image.open(BytesIO(png))
