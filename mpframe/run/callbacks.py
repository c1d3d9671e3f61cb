"""All callbacks of a run: the fixed ones, around the group `callbacks`.

    results, throughput    first, because others read what they count
    stream                 keeps the place in the training data, if they are a stream
    the group              in the order of its entries
    skip_guard             ends a run that only skips, once the group has seen the step
    checkpoints            saves the state of the others after the step
    stop_on_signal         last, once all others have dealt with the step

The fixed ones are not in the group, so they cannot be left out.
"""

from mpframe.config.schema import Config, parse_measure
from mpframe.core.callback import Callback
from mpframe.core.errors import ConfigError
from mpframe.data.loading import Loader
from mpframe.run.parts import build_callbacks
from mpframe.training.callbacks.checkpoints import Checkpoints, SavePlan
from mpframe.training.callbacks.guards import SkipGuard
from mpframe.training.callbacks.results import Results
from mpframe.training.callbacks.throughput import Throughput
from mpframe.training.interruption import Interruption
from mpframe.training.trainer import Callbacks


class RunCallbacks:
    """The callbacks of one run: `by_name` has all of them, in order, `group` between the fixed."""

    def __init__(
        self,
        group: Callbacks,
        speed: Throughput,
        guard: SkipGuard,
        save: SavePlan,
        stop: Callback,
        train: Loader,
    ) -> None:
        self.results, self.throughput, self.checkpoints = Results(), speed, Checkpoints(save)
        first: dict[str, Callback] = {"results": self.results, "throughput": speed}
        if isinstance(train, Callback):  # Only a stream's loader has a place to save.
            first["stream"] = train
        last = {"skip_guard": guard, "checkpoints": self.checkpoints, "stop_on_signal": stop}
        for name in group.keys() & (first.keys() | last.keys()):
            raise ConfigError(
                f"callbacks.{name}: every run has a callback of this name; give yours another name"
            )
        self.by_name = {**first, **group, **last}


def callbacks_of(
    config: Config, began: float, interruption: Interruption, train: Loader
) -> RunCallbacks:
    """Make the callbacks of a configured run that began at a time of `perf_counter`."""
    options, every = config.trainer, config.trainer.checkpoint_every
    plan = SavePlan(
        every=None if isinstance(every, str) else every,
        minutes=parse_measure(every, "min"),
        keep_last=options.keep_last,
        keep_best=options.keep_best,
        background=options.async_save,
        on_error=options.on_save_error,
    )
    guard = SkipGuard(options.max_consecutive_skips, config.loss_scaling.get("hysteresis", 1))
    throughput = Throughput(config.data.batch_size, began)
    return RunCallbacks(build_callbacks(config), throughput, guard, plan, interruption, train)
