"""The options: their names and values, and how a command line becomes a checked `Config`.

Begin with schema.py, which lists every option with its default and range, and check.py, which
compares a composed configuration with it. Hydra does the composing, and these files surround it:

    overrides.py     the words of a command line       composing.py     one job, composed
    command_line.py  the two together, checked         sweep.py         the jobs of a sweep
    stored.py        a checkpoint's options            redaction.py     keeps secrets out
    planned.py       ${plan:...} and ${size:...}

This package imports only files/, core/errors.py and core/ranges.py, never torch, so that a mistake
is answered at once. Only config, run and cli know the options.
"""

from pathlib import Path

# In a clone mpframe/conf is a link to conf/, for `pkg://mpframe.conf`. An unpacked source archive
# has no link.
_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "conf", _PACKAGE.parent / "conf")
CONF = next(place for place in _PLACES if (place / "ops").is_dir()).resolve()
"""The shipped configuration: conf/ of a clone, mpframe/conf of the wheel."""
