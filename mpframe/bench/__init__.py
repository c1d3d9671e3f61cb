"""The benchmark: what mpframe costs and saves, beside plain torch and other trainers.

One file for each group of rows, which groups.py lists; measure.py holds how anything is measured,
table.py how it is shown, program.py the command line. Nothing here is imported by training.
"""
