"""The options: which there are, what they may be, how a command line becomes a checked `Config`.

Begin with schema.py, which lists every option with its default and range, and check.py, which
compares a composed configuration with it. Hydra composes; the other files prepare and check:

    store.py         gives Hydra the schema            flags.py         Hydra's flags
    overrides.py     the words of a command line       composing.py     one job, or why not
    sweep/           the jobs of a sweep               job_check.py     checks before a job starts
    command_line.py  what the commands use             stored.py        a checkpoint's options
    source.py        where Hydra composes from         trust.py         which classes may be built
    redaction.py     keeps secrets out                 options_page.py  writes docs/options.md

This package imports only files/ and errors.py, and never torch, so that a mistake is answered at
once. Only config, build, run and cli know the options.
"""
