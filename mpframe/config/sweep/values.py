"""The values of each option that is swept, and what is refused before the first job.

Hydra's sweepers make the jobs. Here the first job is composed and checked completely. Of the other
jobs each value is only compared with its option, which is fast however many jobs there are.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException

from mpframe.config.check import refuse_bad_value
from mpframe.config.composition.composing import (
    choices_of,
    composed,
    paths,
    refuse_unknown_choice,
)
from mpframe.config.composition.overrides import parsed
from mpframe.config.composition.source import PRIMARY
from mpframe.errors import ConfigError, nearest

_VALUES_CHECKED = 512
_MOST_JOBS = 100_000


def axes(
    words: Sequence[str], given: Sequence[str] = (), draws: bool = False, name: str = PRIMARY
) -> list[list[str]]:
    """For each word, one word for each of the values it sweeps over; Hydra is initialised.

    Args:
        words: as Hydra takes them, with sweeps among them.
        given: the words for Hydra itself, which may tell where groups lie.
        draws: whether the sweeper draws values from intervals; then an interval's ends are taken.
        name: of the primary configuration.

    Raises:
        ConfigError: a word sweeps over nothing, or over a choice or value that is not allowed; or
            there are too many jobs.
    """
    overrides = parsed(list(words))
    swept = [_words_of(override, [*given, *words], draws, name) for override in overrides]
    if not draws and math.prod(map(len, swept)) > _MOST_JOBS:  # Hydra would list them all first.
        several = " ".join(str(o.input_line) for o in overrides if o.is_sweep_override())
        raise ConfigError(f"{several}: make more than {_MOST_JOBS} jobs; give fewer values")
    return swept


def first_job(swept: list[list[str]]) -> list[str]:
    """The words of a sweep's first job."""
    return [words[0] for words in swept]


def refuse_unfit_choices(swept: list[list[str]], given: Sequence[str], name: str = PRIMARY) -> None:
    """Refuse an option that not every choice of its group takes, as in
    `loss_scaling=Backoff,LogMax loss_scaling.growth_interval=5`.

    Args:
        swept: the axes of the sweep.
        given: the words that each job has besides, for Hydra itself.
        name: of the primary configuration.
    """
    first = first_job(swept)
    for place, words in enumerate(swept):
        group = words[0].partition("=")[0]
        own = [word for word in first if word.startswith(f"++{group}.")]
        for word in words if own and len(words) > 1 else ():
            job = [*first[:place], word, *first[place + 1 :]]
            known = paths(composed([*given, *(w for w in job if w not in own)], name))
            for key in (word.lstrip("+").partition("=")[0] for word in own):
                if key not in known:
                    hint = nearest(key, known)
                    raise ConfigError(f"{key}: no such option of {word}; {hint}".rstrip("; "))


def _words_of(override: Override, words: list[str], draws: bool, name: str) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    group = override.key_or_group
    choices = choices_of(group, words, name) if "." not in group else []
    values = _values(override, draws, choices)
    if not values:
        raise ConfigError(
            f"{override.input_line}: holds no value, so the sweep would have no job; give at "
            "least one"
        )
    jobs = [f"{override.get_key_element()}={value}" for value in values]
    for value, job in zip(values[:_VALUES_CHECKED], jobs, strict=False):
        if choices:
            refuse_unknown_choice(group, value, choices)
        else:
            refuse_bad_value(group, parsed([job])[0].value())
    return jobs


def _values(override: Override, draws: bool, choices: list[str]) -> list[str]:
    """The values of a sweep over one option; of an interval its ends."""
    text = override.input_line
    value: Any = override.value()
    if isinstance(value, Glob):
        matching = value.filter(choices)
        if not matching:
            known = ", ".join(choices) or "none: glob() is for groups"
            raise ConfigError(f"{text}: matches no choice; there are {known}")
        return list(matching)
    if isinstance(value, IntervalSweep):
        if not draws:
            raise ConfigError(
                f"{text}: needs a sweeper that draws values, as hydra/sweeper=optuna; without one "
                "give a list, range() or choice()"
            )
        return [str(value.start), str(value.end)]
    try:
        return list(itertools.islice(override.sweep_string_iterator(), _MOST_JOBS + 1))
    except (HydraException, ValueError) as error:
        raise ConfigError(f"{text}: {str(error).splitlines()[0]}; give other values") from None
