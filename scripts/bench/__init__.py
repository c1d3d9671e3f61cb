"""The benchmark: what mpframe costs and saves, beside plain torch and other trainers.

groups/ has one file for each group of rows; measure.py holds how anything is measured, table.py how
it is shown, program.py the command line, child.py a measurement in a process of its own. Beside
them stand what is measured: the loop everybody writes first, the other trainers, the first step of
a run, what ranks send (traffic.py), and in step/ the step of large models. Nothing here is imported
by training.
"""
