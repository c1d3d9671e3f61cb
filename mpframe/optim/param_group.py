"""A group of parameters, as those see it who set its learning rate or clip its gradients."""

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor

from mpframe.errors import ConfigError


class ParamGroup(MutableMapping[str, Any]):
    """A wrapped optimizer's group: `params` are the model's own, all else is the group's, live.

    Args:
        group: the wrapped optimizer's, over masters.
        params: the parameters that the masters are of, in the same order.
    """

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


def _refuse_params(key: str) -> None:
    if key == "params":
        raise ConfigError(
            "optimizer.param_groups: params stay as they are; add some with add_param_group, or "
            "make a new optimizer"
        )
