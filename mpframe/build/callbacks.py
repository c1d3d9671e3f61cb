"""The callbacks of the group `callbacks`."""

from mpframe.build.target import make
from mpframe.config.schema import Config
from mpframe.errors import ConfigError
from mpframe.training.callback import Callback


def build_callbacks(config: Config) -> dict[str, Callback]:
    """The callbacks by name, in the order of the configuration; one that is null is left out.

    Raises:
        ConfigError: an entry cannot be made, or is not a callback.
    """
    nodes = config.callbacks
    callbacks = {name: make(f"callbacks.{name}", node) for name, node in nodes.items()}
    for name, callback in callbacks.items():
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks.{name}._target_={nodes[name]['_target_']}: must return a "
                f"mpframe.training.callback.Callback, got {type(callback).__name__}"
            )
    return callbacks
