"""Which parameter belongs to which of several optimizers, or to which group of one.

A parameter belongs to the first selection that takes it. With several optimizers one of them must.
Parameters that no group takes are in the group `default`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from mpframe.core.errors import ConfigError, nearest

Selected = dict[str, list[nn.Parameter]]


@dataclass(frozen=True)
class Selection:
    """Which parameters an optimizer or a group takes."""

    parameters: Sequence[str] = ("*",)  # patterns for whole parameter names, e.g. `generator.*`
    without: Sequence[str] = ()  # patterns for names left to others
    ndim: int | None = None  # only tensors with so many dimensions, or None

    def takes(self, name: str, parameter: nn.Parameter) -> bool:
        """Return whether it selects a parameter."""
        return (
            any(fnmatchcase(name, pattern) for pattern in self.parameters)
            and not any(fnmatchcase(name, pattern) for pattern in self.without)
            and self.ndim in (None, parameter.ndim)
        )


def divide_parameters(model: nn.Module, selections: Mapping[str, Selection]) -> Selected:
    """Return each optimizer's trainable parameters. ConfigError if anything has no counterpart."""
    parts, rest = _select("optimizer.parts", model, selections)
    if rest:
        raise ConfigError(
            f"optimizer.parts: none of {', '.join(selections)} takes {next(iter(rest))}; add a "
            'last part with parameters=["*"]'
        )
    return parts


def group_parameters(model: nn.Module, selections: Mapping[str, Selection]) -> Selected:
    """Return each group's trainable parameters, first `default`. ConfigError for an idle group."""
    names = list(dict(model.named_parameters()))
    for group, selection in selections.items():
        option = f"optimizer.groups.{group}.parameters"
        refuse_idle(option, "parameter", selection.parameters, names)
    groups, rest = _select("optimizer.groups", model, selections)
    return {"default": list(rest.values()), **groups} if rest else groups


def _select(
    option: str, model: nn.Module, selections: Mapping[str, Selection]
) -> tuple[Selected, dict[str, nn.Parameter]]:
    """Return what each selection takes, and by name what none takes. ConfigError: one is empty."""
    named = dict(model.named_parameters())
    rest = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    taken: Selected = {}
    for part, selection in selections.items():
        names = [name for name, parameter in rest.items() if selection.takes(name, parameter)]
        taken[part] = [rest.pop(name) for name in names]
        if not names:
            patterns = list(selection.parameters)
            raise ConfigError(
                f"{option}.{part}.parameters={patterns}: no parameter is left for it; "
                f"{hint(patterns[0] if patterns else '', list(named))}"
            )
    return taken, rest


def refuse_idle(option: str, kind: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that matches none of the names of this kind."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = [name for name in names if name]
            raise ConfigError(f"{option}=[{pattern}]: matches no {kind}; {hint(pattern, known)}")


def hint(pattern: str, names: Sequence[str]) -> str:
    """Return names near a pattern that matches none, or the first ones."""
    return nearest(pattern, names) or f"the names are {', '.join(names[:4])}, ..."
