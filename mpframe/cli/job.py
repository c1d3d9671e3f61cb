"""The function that Hydra calls for each job, and the handling of a job that fails.

A job returns the monitored validation metric of the weights that were tested, so that a sweeper can
search for the best one.

    one run                    its error ends the program with one line
    a sweep in this process    one line, the jobs after it run, exit code 1 in the end
    another process            raised: the launcher hands it back, exit code 1 in the end
    a search (Optuna)          raised: the sweeper counts the trial as failed and goes on
"""

import logging
import math
import os
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import cast

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from mpframe.cli.program import current_folder_importable, without_secrets
from mpframe.config.composing import check_config
from mpframe.config.redaction import hide, secrets_of, values_of
from mpframe.config.schema import Config
from mpframe.config.sweep import holds_this_run, make_stop_error
from mpframe.core.errors import ConfigError, DivergedError, MpframeError, RunInterrupted
from mpframe.files.file_lock import turn_in
from mpframe.files.text import printable
from mpframe.tracking.summary import Status, Summary
from mpframe.training.parallel.launch import line_of
from mpframe.training.parallel.place import place

log = logging.getLogger(__name__)


class JobError(CompactHydraException):
    """A job that ended in an error, as Hydra's launchers and sweepers take it."""


class Jobs:
    """A runner of jobs that keeps the errors of jobs that failed in this process."""

    def __init__(self) -> None:
        self._home, self._sweep = os.getpid(), False
        self._failures: list[Exception] = []

    def __call__(self, composed: DictConfig) -> float | None:
        """Train one job, and return its monitored metric, if there is one."""
        hydra = cast(DictConfig, HydraConfig.get())
        self._sweep = hydra.mode is RunMode.MULTIRUN
        # If no job of submitit has these ranks, a configuration file asked for a sweep.
        if self._sweep and place().size > 1 and "SUBMITIT_EXECUTOR" not in os.environ:
            raise SystemExit(1) from sweep_of_ranks("hydra.mode=MULTIRUN")
        current_folder_importable(hydra.runtime.cwd)
        try:
            return _train(composed, hydra)
        except Exception as error:
            if isinstance(error, MpframeError):
                error.args = (hide(str(error), secrets_of(values_of(composed))),)
            self._fail(error, hydra)
            return None

    def end(self) -> None:
        """End the program as the jobs ended: with the only job's error, or exit code 1."""
        if self._failures and self._sweep:
            sys.exit(1)
        if self._failures:
            raise self._failures[0]

    def _fail(self, error: Exception, hydra: DictConfig) -> None:
        if not self._sweep:
            self._failures.append(error)
            return
        at_home, job = os.getpid() == self._home, f"job {hydra.job.num}: "
        if isinstance(error, RunInterrupted):  # The jobs that are left are not started either.
            if at_home:
                sys.exit(print_error(make_stop_error(error.received, Path(hydra.sweep.dir))))
            sys.exit(print_error(RunInterrupted(error.received), job))
        if hydra.runtime.choices["hydra/sweeper"] != "basic" or not at_home:
            raise JobError(f"{job}{error}") from error
        self._failures.append(error)
        if isinstance(error, MpframeError):
            print_error(error, job)
        else:
            traceback.print_exception(error)


def sweep_of_ranks(asked: str) -> ConfigError:
    """Refuse the sweep that was asked for, which each rank would run."""
    here = place()
    return ConfigError(
        f"{asked}: {here.starter} has started {here.size} processes for one run; start one "
        f"{here.starter} for each job of the sweep, or start one process, and let Slurm start "
        "those of each job: -m ... hydra/launcher=submitit_slurm "
        f"hydra.launcher.tasks_per_node={here.size}"
    )


def print_error(error: MpframeError, place: str = "") -> int:
    """Print an error on stderr in one line without secrets, and return its exit code."""
    line = line_of(error)
    if line is not None:
        print(f"mpframe: {printable(without_secrets(f'{place}{line}'))}", file=sys.stderr)
    return error.exit_code


def _train(composed: DictConfig, hydra: DictConfig) -> float | None:
    """Return the value for a sweeper, which takes no nan for a result."""
    config, folder = check_config(composed), Path(hydra.runtime.output_dir)
    swept = hydra.mode is RunMode.MULTIRUN
    # Two jobs of a sweep may be the same, and run at the same time. Rank 0 has the turn for all.
    with turn_in(folder) if swept and not place().rank else nullcontext():
        summary = _find_outcome(config, composed, folder) if swept else None
        if summary is None:
            from mpframe.run.process import prepare_process  # torch comes in here, and not before.
            from mpframe.run.run import Run

            prepare_process(config)
            summary = Run(config, composed, folder, hydra).train()
    value = summary.searched
    return None if value is None or math.isnan(value) else value


def _find_outcome(config: Config, composed: DictConfig, folder: Path) -> Summary | None:
    """Return how the job ended when the sweep ran before, or make it resume if it did not end."""
    if not holds_this_run(folder, composed, config.run.resume):
        return None
    with suppress(FileNotFoundError):  # There is none if it was killed.
        summary = Summary.read(folder)
        if summary.status is Status.DIVERGED:
            what = f"diverged when the sweep ran before, {summary.reason}"
            raise DivergedError(f"{what}; to run it again delete {folder}")
        if summary.status in (Status.FINISHED, Status.PRUNED):
            log.info("%s when the sweep ran before, in %s", summary.status, folder)
            return summary
    if config.run.resume == "none":
        config.run.resume = "auto"
    return None
