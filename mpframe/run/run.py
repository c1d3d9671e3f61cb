"""One training run, from its configuration to its summary.

However a run ends, `summary.json` says so: finished, pruned, interrupted, diverged or failed.
"""

import itertools
import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory

from omegaconf import DictConfig

from mpframe.checkpoint.folder import set_aside_after, tidy
from mpframe.config.composing import check_config
from mpframe.config.overrides import word_of
from mpframe.config.redaction import hide, hide_from_logs, redact, secrets_of, values_of
from mpframe.config.schema import EVERYWHERE, Config, only_watches
from mpframe.config.sweep import ELSEWHERE, changes
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import (
    ConfigError,
    DataError,
    DivergedError,
    LostRankError,
    MpframeError,
    RunInterrupted,
    UserCodeError,
    first_line,
)
from mpframe.core.loss_scaling.scaler import name_of
from mpframe.core.user_code import describe_error
from mpframe.data.loading import Loader
from mpframe.data.task import Task
from mpframe.files.durable import refuse_unwritable
from mpframe.files.file_lock import run_lock
from mpframe.files.stored_yaml import parse_stored
from mpframe.run.description import announce, describe, usage_of
from mpframe.run.folder import RunFolder, keep_vocabulary, refuse_unfit, unwritable_in_one_line
from mpframe.run.outcome import best_checkpoint, final_test, summary_of
from mpframe.run.parts import (
    Loaders,
    RunCallbacks,
    build_layout,
    build_loaders,
    build_scaler,
    build_task,
    callbacks_of,
    resolve_device,
    seed_everything,
)
from mpframe.run.process import RESULT, console, requeue
from mpframe.run.resume import resume_from, take_first_weights
from mpframe.run.trainer import build_trainer
from mpframe.tracking.logger import Loggers
from mpframe.tracking.summary import Status, Summary
from mpframe.tracking.tracker import Tracker
from mpframe.training.interruption import Interruption
from mpframe.training.parallel.launch import init_comm, refuse_misfit
from mpframe.training.parallel.place import place, separate
from mpframe.training.parallel.same_weights import refuse_other_start
from mpframe.training.run_context import RunContext, set_up
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

# Options that may differ between ranks: the place of the data, and the time in the run's name.
_OF_A_RANK = {"run_name", *ELSEWHERE} - {"device"}


