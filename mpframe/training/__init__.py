"""The parts that run around the step: the loop, evaluation, averages, schedules, callbacks.

    trainer, plan, extra_state         `fit`, its length and progress, all that a checkpoint has
    evaluation                         the loss and metrics of a validation
    objectives, probe                  losses for YAML files; the first loss scale, measured
    memory                             channels last, recomputation, memory kept for the next step
    run_context, results               the parts of a run; its last and best numbers
    interruption                       signals that stop a run
    callbacks/                         what watches a run, and what follows each step of it
    optimizers/                        several optimizers, and which weights each takes
    trainers/                          the whole step compiled, several losses, LBFGS
    parallel/                          several processes, on torch's DDP and FSDP2

Imports data and what is below it. Nothing here knows an option or instantiates anything.
"""
