"""The engine: what happens to a number on its way through one training step.

It imports torch and the standard library, and nothing else of mpframe. Read the files in this
order. `docs/core.md` is the same walk with the code beside it.

A batch goes forward, in a block that casts its ops if the run has a precision:

    casts                    the block, and how a loss leaves it; mpframe.precision makes the casts

The objective computes a loss in fp32, which is scaled before the backward pass:

    objective                model and batch to `StepOutput(loss, outputs, targets, count)`
    loss_scaling/            the scale: none, static, Backoff or LogMax

The gradients arrive in half. They are measured, widened to fp32, then unscaled:

    optim/gradients          amax and norm first, then fp32; micro-batches summed by their counts
    comm                     the other processes: backward, accumulate and reduce in step with them

Then the update happens as a whole, or not at all:

    optim/masters            the fp32 value behind each half weight, and how writes to it are seen
    optim/widening           half weights that other code updates, which become fp32 again
    optim/optimizer          a torch optimizer over masters: its groups, state, checkpoints
    optim/master_weights     collect, check, clip, update or skip, round into the weights
    step_result              what a step did, and the one place where the host reads a skip
    buffers                  BatchNorm's statistics, put back after a skip

And all of it together:

    trainer                  the step, line by line
    callback                 watches a run; an `Algorithm` also changes the training

tree, ranges, errors and user_code serve all of them: batches of any shape, checks of a number,
errors in one line, and whose code has failed.

Having read this far, you can write a loss scaler (`Scaler`), an objective, a callback, or a `Comm`
of processes. docs/own_parts.md has examples.
"""
