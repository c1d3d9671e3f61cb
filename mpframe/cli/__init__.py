"""The commands: `mpframe NAME ...` starts `main` of NAME.py; scripts/ has a twin of each.

Begin with main.py, which finds the command, and train.py: Hydra composes, the job is checked,
job.py runs it. The other commands take `option=value` words and compose by themselves. Each runs
within `program()`: the current folder is importable, and an error of ours ends in one line. The
docstring of a command is its `--help`. May import everything but bench/.
"""
