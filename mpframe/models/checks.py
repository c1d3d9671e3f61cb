"""Refuses sizes that no network can have before a layer fails on them; errors name the option."""

from mpframe.errors import ConfigError


def require_sizes(**sizes: int) -> None:
    """Check that each is a whole number >= 1.

    Raises:
        ConfigError: names the first that is not, as `model.<name>`.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"model.{name}={size}: must be a whole number >= 1")


def require_dropout(dropout: float, name: str = "dropout") -> None:
    """Check that the option `model.<name>` is a fraction, 0 <= dropout < 1.

    Raises:
        ConfigError: it is not.
    """
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"model.{name}={dropout}: must be >= 0 and < 1")
