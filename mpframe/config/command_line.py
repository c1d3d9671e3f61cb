"""Turns the words of a command line into a checked job, or into one line that says what is wrong.

A command line is made ready for Hydra, or composed and checked here. `JobCheck`, a callback of
Hydra that conf/ names, checks what Hydra has composed before anything starts.
"""

import copy
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from mpframe.config.check import refuse_empty, refuse_missing
from mpframe.config.composing import (
    check_config,
    compose_typed,
    compose_words,
    refuse_bad_override,
    without_hydra,
)
from mpframe.config.overrides import (
    PRIMARY,
    hydra_over,
    parse_flags,
    parse_words,
    rewrite,
    source_of,
    take_source,
)
from mpframe.config.redaction import SECRET_NAME, hide, secrets_of
from mpframe.config.schema import Config
from mpframe.config.sweep import axes, holds_this_run, leave_out, refuse_unfit_choices, words_of
from mpframe.core.errors import ConfigError, MpframeError
from mpframe.files.durable import refuse_unwritable
from mpframe.files.text import unreachable_in_one_line


def prepare(arguments: list[str]) -> list[str]:
    """Return the arguments as Hydra takes them."""
    flags, words = parse_flags(arguments)
    if flags.shell_completion:
        return arguments
    given = [argument for argument in arguments if argument not in words]
    place = source_of(flags).place
    if flags.config_path not in (None, place):
        given.append(f"--config-path={place}")  # Hydra would look beside its program's file.
    # Words go first: a flag whose value was left out would take the next word for it.
    return [*rewrite(words), *given]


def jobs(arguments: list[str]) -> Iterator[tuple[list[str], Config]]:
    """Compose and check each job of a command line, of which `-m` makes several.

    Yields the words of a job as they are typed, and its configuration.
    """
    given = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    source, words = take_source(given)
    values = [[word] for word in words]
    if given != arguments:
        with hydra_over(source):
            for place, word in enumerate(words):
                if rewrite([word]) == [word]:
                    values[place] = axes([word], name=source.name)[0]
    for typed in map(list, itertools.product(*values)):
        yield typed, check_config(compose_typed(typed, source))


def compose_named(given: list[str]) -> tuple[list[Override], DictConfig]:
    """Compose the `option=value` words of one job: Hydra's overrides, and the configuration."""
    source, words = take_source(given)
    overrides = parse_words(rewrite(words))
    for override in overrides:
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: give one value; there is no sweep here")
    return overrides, compose_typed(words, source)


class JobCheck(Callback):
    """A callback of Hydra that refuses a run, or a whole sweep, before it starts."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with _exit_on_error():
            _refuse_words(config, "hydra.sweep.", "without -m; add -m, or use hydra.run.dir")
            for override in parse_words(words_of(config, "task")):
                refuse_bad_override(override)
            _check(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with _exit_on_error():
            _refuse_words(config, "hydra.run.dir=", "with -m; use hydra.sweep.dir")
            _check_sweep(config, str(kwargs.get("config_name") or PRIMARY))
        _adapt_sweeper(config)


@contextmanager
def _exit_on_error() -> Iterator[None]:
    try:
        with unreachable_in_one_line():
            yield
    except MpframeError as error:
        raise SystemExit(error.exit_code) from error


def _refuse_words(config: DictConfig, start: str, reason: str) -> None:
    """Refuse the words for Hydra that do nothing in this mode."""
    for word in words_of(config, "hydra"):
        if word.startswith(start):
            raise ConfigError(f"{word}: does nothing {reason}")


def _check_sweep(config: DictConfig, name: str) -> None:
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}  # a file's, for the sweeper
    words = [*(f"{key}={value}" for key, value in params.items()), *words_of(config, "task")]
    leave_out(config, [o.key_or_group for o in parse_words(words) if not o.is_sweep_override()])
    given = words_of(config, "hydra")
    swept = axes(words, given, draws=not _is_basic(config, "sweeper"), name=name)
    first = compose_words([*given, *(words[0] for words in swept)], name)
    _check(first, "hydra.sweep.dir")
    refuse_unfit_choices(swept, given, name)


def _check(config: DictConfig, option: str) -> None:
    """Check a composed job, whose options may refer to Hydra's, as in ${hydra:job.num}."""
    job = copy.deepcopy(config)
    before = HydraConfig.instance().cfg
    try:
        folder = _folder(job, option)
        with read_write(job.hydra), open_dict(job.hydra):
            job.hydra.job.num, job.hydra.job.id = 0, "0"
            job.hydra.runtime.output_dir = str(folder.absolute())
        HydraConfig.instance().set_config(job)
        resume = check_config(job).run.resume
        refuse_unwritable(option, folder)
        if option == "hydra.run.dir" and not job.hydra.job.chdir:  # Here, and in this process.
            refuse_missing(resume)
        if option == "hydra.sweep.dir":
            file = folder / "multirun.yaml"
            # Hydra would write through a link, and wait for a FIFO.
            if file.is_symlink() or (file.exists() and not file.is_file()):
                raise ConfigError(
                    f"hydra.sweep.dir={folder}: its {file.name} is not a regular file; delete it, "
                    "or choose another folder"
                )
            place = folder / _folder(job, "hydra.sweep.subdir")
            holds_this_run(place, without_hydra(job), resume)
    finally:
        HydraConfig.instance().cfg = before


def _folder(config: DictConfig, option: str) -> Path:
    try:
        folder = str(OmegaConf.select(config, option) or "").strip()
    except OmegaConfBaseException as error:
        raise ConfigError(f"{option}: {str(error).splitlines()[0]}; set {option}=FOLDER") from None
    refuse_empty(option, folder)
    named = {name: value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    if hide(folder, secrets_of((), named)) != folder:
        raise ConfigError(
            f"{option}={folder}: holds a secret of the environment, and everybody sees a folder's "
            "name; choose another"
        )
    return Path(folder)


def _is_basic(config: DictConfig, kind: str) -> bool:
    return bool(config.hydra.runtime.choices.get(f"hydra/{kind}") == "basic")


def _adapt_sweeper(config: DictConfig) -> None:
    """Make Hydra compose each job just before it runs, and go on with a search if a trial fails.

    Optuna's sweeper stops at the first failure unless `max_failure_rate` is given.
    """
    sweeper = config.hydra.sweeper
    given = any("max_failure_rate" in word for word in words_of(config, "hydra"))
    with read_write(config.hydra):
        if "max_failure_rate" in sweeper and not given:
            sweeper.max_failure_rate = 1.0
        if _is_basic(config, "sweeper") and _is_basic(config, "launcher"):
            sweeper.max_batch_size = sweeper.max_batch_size or 1
