"""The commands: `mpframe NAME ...` starts `main` of NAME.py, whose docstring is the help."""
