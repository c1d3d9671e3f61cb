"""The parts that run around the step: the loop, evaluation, averages, schedules, callbacks.

    trainer, plan, extra_state         `fit`, its length and progress, all that a checkpoint has
    evaluation, prediction             the loss and metrics of a validation; outputs as a table
    ema, schedules, loss_spike         algorithms: they follow each step of the trainer
    objectives, probe                  losses for YAML files; the first loss scale, measured
    multi_optimizer, multi_objective   several optimizers that make one step; several losses
    lbfgs                              the step and the trainer of LBFGS and its like
    split_master                       masters in the 16 bits that a bfloat16 weight lacks
    selection                          which parameter belongs to which optimizer, or group
    memory                             channels last, recomputation, memory kept for the next step
    interruption, ranks, run_context   signals that stop a run; ranks that differ; a run's parts
    callbacks/                         what watches a run

Imports data and what is below it. Nothing here knows an option or instantiates anything.
"""
