"""What the commands take: a command line made ready for Hydra, or composed and checked here.

Training leaves composing to `hydra.main` (job_check.py then checks); the other commands, and tests,
compose here.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from mpframe.config.composition.composing import checked, composed, without_hydra
from mpframe.config.composition.flags import parsed_flags
from mpframe.config.composition.overrides import parsed, rewritten
from mpframe.config.composition.source import Source, hydra_over, source_of, take_source
from mpframe.config.output_folder import refuse_unwritable
from mpframe.config.schema import Config
from mpframe.config.sweep.values import axes
from mpframe.errors import ConfigError

__all__ = [
    "Job", "checked", "compose_named", "jobs", "prepare", "refuse_unwritable", "without_hydra"
]  # fmt: skip
_JOBS = 512


def prepare(arguments: list[str]) -> list[str]:
    """The arguments as Hydra takes them.

    Args:
        arguments: the command line without the program's name.

    Raises:
        ConfigError: a flag is none of Hydra's, or a word is not of the form option=value.
    """
    flags, words = parsed_flags(arguments)
    if flags.shell_completion:
        return arguments
    for word in words if flags.multirun else ():
        if word.startswith("hydra.run.dir="):
            raise ConfigError(f"{word}: has no meaning with -m; use hydra.sweep.dir")
    given = [argument for argument in arguments if argument not in words]
    place = source_of(flags, words).place
    if flags.config_path not in (None, place):
        given.append(f"--config-path={place}")  # Hydra would look beside its program's file.
    # Before the flags: of some the value may be left out, and the next word would be taken for it.
    return [*rewritten(words), *given]


@dataclass(frozen=True)
class Job:
    """A job that training would run.

    Attributes:
        typed: the words of the command line that are its own, as they were typed.
        overrides: the same as Hydra is given them.
        config: the checked configuration they make.
    """

    typed: list[str]
    overrides: list[str]
    config: Config


def jobs(arguments: list[str]) -> Iterator[Job]:
    """Each job that training would run.

    Args:
        arguments: the command line, as training takes it; of its flags only `-m` and those that
            name a source.

    Raises:
        ConfigError: an option or a value is not allowed.
    """
    multirun = not {"-m", "--multirun"}.isdisjoint(arguments)
    given = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    source, words = take_source(given, "give option=value, and -m for a sweep")
    for typed in _typed(words, multirun, source):
        overrides = rewritten(typed)
        with hydra_over(source):
            config = checked(composed(overrides, source.name))
        yield Job(typed, overrides, config)


def compose_named(given: list[str]) -> tuple[list[Override], DictConfig]:
    """What `option=value` words compose for one job.

    Args:
        given: the words, and flags that name a source.

    Raises:
        ConfigError: a word names no choice or option of this program, or is malformed.
    """
    source, typed = take_source(given)
    words = rewritten(typed)
    overrides = parsed(words)
    for override in overrides:
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: give one value; there is no sweep here")
    with hydra_over(source):
        return overrides, composed(words, source.name)


def _typed(given: list[str], multirun: bool, source: Source) -> list[list[str]]:
    """The words of each job, as they were typed."""
    if not multirun:
        return [given]
    swept = [[word] for word in given]
    with hydra_over(source):
        for place, word in enumerate(given):
            if not _is_rewritten(word):
                swept[place] = axes([word], name=source.name)[0]
    return [list(job) for job in itertools.islice(itertools.product(*swept), _JOBS)]


def _is_rewritten(word: str) -> bool:
    return rewritten([word]) != [word]
