"""Whether a job's folder already holds its run, or another one, from an earlier start of the sweep.

The run is the job's own if it was made with the same options. Options that only watch a run may
differ, and so may where it ran and where its data lay: they change nothing in its results.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from mpframe.config.check import flatten
from mpframe.config.redaction import as_yaml, secrets_of, values_of
from mpframe.config.schema import only_watches, watching
from mpframe.errors import ConfigError, MpframeError
from mpframe.files.stored_yaml import parsed, read_stored

OPTIONS = "config_resolved.yaml"
"""The file in a run's folder that has the value of every option."""
ELSEWHERE = {"device", "dataset.root", "dataset.workers", "dataset.worker_timeout"}
"""Options that say where a run is, and none of its numbers; `auto` may be the same device."""
# These only watch the training, but the summary depends on them.
_DECIDING = {
    *("trainer.eval_every", "trainer.monitor", "trainer.keep_best"),
    "trainer.max_consecutive_skips",
}
_SHOWN = 3

Options = Mapping[str, Any]


def holds_this_run(folder: Path, options: str, resume: str) -> bool:
    """Whether a folder holds a run with these options.

    Args:
        folder: the job's.
        options: the job's resolved options as YAML, without secrets.
        resume: the job's option; anything but `none` allows a run with other options.

    Raises:
        ConfigError: it holds a run with other options, and `resume` is `none`.
        MpframeError: its options cannot be read.
    """
    path = folder / OPTIONS
    try:
        stored = read_stored(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MpframeError(f"{path}: cannot be read ({error.strerror})") from None
    other = _other_results(stored, parsed(options, path))
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