class Run:
    """A run in its folder.

    With several ranks, rank 0 has the folder. The others read checkpoints from it, write into a
    temporary one, and do not have the callbacks that only watch.
    """

    def __init__(
        self, config: Config, composed: DictConfig, folder: Path, hydra: DictConfig | None = None
    ) -> None:
        separate(config.trainer.parallel)
        self.config = _of_this_rank(config)
        # Refused before the folder is taken.
        self.scaling, self.layout = name_of(build_scaler(config)), build_layout(config)
        given = [*values_of(composed), *(values_of(hydra) if hydra else ())]
        self.secrets = secrets_of(given)
        self.folder = folder
        self._scratch = ExitStack()
        self.rank_folder = folder
        if place().rank:
            scratch = TemporaryDirectory(prefix="mpframe-rank-")
            self.rank_folder = Path(self._scratch.enter_context(scratch))
        self.run_folder = RunFolder(self.rank_folder, composed, hydra, self.secrets)
        self.comm: Comm = SINGLE_PROCESS
        self.hydra = hydra
        self.started = time.perf_counter()
        self.trainer: Trainer | None = None
        self.callbacks: RunCallbacks | None = None
        self.tested: str | None = None
        self.interruption = Interruption()

    def train(self) -> Summary:
        """Train, and write the summary however it ends.

        MpframeError: the run could not start or continue. The summary is written, unless the folder
        holds the record of a run that was not continued. RunInterrupted: a signal stopped it.
        Checkpoint and summary are written.
        """
        options = self.config.trainer
        device = partial(resolve_device, self.config.run.device)
        with (
            self._scratch,
            hide_from_logs(self.secrets),
            console(options.verbosity, place().rank),
            init_comm(options.parallel, device, options.timeout) as self.comm,
            self._reporting_failure(),
            self.run_folder,
            unwritable_in_one_line(self.rank_folder),
            run_lock(self.rank_folder),
            self.interruption,
        ):
            _refuse_other_options(self.comm, self.run_folder.config)
            refuse_misfit(options.parallel)
            self.folder = self.comm.broadcast_object(self.folder)
            _refuse_to_forget(self.config)
            refuse_unfit(self.rank_folder, self.config.run.resume)
            tidy(self.rank_folder)
            if not self.run_folder.holds_a_run():
                self.run_folder.take()
            return self._train()

    def _train(self) -> Summary:
        try:
            with unwritable_in_one_line(self.rank_folder), _refuse_exit():
                self._fit()
        except DivergedError as error:
            self._finish(Status.DIVERGED, str(error))
            raise
        except BaseException as error:
            received = self.interruption.received
            # If a signal raised at once, a library may have turned it into another error.
            at_once = self.interruption.raised
            if received is not None and (at_once or isinstance(error, RunInterrupted)):
                raise self._stop(received) from None
            self._finish(Status.FAILED, first_line(error))
            self.run_folder.log_traceback(error)
            raise
        assert self.trainer is not None
        stopped, skipped = self.trainer.stop_reason, self.trainer.progress.mostly_skipped
        if stopped:
            log.info("%s", stopped, extra=RESULT if self.config.trainer.find else None)
        if skipped:
            log.warning("warning: %s", skipped)
        return self._finish(self.trainer.stop_status, stopped or skipped)

    def _stop(self, received: Signals) -> RunInterrupted:
        self._finish(Status.INTERRUPTED, str(RunInterrupted(received)))
        if self.config.trainer.requeue and self.comm.is_main:
            requeue(received)
        if not self.config.trainer.keep_last:
            return RunInterrupted(received, "trainer.keep_last=0: where it stopped is not saved")
        word = shlex.quote(word_of("hydra.run.dir", str(self.folder)))
        return RunInterrupted(received, f"continue with resume=auto {word}")

    def _fit(self) -> None:
        config = self.config
        seed_everything(config.run.seed)
        task = build_task(config)
        if self.comm.size > 1:
            self.comm.tensor = self.layout.shape(self.comm.size)[-1]
        loaders = build_loaders(config, task, self.comm)
        with ExitStack() as stack:
            for loader in filter(None, loaders):
                stack.callback(loader.close)
            self._fit_with(task, loaders)

    def _fit_with(self, task: Task, loaders: Loaders) -> None:
        config, train = self.config, loaders.train
        # Seeded again, because importing a dataset's modules may draw random numbers.
        seed_everything(config.run.seed)
        trainer = self.trainer = build_trainer(config, task, len(train), self.comm)
        announce(config, trainer, train, self.folder)
        if config.run.init_from is not None:
            take_first_weights(trainer, config.run)
        if config.trainer.find is not None:
            self._find(trainer, task, train)
        if config.trainer.find is not None or config.trainer.max_steps == 0:
            return
        if self.comm.data_rank:  # Ranks with the same dropout would see less of it.
            seed_everything(config.run.seed + self.comm.data_rank)
        callbacks = callbacks_of(config, self.started, self.interruption, train)
        self.callbacks, trainer.callbacks = callbacks, callbacks.by_name
        identity = self._start(trainer)
        keep_vocabulary(task, self.rank_folder, resumed=trainer.progress.global_step > 0)
        usage = redact(usage_of(task, trainer, self.hydra), self.secrets)
        text = self.run_folder.config
        # The checkpoint holds the curves of its own step, and they are written again.
        first_step = max(1, trainer.progress.global_step)
        with (
            self.interruption.defer(),
            Loggers(Tracker(self.rank_folder, first_step)) as tracker,
        ):
            describe(tracker, config, trainer, train, text, self.secrets, self.hydra)
            counted = callbacks.throughput, callbacks.results
            context = RunContext(self.rank_folder, text, identity, tracker, train, *counted, usage)
            self._train_with(trainer, loaders, context)
            tracker.tensorboard.mark_finished()

    def _find(self, trainer: Trainer, task: Task, train: Loader) -> None:
        what = self.config.trainer.find
        if self.config.run.resume != "none" or self.comm.size > 1:
            means = "measures in one process and before the first step; start it without torchrun"
            raise ConfigError(f"trainer.find={what}: {means} and with resume=none")
        self.run_folder.take()
        find = import_module(f"mpframe.lab.find.{what}").find
        said = find(self.config, trainer, task, train, self.rank_folder)
        trainer.stop(f"trainer.find={what}: {said}")

    def _start(self, trainer: Trainer) -> str:
        """Load the checkpoint, if any, take the folder, and return the run's identity."""
        resume = self.config.run.resume
        identity = resume_from(trainer, resume, self.folder, self.run_folder.config)
        step = trainer.progress.global_step
        refuse_other_start(trainer.comm, step, trainer.weights, resume)
        self.run_folder.take()
        for moved in set_aside_after(self.rank_folder, step):
            log.warning("warning: newer than where the run goes on, now %s", moved)
        return identity

    def _train_with(self, trainer: Trainer, loaders: Loaders, context: RunContext) -> None:
        assert self.callbacks is not None
        with set_up(trainer, context), _date_errors(trainer):
            with self.callbacks.checkpoints.around(trainer):
                trainer.fit(loaders.train, loaders.val)
            if loaders.test is None or trainer.stop_status is Status.PRUNED:
                return
            loaders.train.close()  # The workers of the test take their place.
            loaders.val.close()
            path = best_checkpoint(self.folder, self.config.trainer.keep_best, context.results.best)
            path = self.comm.broadcast_object(path)
            self.tested = final_test(trainer, loaders.test, path)

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Report an error of this rank to the others."""
        try:
            yield
        except LostRankError:
            raise
        except BaseException as error:
            self.comm.report_failure(first_line(error))
            raise

    def _finish(self, status: Status, reason: str | None = None) -> Summary:
        reason = None if reason is None else hide(reason, self.secrets)
        parts = self.config, self.scaling, self.trainer, self.callbacks, self.started
        summary = summary_of(*parts, status, reason, self.tested)
        summary.device = hide(summary.device, self.secrets)
        if not self.run_folder.taken:
            log.info("the record in %s stays as it was", self.folder)
            return summary
        try:
            with unwritable_in_one_line(self.rank_folder):
                summary.write(self.rank_folder)
        except MpframeError as error:
            if status in (Status.FINISHED, Status.PRUNED):
                raise
            log.warning("warning: %s", error)  # The run's end is worse.
        log.info(
            "%s: %s%d steps, %d skipped, %.1f s, in %s",
            status.value,
            _results(summary),
            summary.steps,
            summary.skipped_steps,
            summary.seconds,
            self.folder,
            extra=RESULT,
        )
        return summary


def _results(summary: Summary) -> str:
    """Return the monitored value of the test, then of the validation."""
    name = summary.monitor
    tested = summary.test_loss if name == "loss" else summary.test_metrics.get(name or "")
    test = "" if tested is None else f"test_{name} {tested:.4f} ({summary.tested} weights), "
    value = summary.monitored
    return test + ("" if value is None else f"val_{name} {value:.4f}, ")


def train(config: DictConfig, folder: str | Path) -> Summary:
    """Train a configuration that Hydra's `compose` made, in a notebook or your own program::

        from hydra import compose, initialize_config_module
        from mpframe import train

        with initialize_config_module("mpframe.conf", version_base="1.3"):
            config = compose("config", ["dtype=amp", "trainer.max_steps=20"])
        summary = train(config, "runs/notebook")

    Args:
        config: a composed configuration, checked as on the command line.
        folder: the run's folder, which is made.

    Raises:
        MpframeError: an option is not allowed, or the run could not start or continue.
    """
    checked_config, path = check_config(config), Path(folder)
    refuse_unwritable("folder", path)
    path.mkdir(parents=True, exist_ok=True)
    return Run(checked_config, config, path).train()


def _of_this_rank(config: Config) -> Config:
    """Leave out the callbacks that this rank does not need."""
    left_out = set()
    divided = config.trainer.parallel == "fsdp"
    if place().size > 1 and config.trainer.sync_batchnorm and not divided:
        left_out.add("autopsy")  # It replays steps on rank 0, which would wait for the others.
    if place().rank:
        watching = {name for name in config.callbacks if only_watches(f"callbacks.{name}")}
        left_out |= watching - EVERYWHERE
    kept = {name: node for name, node in config.callbacks.items() if name not in left_out}
    return replace(config, callbacks=kept)


@contextmanager
def _refuse_exit() -> Iterator[None]:
    """Turn a `sys.exit` in users' code into an error, because the run is not finished."""
    try:
        yield
    except SystemExit as error:
        said = f"the run was ended by {describe_error(error)}; let it return"
        raise UserCodeError(said) from error


