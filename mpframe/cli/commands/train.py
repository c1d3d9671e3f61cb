"""Train a model as a composed configuration says.

Usage: mpframe train [GROUP=CHOICE] [option=value] ... [flags of Hydra]

    mpframe train dtype=mixed loss_scaling=Backoff
    mpframe train -m dtype=fp32,mixed,amp loss_scaling=Backoff,LogMax seed=1,2,3
    mpframe train --config-dir conf experiment=mine

`mpframe train --help` lists the groups, and says how to see all options.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from tempfile import gettempdir

import hydra

from mpframe.cli.job import JobError, Jobs, print_error, sweep_of_ranks
from mpframe.cli.program import current_folder_importable
from mpframe.config import CONF
from mpframe.config.command_line import prepare
from mpframe.config.composing import compose_typed, refusal_of
from mpframe.config.overrides import PRIMARY, own_folder_first, parse_flags, source_of, word_of
from mpframe.config.redaction import hide, secrets_of, values_of
from mpframe.core.errors import MpframeError
from mpframe.files.text import say, unreachable_in_one_line
from mpframe.training.parallel.place import place, separate

_FULL_ERROR = "HYDRA_FULL_ERROR"


def main() -> None:
    """Train. The exit code is 1 after an error, 128 + its number after a signal."""
    current_folder_importable()
    full = os.environ.get(_FULL_ERROR) == "1"
    try:
        with unreachable_in_one_line():
            _train()
    except MpframeError as error:
        if full:
            raise
        sys.exit(print_error(error))
    except KeyboardInterrupt:  # Before there was a run that could be saved.
        sys.exit(130)


def _train() -> None:
    """Run the jobs by Hydra, whose errors, and the only job's, become an MpframeError."""
    arguments = sys.argv[1:]
    sys.argv[1:] = prepare(of_this_rank(arguments))
    flags, words = parse_flags(arguments)
    source = source_of(flags)
    only_prints = flags.cfg or flags.info or flags.help or flags.hydra_help
    shows = flags.cfg or flags.resolve  # It would show the configuration's secrets.
    secrets = secrets_of(values_of(compose_typed(words, source))) if shows else []
    shown = _printing(secrets) if only_prints else nullcontext()
    jobs = Jobs()
    try:
        with _raise_errors(), shown, own_folder_first(source):
            hydra.main(config_path=str(CONF), config_name=PRIMARY, version_base="1.3")(jobs)()
    except SystemExit as ended:
        if isinstance(ended.__cause__, MpframeError):  # From the callback that checks the job.
            raise ended.__cause__ from None
        raise
    except JobError as error:
        raise MpframeError(str(error)) from error
    except Exception as error:  # From Hydra, OmegaConf, a sweeper or a launcher.
        raise refusal_of(error, flags, words) from error
    jobs.end()


def of_this_rank(arguments: list[str]) -> list[str]:
    """Return the arguments of one of several ranks: only rank 0 makes the run's folder."""
    if place().size == 1:
        return arguments
    flags, words = parse_flags(arguments)
    if flags.multirun:
        raise sweep_of_ranks("-m")
    separate(compose_typed(words, source_of(flags)).trainer.parallel)
    return arguments if place().rank == 0 else [*arguments, word_of("hydra.run.dir", gettempdir())]


@contextmanager
def _printing(secrets: list[str]) -> Iterator[None]:
    """Context manager that prints the output of its block with `***` for each secret."""
    try:
        with redirect_stdout(StringIO()) as printed:
            yield
    finally:
        say(hide(printed.getvalue(), secrets), end="")


@contextmanager
def _raise_errors() -> Iterator[None]:
    """Context manager that makes Hydra raise its errors, which it would print."""
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FULL_ERROR)
        os.environ.update({} if before is None else {_FULL_ERROR: before})
