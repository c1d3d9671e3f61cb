"""Which of several optimizers moves which parameter.

Parts are asked in their order; a parameter belongs to the first that selects it. So the last one
may simply take the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from mpframe.errors import ConfigError, nearest


@dataclass(frozen=True)
class Selection:
    """What a part may take.

    Attributes:
        parameters: patterns for whole parameter names, e.g. `generator.*`.
        without: patterns for names left to other parts.
        ndim: only tensors with so many dimensions; None: any.
    """

    parameters: Sequence[str] = ("*",)
    without: Sequence[str] = ()
    ndim: int | None = None

    def takes(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether it selects a parameter."""
        return (
            any(fnmatchcase(name, pattern) for pattern in self.parameters)
            and not any(fnmatchcase(name, pattern) for pattern in self.without)
            and self.ndim in (None, parameter.ndim)
        )


def divided(model: nn.Module, selections: Mapping[str, Selection]) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters of each part, by its name.

    Raises:
        ConfigError: a parameter is selected by no part, or a part gets none.
    """
    parts: dict[str, list[nn.Parameter]] = {name: [] for name in selections}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        takers = (part for part, own in selections.items() if own.takes(name, parameter))
        part = next(takers, None)
        if part is None:
            raise ConfigError(
                f"optimizer.parts: none of {', '.join(selections)} takes {name}; add a last part "
                'with parameters=["*"]'
            )
        parts[part].append(parameter)
    for part, own in parts.items():
        if not own:
            raise _empty(part, selections[part], model)
    return parts


def _empty(part: str, selection: Selection, model: nn.Module) -> ConfigError:
    names = [name for name, _ in model.named_parameters()]
    hint = nearest(selection.parameters[0], names) if selection.parameters else ""
    return ConfigError(
        f"optimizer.parts.{part}.parameters={list(selection.parameters)}: no parameter is left for "
        f"it; {hint or 'the names are ' + ', '.join(names[:4]) + ', ...'}"
    )
