"""The parts that run beside the step: evaluation, averages, schedules, other trainers, callbacks.

    evaluation, prediction             the loss and metrics of a validation; outputs as a table
    ema, schedules, loss_spike         algorithms: they follow each step of the trainer
    multi_optimizer, multi_objective   several optimizers that make one step; several losses
    closure_trainer                    the trainer of LBFGS and its like
    selection                          which parameter belongs to which optimizer, or group
    memory                             channels last, recomputation, memory kept for the next step
    interruption, ranks, run_context   signals that stop a run; ranks that differ; what a run tells
    callbacks/                         what watches a run

Imports data, core and what is below them. Nothing here knows an option or instantiates anything.
"""
