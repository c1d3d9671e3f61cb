"""The commands, a file each: `mpframe NAME ...` starts `main` of NAME.py.

The docstring of NAME.py is the help of the command. template/ is the project that `new` writes.
"""
