"""What may be one thing or several by name, such as schedules: its states, saved and loaded."""

from collections.abc import Iterable, Mapping
from typing import Any

from mpframe.errors import CheckpointError, MpframeError
from mpframe.user_code import name_of, raised


def by_name(given: Any) -> dict[str, Any]:
    """One thing, several by name, or None, as a dict; a single one is named ""."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"": given}


def states_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each."""
    return {name: one.state_dict() for name, one in named.items()}


def load_states(named: Mapping[str, Any], states: Mapping[str, Any], option: str) -> None:
    """Load what `states_of` gave.

    Raises:
        CheckpointError: there was another number of them, or others, or one refuses its state.
    """
    if named and states and set(named) != set(states):
        raise CheckpointError(
            f"{option}: the checkpoint has {_names(states)}, this run {_names(named)}; resume with "
            "the optimizers it was made with"
        )
    for name in named.keys() & states.keys():
        try:
            named[name].load_state_dict(states[name])
        except MpframeError:
            raise
        except Exception as error:  # Whatever a user's class raises.
            raise CheckpointError(
                f"{option}: {name_of(named[name])} cannot continue the saved state: "
                f"{raised(error)}; resume with the class it was saved from"
            ) from error


def _names(given: Iterable[str]) -> str:
    return ", ".join(name or "a single one" for name in sorted(given))
