"""Makes the object that a `_target_` names, or says in one line why it cannot."""

import inspect
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from mpframe.errors import ConfigError, MpframeError, UserCodeError, first_line, nearest
from mpframe.user_code import raised


def make(section: str, node: dict[str, Any], *arguments: Any) -> Any:
    """Call an open section's `_target_` with its options.

    Raises:
        ConfigError: there is no such target, or it does not take these options.
    """
    target = node["_target_"]
    _refuse_unknown_arguments(section, target, node)
    try:
        return instantiate(node, _partial_=True, _convert_="all")(*arguments)
    except MpframeError:
        raise
    except InstantiationException as error:
        if isinstance(error.__cause__, MpframeError):
            raise error.__cause__ from None
        raise ConfigError(f"{section}: {str(error).splitlines()[0]}") from error
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        raise ConfigError(
            f"{section}: {target} refused its options: {first_line(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{section}: {target} raised {raised(error)}") from error


def options_of(section: str, node: dict[str, Any]) -> dict[str, Any]:
    """An open section's options, those with a `_target_` made, for a target that is not called.

    Raises:
        ConfigError: the target does not take these options, or one cannot be made.
    """
    _refuse_unknown_arguments(section, node["_target_"], node)
    return dict(make(section, {**node, "_target_": "builtins.dict"}))


def _refuse_unknown_arguments(section: str, target: str, node: dict[str, Any]) -> None:
    try:
        parameters = inspect.signature(found(section, target)).parameters
    except ValueError:
        return  # A C function does not tell its parameters.
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in node:
        if name not in parameters and not str(name).startswith("_"):
            hint = nearest(str(name), parameters)
            raise ConfigError(
                f"{section}.{name}={node[name]}: {target} takes no such argument; "
                f"{hint or 'it takes ' + ', '.join(parameters)}"
            )


def found(section: str, target: str) -> Any:
    """The class or function that a `_target_` names.

    Raises:
        ConfigError: there is none, or it is something else, as a module is.
    """
    try:
        named = get_object(target)
    except (Exception, SystemExit) as error:  # Importing the user's module may raise anything.
        said = raised(error) if isinstance(error, SystemExit) else first_line(error)
        raise ConfigError(f"{section}._target_={target}: {said}") from error
    if not callable(named):
        raise ConfigError(
            f"{section}._target_={target}: is a {type(named).__name__}; name a class or function, "
            f"as in {target}.Name"
        )
    return named
