"""The jobs of a sweep: the swept values, the jobs' names, the folders of earlier starts.

Hydra's sweepers make the jobs. All values are checked before the first job. A job and its folder
are named after the swept values, `dtype=mixed,seed=2`. The folder may already hold this run, or
another one, from an earlier start. A sweep that was stopped prints the command that continues it.
"""

import hashlib
import itertools
import math
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, read_write

from mpframe.config.check import flatten, refuse_bad_value
from mpframe.config.composing import choices_of, compose_words, refuse_unknown_choice
from mpframe.config.overrides import PRIMARY, parse_words, word_of
from mpframe.config.redaction import HIDDEN, as_yaml, hide, secrets_of, values_of
from mpframe.config.schema import WATCHING, only_watches
from mpframe.core.errors import ConfigError, MpframeError, RunInterrupted
from mpframe.files.stored_yaml import parse_stored, read_stored
from mpframe.files.text import few

_VALUES_CHECKED = 512
_MOST_JOBS = 100_000


def axes(
    words: Sequence[str], given: Sequence[str] = (), draws: bool = False, name: str = PRIMARY
) -> list[list[str]]:
    """Return for each word a list with one word per swept value; needs Hydra initialised."""
    overrides = parse_words(list(words))
    swept = [_words_of(override, [*given, *words], draws, name) for override in overrides]
    if not draws and math.prod(map(len, swept)) > _MOST_JOBS:  # Hydra would list them all first.
        several = " ".join(str(o.input_line) for o in overrides if o.is_sweep_override())
        raise ConfigError(f"{several}: make more than {_MOST_JOBS} jobs; give fewer values")
    return swept


def refuse_unfit_choices(swept: list[list[str]], given: Sequence[str], name: str = PRIMARY) -> None:
    """Refuse an option that not every choice of its group takes, as in
    `loss_scaling=Backoff,LogMax loss_scaling.growth_interval=5`.
    """
    first = [words[0] for words in swept]
    for place, words in enumerate(swept):
        start = f"++{words[0].partition('=')[0]}."
        # Without `++` Hydra refuses what a choice does not have.
        strict = [word.lstrip("+") if word.startswith(start) else word for word in first]
        for word in words if strict != first and len(words) > 1 else ():
            compose_words([*given, *strict[:place], word, *strict[place + 1 :]], name)


def _words_of(override: Override, words: list[str], draws: bool, name: str) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    group, text = override.key_or_group, override.input_line
    choices = choices_of(group, words, name)
    try:
        values = _values(override, draws)
    except (HydraException, ValueError) as error:
        raise ConfigError(f"{text}: {str(error).splitlines()[0]}; give other values") from None
    if not values:
        raise ConfigError(
            f"{text}: holds no value, so the sweep would have no job; give at least one"
        )
    jobs = [f"{override.get_key_element()}={value}" for value in values]
    for value, job in zip(values[:_VALUES_CHECKED], jobs, strict=False):
        if choices:
            refuse_unknown_choice(group, value, choices)
        else:
            refuse_bad_value(group, parse_words([job])[0].value())
    return jobs


def _values(override: Override, draws: bool) -> list[str]:
    """Return the values of a sweep over one option, or the ends of an interval."""
    value: Any = override.value()
    if isinstance(value, Glob):  # Hydra looks for its choices without hydra.searchpath.
        loader = GlobalHydra.instance().config_loader()
        return list(value.filter(loader.get_group_options(override.key_or_group)))
    if isinstance(value, IntervalSweep) and draws:
        return [str(value.start), str(value.end)]
    return list(itertools.islice(override.sweep_string_iterator(), _MOST_JOBS + 1))


_EXCLUDED = "hydra.job.config.override_dirname.exclude_keys"
_MOST = 200  # bytes: file systems allow 255, and files are named after the folder
_KEPT = 140  # bytes of a longer name
_UNFIT = re.compile(r"[^\w.\-=,+@\[\]]+")


