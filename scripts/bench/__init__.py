"""The benchmark: what mpframe costs and saves, beside plain torch and other trainers.

groups/ has the rows: steps.py one table of the steps of models, devices.py several processes and a
GPU, overhead.py the tiny step, programs.py whole runs and the start. measure.py holds how anything
is measured, table.py how it is shown, program.py the command line, child.py a measurement in a
new process. Beside them stand the loop everybody writes first, the other trainers, the first
step of a run, in step/ the models and their steps, and in whole/ the
runs of others.
"""
