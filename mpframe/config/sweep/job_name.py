"""Names a job of a sweep by what was swept: `dtype=mixed,seed=2`.

The name is the job's folder inside the sweep's, and the run's name in TensorBoard. In conf/ it is
`hydra.sweep.subdir: ${job_name:}`. An option that every job has alike is not in the name: before
the first job `leave_out` adds it to Hydra's own `hydra.job.config.override_dirname.exclude_keys`.

    model.hidden=[8,8] seed=2   ->  model.hidden=[8,8],seed=2     in the alphabet's order
    model=nets/wide             ->  model=nets_wide~f6d16d22      a name has no `/`; a digest
    200 letters and more        ->  the first 140, ~, a digest    tells two such names apart
    a secret                    ->  model.token=hidden,job=3      the number keeps two of them apart
    nothing is swept            ->  Hydra's job number

So two jobs have one name only if they were given the same values, in whatever order.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, read_write

from mpframe.config.composition.overrides import parsed
from mpframe.config.redaction import HIDDEN, hide, secrets_of, values_of

_EXCLUDED = "hydra.job.config.override_dirname.exclude_keys"
_MOST = 200  # bytes; file systems allow 255, and files are named after the folder
_KEPT = 140  # bytes of a longer name
_UNFIT = re.compile(r"[^\w.\-=,+@\[\]]+")


def name_of(
    words: Sequence[str], shared: Iterable[str], number: object, secrets: Sequence[str]
) -> str:
    """The name of a job.

    Args:
        words: what the command line says for this job, one value for each option.
        shared: the options that are left out.
        number: Hydra's job number.
        secrets: values that are hidden.
    """
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
