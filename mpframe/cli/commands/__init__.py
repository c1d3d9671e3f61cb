"""The commands, a file each: `mpframe NAME ...` starts `main` of NAME.py.

A file's docstring is its help, and the first line of it is its line in `mpframe --help`. Each runs
within `program()` of cli/program.py. template/ is what `new` writes. A command may use another one:
export and predict find a checkpoint as evaluate does.
"""
