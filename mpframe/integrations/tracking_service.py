"""A callback that gives a run's results to a tracking service. Each service is a file beside."""

from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from typing import Any, ClassVar

from PIL import Image

from mpframe.core.callback import Callback
from mpframe.core.errors import ConfigError
from mpframe.core.user_code import user_code
from mpframe.tracking.logger import Logger
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer


@dataclass(eq=False, kw_only=True)
class TrackingService(Callback, Logger):
    """Imports a service's package, `self.api`, and opens a run there in `open`.

    ConfigError: the package is not installed, or another `on_error`.
    """

    package: ClassVar[str]  # and the name of the extra that installs it
    name: str | None = None  # of the run. None: the last two folders of its path
    on_error: str = "warn"  # if the service raises while it logs: go on without it, or `stop`

    def __post_init__(self) -> None:
        option = f"callbacks.{self.package}"
        if self.on_error not in ("warn", "stop"):
            raise ConfigError(f"{option}.on_error={self.on_error}: must be one of warn, stop")
        try:
            self.api: Any = import_module(self.package)
        except ModuleNotFoundError as error:
            get = f"get it with pip install mpframe[{self.package}]"
            raise ConfigError(f"{option}: {error.name} is not installed; {get}") from None

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Open the service's run. UserCodeError: the service refused."""
        self.name = self.name or "/".join(context.folder.absolute().parts[-2:])
        with user_code(f"callbacks.{self.package}:", type(self)):
            self.open(context, trainer.progress.global_step)
        context.tracker.add(self, self.on_error)

    def open(self, context: RunContext, step: int) -> None:
        """Begin a run of the service, or go on with this run's at `step`."""


def picture_of(png: bytes) -> Image.Image:
    """Decode a PNG, because the services take pictures of Pillow."""
    return Image.open(BytesIO(png))
