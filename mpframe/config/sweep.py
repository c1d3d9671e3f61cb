"""The jobs of a sweep: the swept values, the jobs' names, the folders of earlier starts.

Hydra's sweepers make the jobs. The values are checked before the first job. A job is named by what
was swept, `dtype=mixed,seed=2`, and its folder has this name; the folder may already hold the same
run, or another one, from an earlier start. A sweep that was stopped prints the command that
continues it.
"""

import hashlib
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, read_write

from mpframe.config.check import flatten, refuse_bad_value
from mpframe.config.composing import choices_of, composed, paths, refuse_unknown_choice
from mpframe.config.overrides import PRIMARY, parsed, word_of
from mpframe.config.redaction import HIDDEN, as_yaml, hide, secrets_of, values_of
from mpframe.config.schema import only_watches, watching
from mpframe.core.errors import ConfigError, MpframeError, RunInterrupted, nearest
from mpframe.files import stored_yaml
from mpframe.files.stored_yaml import read_stored
from mpframe.files.text import printable

_VALUES_CHECKED = 512
_MOST_JOBS = 100_000


def axes(
    words: Sequence[str], given: Sequence[str] = (), draws: bool = False, name: str = PRIMARY
) -> list[list[str]]:
    """For each word, one word for each of the values it sweeps over; Hydra is initialised."""
    overrides = parsed(list(words))
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
    choices = choices_of(group, words, name)
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


_EXCLUDED = "hydra.job.config.override_dirname.exclude_keys"
_MOST = 200  # bytes; file systems allow 255, and files are named after the folder
_KEPT = 140  # bytes of a longer name
_UNFIT = re.compile(r"[^\w.\-=,+@\[\]]+")


def name_of(
    words: Sequence[str], shared: Iterable[str], number: object, secrets: Sequence[str]
) -> str:
    """The name of a job."""
    left_out = set(shared)
    keys = [override.key_or_group for override in parsed(list(words))]
    own = [word.lstrip("+") for word, key in zip(words, keys, strict=True) if key not in left_out]
    given = ",".join(sorted(own))
    shown = hide(given, secrets)
    if shown != given:
        shown = f"{shown.replace(HIDDEN, 'hidden')},job={number}"
    return _as_folder(shown) or str(number)


def leave_out(config: DictConfig, shared: Sequence[str]) -> None:
    """Leave options out of the names of a sweep's jobs, besides those that the user leaves out."""
    given = OmegaConf.select(config, _EXCLUDED) or []
    keys = ",".join(f"'{key}'" for key in dict.fromkeys([*given, *shared]))
    with read_write(config.hydra):
        config.hydra.overrides.hydra.append(f"{_EXCLUDED}=[{keys}]")


def _as_folder(text: str) -> str:
    """`text` as the name of one folder; another text gives another name."""
    name = _UNFIT.sub("_", re.sub("['\"]", "", text))
    if name == text and len(name.encode()) <= _MOST:
        return name
    cut = name.encode()[:_KEPT].decode(errors="ignore")
    return f"{cut}~{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _resolved(_root_: Any) -> str:
    """The name of the job whose configuration refers to it."""
    words: Any = OmegaConf.to_container(_root_.hydra.overrides.task, resolve=False)
    shared = OmegaConf.select(_root_, _EXCLUDED) or []
    secrets = secrets_of([*values_of(_root_), *words], os.environ)
    return name_of(words, shared, _root_.hydra.job.num, secrets)


OmegaConf.register_new_resolver("job_name", _resolved, replace=True)


OPTIONS = "config_resolved.yaml"
"""The file in a run's folder that has the value of every option."""
ELSEWHERE = {"device", "dataset.root", "dataset.workers", "trainer.timeout"}
"""Options that say where a run is, and none of its numbers; `auto` may be the same device."""
# These only watch the training, but the summary depends on them.
_DECIDING = {
    *("trainer.eval_every", "trainer.monitor", "trainer.keep_best"),
    "trainer.max_consecutive_skips",
}
_SHOWN = 3

Options = Mapping[str, Any]


def holds_this_run(folder: Path, options: str, resume: str) -> bool:
    """Whether a folder holds a run with these options."""
    path = folder / OPTIONS
    try:
        stored = read_stored(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MpframeError(f"{path}: cannot be read ({error.strerror})") from None
    other = _other_results(stored, stored_yaml.parsed(options, path))
    if other and resume == "none":
        more = "" if len(other) <= _SHOWN else f" and {len(other) - _SHOWN} more"
        raise ConfigError(
            f"hydra.sweep.dir={folder.parent}: its {folder.name} is a run with other options, "
            f"{', '.join(other[:_SHOWN])}{more}; choose another folder, or add resume=auto to go "
            "on from its checkpoint"
        )
    return not other


def resolved_text(composed: DictConfig) -> str:
    """Every option's value as YAML, without secrets, as a run's folder holds them."""
    secrets = secrets_of(values_of(composed), os.environ)
    return as_yaml(composed, secrets, resolve=True)


def changes(then: Options, now: Options) -> dict[str, tuple[str, str]]:
    """The options that differ, by dotted path: (old, new), as text."""
    old, new = flatten(then), flatten(now)
    paths = sorted(old.keys() | new.keys())
    pairs = {path: (_shown(old.get(path)), _shown(new.get(path))) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _other_results(then: Options, now: Options) -> list[str]:
    """The options that may give another result: `option=value (was value)` each."""
    aside = (watching() | ELSEWHERE) - _DECIDING
    return [
        f"{path}={new} (was {old})"
        for path, (old, new) in changes(then, now).items()
        if path not in aside and not (path.startswith("callbacks.") and only_watches(path))
    ]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


_FOLDER = "hydra.sweep.dir"


def stopped(received: signal.Signals, folder: Path) -> RunInterrupted:
    """What is said of a sweep that a signal stopped."""
    return RunInterrupted(received, f"continue the sweep with: {command_again(folder)}")


def say_on_signal(folder: Path) -> None:
    """Let a signal end this process with that line, while its jobs run in other processes."""

    def end(number: int, frame: FrameType | None) -> None:
        error = stopped(signal.Signals(number), folder)
        said = hide(str(error), secrets_of(sys.argv, os.environ))
        print(f"mpframe: {printable(said)}", file=sys.stderr)
        sys.exit(error.exit_code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def command_again(folder: Path, arguments: Sequence[str] = ()) -> str:
    """The command line to copy into a shell, in the folder where it was given before."""
    words = _as_typed([*arguments] or sys.orig_argv)
    words = [word for word in words if not word.startswith(f"{_FOLDER}=")]
    return shlex.join([*words, word_of(_FOLDER, str(folder))])


def _as_typed(words: list[str]) -> list[str]:
    """Without the Python that runs an installed program, which nobody types."""
    program = Path(words[1]) if len(words) > 1 else Path()
    if program.is_absolute() and shutil.which(program.name) == str(program):
        return [program.name, *words[2:]]
    return words