def name_of(
    words: Sequence[str], shared: Iterable[str], number: object, secrets: Sequence[str]
) -> str:
    """Name a job after its words, without `shared` options and secrets."""
    left_out = set(shared)
    keys = [override.key_or_group for override in parse_words(list(words))]
    swept = [word.lstrip("+") for word, key in zip(words, keys, strict=True) if key not in left_out]
    given = ",".join(sorted(swept))
    shown = hide(given, secrets)
    if shown != given:
        shown = f"{shown.replace(HIDDEN, 'hidden')},job={number}"
    name = _UNFIT.sub("_", re.sub("['\"]", "", shown))
    if name == shown and len(name.encode()) <= _MOST:
        return name or str(number)
    # Two jobs never share a folder.
    cut = name.encode()[:_KEPT].decode(errors="ignore")
    return f"{cut}~{hashlib.sha256(shown.encode()).hexdigest()[:8]}"


def words_of(config: Any, kind: str) -> list[str]:
    """Return the words of the command line for Hydra (`hydra`) or for the jobs (`task`)."""
    overrides: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    return list(overrides[kind])


def leave_out(config: DictConfig, shared: Sequence[str]) -> None:
    """Leave more options out of the names of a sweep's jobs than the user does."""
    given = OmegaConf.select(config, _EXCLUDED) or []
    keys = ",".join(f"'{key}'" for key in dict.fromkeys([*given, *shared]))
    with read_write(config.hydra):
        config.hydra.overrides.hydra.append(f"{_EXCLUDED}=[{keys}]")


def _job_name(_root_: Any) -> str:
    words = words_of(_root_, "task")
    shared = OmegaConf.select(_root_, _EXCLUDED) or []
    secrets = secrets_of([*values_of(_root_), *words])
    return name_of(words, shared, _root_.hydra.job.num, secrets)


OmegaConf.register_new_resolver("job_name", _job_name, replace=True)


OPTIONS = "config_resolved.yaml"
"""The file in a run's folder that has the value of every option."""
ELSEWHERE = {"device", "dataset.root", "dataset.workers", "trainer.timeout"}
"""Options that depend on the machine and change none of a run's numbers."""
# These only watch the training, but the summary depends on them.
_DECIDING = {
    f"trainer.{name}" for name in ("eval_every", "monitor", "keep_best", "max_consecutive_skips")
}


def holds_this_run(folder: Path, composed: DictConfig, resume: str) -> bool:
    """Return whether a folder holds a run with the options of a composed configuration.

    ConfigError: it holds another run, and `resume` is none.
    """
    file = folder / OPTIONS
    try:
        stored = read_stored(file)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MpframeError(f"{file}: cannot be read ({error.strerror})") from None
    # As a run's folder holds them: resolved, without secrets.
    options = as_yaml(composed, secrets_of(values_of(composed)), resolve=True)
    aside = (WATCHING | ELSEWHERE) - _DECIDING
    other = [
        f"{path}={new} (was {old})"
        for path, (old, new) in changes(stored, parse_stored(options, file)).items()
        if path not in aside and not (path.startswith("callbacks.") and only_watches(path))
    ]
    if other and resume == "none":
        raise ConfigError(
            f"hydra.sweep.dir={folder.parent}: its {folder.name} is a run with other options, "
            f"{few(other)}; choose another folder, or add resume=auto to go on from its checkpoint"
        )
    return not other


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the options that differ, by dotted path: (old, new), as text."""
    old, new = (
        {path: "null" if value is None else str(value) for path, value in flatten(tree).items()}
        for tree in (then, now)
    )
    pairs = {path: (old.get(path, "null"), new.get(path, "null")) for path in old | new}
    return {path: pairs[path] for path in sorted(pairs) if pairs[path][0] != pairs[path][1]}


def make_stop_error(received: signal.Signals, folder: Path) -> RunInterrupted:
    """Make the error of a sweep that a signal stopped, with the command that continues it."""
    words = [word for word in sys.orig_argv if not word.startswith("hydra.sweep.dir=")]
    again = shlex.join([*words, word_of("hydra.sweep.dir", str(folder))])
    return RunInterrupted(received, f"continue the sweep with: {again}")
