"""Where the shipped configuration is: conf/ of a clone, mpframe/conf of the wheel.

In a clone mpframe/conf is a link to conf/, for `pkg://mpframe.conf`. An unpacked source archive has
no link.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "conf", _PACKAGE.parent / "conf")
CONF = next(place for place in _PLACES if (place / "ops").is_dir()).resolve()
