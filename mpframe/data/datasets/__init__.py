"""The datasets that ship, one folder for each kind of data.

Each module is named after its function, which returns a `Task`. images/digits.py is the shortest
one to read. hold_out.py is how all of them keep samples back to validate and to test on.
"""
