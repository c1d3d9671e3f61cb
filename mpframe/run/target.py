"""Makes the object that a `_target_` names, or says in one line why it cannot."""

import inspect
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from mpframe.core.errors import ConfigError, MpframeError, UserCodeError, first_line, nearest
from mpframe.core.user_code import describe_error

T = TypeVar("T")
_NOT_A_TYPE = {"class", "None", "NoneType", "Optional", "Union", "typing"}
_NUMBERS = {"int", "float", "torch", "Tensor"}


def make(section: str, node: dict[str, Any], *arguments: Any) -> Any:
    """Call an open section's `_target_` with its options.

    ConfigError: there is no such target, or it does not take these options.
    """
    target = node["_target_"]
    _check_arguments(section, node)
    try:
        return instantiate(node, _partial_=True, _convert_="all")(*arguments)
    except MpframeError:
        raise
    except InstantiationException as error:
        if isinstance(error.__cause__, MpframeError):
            raise error.__cause__ from None
        raise ConfigError(f"{section}: {str(error).splitlines()[0]}") from error
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        line = f"{section}: {target} refused its options: {first_line(error)}"
        raise ConfigError(line) from error
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{section}: {target} raised {describe_error(error)}") from error


def make_a(kind: type[T], section: str, node: dict[str, Any], *arguments: Any) -> T:
    """Make an object as `make` does, and refuse one that is not a `kind`."""
    made = make(section, node, *arguments)
    if not isinstance(made, kind):
        raise ConfigError(
            f"{section}._target_={node['_target_']}: must return an object of class "
            f"{kind.__name__}, got {type(made).__name__}"
        )
    return made


def require_methods(option: str, made: Any, methods: Sequence[str], page: str) -> None:
    """Refuse an object that lacks one of these methods, naming the page of docs."""
    missing = [name for name in methods if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(f"{option}: has no {' and no '.join(missing)}; see {page}")


def options_of(section: str, node: dict[str, Any]) -> dict[str, Any]:
    """Return an open section's options, nested targets made, for a target that is not called."""
    _check_arguments(section, node)
    return dict(make(section, {**node, "_target_": "builtins.dict"}))


def parameters_of(section: str, target: str) -> Mapping[str, inspect.Parameter] | None:
    """Return what a target takes, or None for a C function, which does not tell."""
    try:
        return inspect.signature(find_target(section, target)).parameters
    except ValueError:
        return None


def _check_arguments(section: str, node: Mapping[str, Any], *, nested: bool = False) -> None:
    """Refuse arguments that do not fit the signature of a node's target.

    A nested node may have other names, because some classes take more than their signature says.
    """
    parameters = parameters_of(section, node["_target_"])
    if parameters is None:
        return
    for name, value in node.items():
        path = f"{section}.{name}"
        if str(name).startswith("_"):
            continue
        if name in parameters:
            _check_truth(path, value, parameters[name])
        elif not nested and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            others = f"it takes {', '.join(parameters)}; leave it out with ~{path}"
            hint = nearest(str(name), parameters) or others
            raise ConfigError(f"{path}={value}: {node['_target_']} takes no such argument; {hint}")
        if node.get("_recursive_") is not False:
            _check_nested(path, value)


def _check_nested(path: str, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_nested(path, item)
    elif isinstance(value, dict) and isinstance(value.get("_target_"), str):
        _check_arguments(path, value, nested=True)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_nested(f"{path}.{key}", item)


def _check_truth(path: str, value: Any, parameter: inspect.Parameter) -> None:
    """Refuse a word for a bool, and a bool for a number: Python takes any word for true."""
    kind = parameter.annotation
    known = str(type(parameter.default) if kind is parameter.empty else kind)
    kinds = set(re.findall(r"\w+", known)) - _NOT_A_TYPE
    if isinstance(value, bool) and kinds and kinds <= _NUMBERS:
        raise ConfigError(f"{path}={str(value).lower()}: must be a number")
    if kinds == {"bool"} and not isinstance(value, bool | None):
        raise ConfigError(f"{path}={value}: must be true or false")


def find_target(section: str, target: str) -> Any:
    """Return the class or function that a `_target_` names."""
    logger = logging.getLogger(get_object.__module__)
    logger.disabled = True  # It would log an error that becomes one line here.
    try:
        named = get_object(target)
    except (Exception, SystemExit) as error:  # Importing the user's module may raise anything.
        said = _explain(target, error.__cause__ or error)
        raise ConfigError(f"{section}._target_={target}: {said}") from error
    finally:
        logger.disabled = False
    if not callable(named):
        raise ConfigError(
            f"{section}._target_={target}: is a {type(named).__name__}; name a class or function, "
            f"as in {target}.Name"
        )
    return named


def _explain(target: str, error: BaseException) -> str:
    """Say why a `_target_` was not found: its module is not there, or raised an error."""
    missing = str(error.name) if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{target}.".startswith(f"{missing}."):
        return describe_error(error)
    owner, _, name = missing.rpartition(".")
    if owner:
        return f"there is no {missing}{nearest(name, vars(sys.modules[owner]), before='; ')}"
    return f"there is no {missing}; install it, or put {missing}.py into the current folder"
