"""Whole training runs, with loading, validation and logging, by mpframe and by others.

workloads.py says what is trained, loaders.py in which batches. trainers.py holds the other
trainers, ours.py how mpframe is started, one_run.py one run in a new process.
"""
