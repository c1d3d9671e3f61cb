"""The parts that run around the step: the loop, evaluation, averages, schedules, callbacks.

    trainer, plan, extra_state         `fit`, its length and progress, all that a checkpoint has
    evaluation                         the loss and metrics of a validation
    compiled_step, step_record         a whole step as one graph
    objectives, probe                  losses for YAML files; the first loss scale, measured
    memory                             channels last, recomputation, memory kept for the next step
    interruption, ranks, run_context   signals that stop a run; ranks that differ; a run's parts
    callbacks/                         what watches a run, and what follows each step of it
    optimizers/                        several optimizers, several losses, LBFGS

Imports data and what is below it. Nothing here knows an option or instantiates anything.
"""
