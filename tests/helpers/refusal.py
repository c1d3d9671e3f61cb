"""The words of a refusal."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[Exception], call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """The message of the `error` that the call raises, which is one line."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)
