"""From the words of a command line to a checked job, or to one line that says what is wrong.

    flags.py, overrides.py   the two kinds of words: Hydra's flags, and option=value
    source.py                where Hydra composes from: --config-dir, --config-name
    composing.py             composes one job and checks it
    command_line.py          both together, as the commands use them
    job_check.py             a callback of Hydra: checks before the first job starts
    refusal.py               an error of Hydra's as one line

Hydra composes, through its public interfaces. Begin with command_line.py.
"""
