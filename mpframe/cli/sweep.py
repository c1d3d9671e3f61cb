"""Keeps the table of a sweep, by a Hydra callback that conf/hydra/callbacks names.

It also keeps a sweep in one folder, even if `hydra.sweep.dir` contains the time.
"""

import atexit
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from mpframe.cli.job import print_error
from mpframe.config.overrides import word_of
from mpframe.config.redaction import as_yaml, secrets_of, values_of
from mpframe.config.sweep import make_stop_error
from mpframe.files.durable import write_atomically
from mpframe.files.text import say


class SweepTable(Callback):
    """The keeper of `sweep.md` and `sweep.csv`, which prints the table in the end."""

    _folder = Path()  # the sweep's, known once it starts

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Hydra composes each job again, and the folder may be named after the time or an option.
        with read_write(config.hydra):
            config.hydra.overrides.hydra.append(word_of("hydra.sweep.dir", config.hydra.sweep.dir))
        folder = Path(config.hydra.sweep.dir)
        self._folder = folder.absolute()
        # Hydra does not call on_multirun_end if a job failed, and the table is needed then as well.
        atexit.register(self._report)
        if config.hydra.runtime.choices["hydra/launcher"] != "basic":
            # The jobs run in other processes, and a signal ends this one with one line.
            def end(number: int, frame: FrameType | None) -> None:
                sys.exit(print_error(make_stop_error(signal.Signals(number), folder)))

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, end)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hide secrets that a shell put among the sweep's options, which Hydra has written."""
        path = Path(config.hydra.sweep.dir) / "multirun.yaml"
        if path.is_file():
            written = OmegaConf.load(path)
            shown = as_yaml(written, secrets_of(values_of(written)))
            if shown != path.read_text(encoding="utf-8"):
                write_atomically(path, shown)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if config.hydra.mode is RunMode.MULTIRUN:  # In the job's process, one of several perhaps.
            from mpframe.lab.report.sweep import write_table  # A single run needs none.

            write_table(Path(config.hydra.sweep.dir))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self._report)
        self._report()

    def _report(self) -> None:
        from mpframe.lab.report.sweep import as_text, write_table

        jobs = write_table(self._folder)
        if jobs:
            say(as_text(self._folder, jobs))
