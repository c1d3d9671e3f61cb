"""Whole training runs, with loading, validation and logging, by mpframe and by others.

workloads.py says what is trained, loaders.py in which batches; trainers.py holds the other
trainers, ours.py what mpframe is started with, one_run.py one run in a process of its own.
"""
