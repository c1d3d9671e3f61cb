"""Where the shipped configuration lies: conf/ of a clone, mpframe/conf of the wheel."""

from pathlib import Path

# In a clone mpframe/conf is a link; messages name the folder itself.
CONF = (Path(__file__).parents[1] / "conf").resolve()
