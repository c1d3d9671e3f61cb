"""The options: their names and values, and how a command line becomes a checked `Config`.

Begin with schema.py, which lists every option with its default and range, and check.py, which
compares a composed configuration with it. Hydra does the composing, and these files surround it:

    overrides.py     the words of a command line       composing.py     one job, composed
    command_line.py  the two together, checked         sweep.py         the jobs of a sweep
    stored.py        a checkpoint's options            moved.py         old names of a `_target_`
    planned.py       ${plan:...} and ${size:...}       redaction.py     keeps secrets out
    locations.py     where conf/ is

This package imports only files/, core/errors.py and core/ranges.py, never torch, so that a mistake
is answered at once. Only config, run and cli know the options.
"""
