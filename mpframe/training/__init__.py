"""The trainer: one step that is all or nothing, and the loop around it.

Begin with `Trainer.train_step` in trainer.py. Beside it stand the trainers of other steps:
multi_objective.py has one for several losses, closure_trainer.py one for LBFGS and its like.

    plan, loader, callback    how long to train, what gives the batches, what watches
    buffers                   BatchNorm's statistics, restored after a skipped step
    recompute, channels_last  modules that keep no activations; another order of weights in memory
    allocator                 memory that is freed and kept for the next step
    probe                     the first loss scale, from one backward pass in fp32
    window                    from the backward passes of micro-batches to one step's gradients
    loss_spike                finite losses that are far too high
    evaluation/               the loss and the metrics of a validation; the best one; predictions
    interruption              signals that ask a run to stop
    callbacks/                what comes with mpframe: checkpoints, curves, early stopping, ...

May import objectives, data and what is below them; knows no options and instantiates nothing.
"""
