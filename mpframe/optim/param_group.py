"""A group of parameters, as schedules and gradient clipping see it."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from mpframe.errors import CheckpointError, ConfigError


class ParamGroup(MutableMapping[str, Any]):
    """A wrapped optimizer's group, with the model's own `params` in the place of the masters."""

    def __init__(self, group: dict[str, Any], params: list[Tensor]) -> None:
        self._group = group
        self._params = params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        _refuse_params(key)
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        _refuse_params(key)
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def __repr__(self) -> str:
        return repr(dict(self))


def refuse_other_groups(saved: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raise CheckpointError if the groups of a saved state have other names, or another order.

    torch compares only their sizes, and would give one group the settings of another.
    """
    then, now = _names(saved.get("param_groups", ())), _names(groups)
    if then != now:
        raise CheckpointError(
            f"optimizer.groups: the checkpoint has {', '.join(then) or 'none'}, this run "
            f"{', '.join(now) or 'none'}; resume with the groups it was made with"
        )


def _names(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(group["name"]) for group in groups if "name" in group]


def _refuse_params(key: str) -> None:
    if key == "params":
        raise ConfigError(
            "optimizer.param_groups: params stay as they are; add some with add_param_group, or "
            "make a new optimizer"
        )
