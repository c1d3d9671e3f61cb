"""Gives Hydra the schema: the first entry of conf/config.yaml's defaults list, `schema`.

So Hydra itself knows the type and the default of every option of the closed sections. It refuses
any other option, on the command line and in every file, a user's own too. check.py checks ranges
and names the nearest option.
"""

import dataclasses
from typing import Any

from hydra.core.config_store import ConfigStore

from mpframe.config.schema import OPEN, SECTIONS, DatasetOptions, RunOptions

# What a user changes most comes first, and the long lists of ops last: so `--help` shows them.
_ORDER = (
    *("model", "dataset", "dtype", "loss_scaling", "optimizer", "scheduler", "trainer"),
    *("objective", "metrics", "callbacks", "numerics", "ops"),
)


def _schema() -> Any:
    """A dataclass of the whole configuration; an open section may hold anything."""
    closed = {
        name: (name, section, dataclasses.field(default_factory=section))
        for name, section in SECTIONS.items()
        if name not in OPEN
    }
    own = {"dataset": lambda: dataclasses.asdict(DatasetOptions())}
    free = {
        name: (name, Any, dataclasses.field(default_factory=own.get(name, lambda: None)))
        for name in OPEN
    }
    fields = free | closed
    # OmegaConf fills a typed mapping at the root with nothing; check.py holds it against its type.
    names = ("init_from_names", Any, dataclasses.field(default=None))
    ordered = [names, *(fields[name] for name in sorted(fields, key=_ORDER.index))]
    return dataclasses.make_dataclass("Options", ordered, bases=(RunOptions,))


ConfigStore.instance().store(name="schema", node=_schema(), provider="mpframe")
