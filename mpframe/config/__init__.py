"""The options: which there are, what they may be, how a command line becomes a checked `Config`.

Begin with schema.py, which lists every option with its default and range, and check.py, which
compares a composed configuration with it. Hydra composes; around it stand

    composition/     from the words of a command line to a checked job
    sweep/           the jobs of a sweep: values, names, folders of an earlier start
    store.py         gives Hydra the schema            planned.py       ${plan:total_steps}
    stored.py        a checkpoint's options            trust.py         which classes may be built
    redaction.py     keeps secrets out                 options_page.py  writes docs/options.md

This package imports only files/ and errors.py, and never torch, so that a mistake is answered at
once. Only config, assembly, run and cli know the options.
"""
