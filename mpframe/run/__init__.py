"""One training run in its folder, from the checked options to summary.json.

Begin with `Run` in run.py: what a run does, in order.

    folder           the run's folder: its lock, and the files that it begins with
    resume           the checkpoint or the weights that the run starts from
    callbacks        all callbacks of a run, in order
    description      the run in its log and in TensorBoard; how to use its weights
    preprocessing    whether other data are read with the run's numbers; the tokenizer's vocabulary
    process          memory, threads, console, Slurm's queue
    outcome          the final test and the summary

This package may import assembly and what is below it. Only cli starts runs.
"""
