"""One training run in its folder, from the checked options to summary.json.

Begin with `Run` in run.py: what a run does, in order.

    folder, lock              the run's folder: who may write into it, and what stands there first
    resume/                   which checkpoint the run goes on from, and what then differs
    first_weights             what `init_from` does
    callbacks                 all callbacks of a run, in order
    console                   how much of its log the console shows
    description, hparams      what a run says about itself before it trains
    final_test                the test of its best weights, on data that chose nothing
    vocabulary                of the tokenizer: a file of the folder, always the same one
    preprocessing             whether other data are read with the run's own numbers
    usage                     what a stranger must know to use its weights
    outcome, requeue          what its summary says; back into Slurm's queue

This package may import assembly and what is below it. Only cli starts runs.
"""
