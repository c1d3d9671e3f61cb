"""One training run in its folder, from the checked options to summary.json.

Begin with `Run` in run.py: what a run does, in order.

    folder, lock              the run's folder: who may write into it, and what stands there first
    resuming, callback_states, exactness
                              which checkpoint the run goes on from, and what then differs
    callbacks                 all callbacks of a run, in order
    description               what a run says of itself before it trains
    final_test                what its best weights are worth on data that chose nothing
    usage                     what a stranger must know to use its weights
    outcome, requeue          what it says when it has ended; back into Slurm's queue

May import build and what is below it. Only cli starts runs.
"""