@contextmanager
def _date_errors(trainer: Trainer) -> Iterator[None]:
    """Add the number of the step to an error in the data or in users' code."""
    try:
        yield
    except (DataError, UserCodeError) as error:
        trainer.comm.refuse_lost(error.__cause__)
        error.args = (f"after step {trainer.progress.global_step}: {error}",)
        raise


def _refuse_other_options(comm: Comm, text: str) -> None:
    """Refuse ranks whose options, YAML without secrets, differ from rank 0's."""
    first = comm.broadcast_object(text)
    trees = [] if first == text else [parse_stored(yaml, Path("options")) for yaml in (first, text)]
    differs = [
        f"{option}={ours}: rank {comm.rank} has it, and rank 0 has {theirs}"
        for option, (theirs, ours) in (changes(*trees) if trees else {}).items()
        if option not in _OF_A_RANK and "{}" not in (theirs, ours)  # Its entries are named.
    ]
    every = comm.broadcast_object(comm.gather_object(differs[:1]))
    for difference in itertools.chain.from_iterable(every):
        raise ConfigError(f"{difference}; start all ranks with the same options")


def _refuse_to_forget(config: Config) -> None:
    """Refuse a requeued job that would start again, because it runs the same command line."""
    if config.trainer.requeue and (config.run.resume != "auto" or not config.trainer.keep_last):
        raise ConfigError(
            "trainer.requeue=true: needs resume=auto, a fixed hydra.run.dir and trainer.keep_last "
            ">= 1, so that the job goes on from its checkpoint"
        )
