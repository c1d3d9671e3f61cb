"""The engine: what happens to a number on its way through one training step.

It imports torch and the standard library, and nothing of the rest of mpframe. Read the files in
this order; `docs/core.md` is the same walk with the code beside it.

Before the first step, a format is decided for every op and every weight:

    op_lists         which ops run in half (allow), in fp32 (deny), or as their inputs (infer)
    policy           the answer for one op, from the mode, the lists and the pins
    storage, trace   which weights are stored in half: those that only half ops read
    precision        `prepare` does both to a model and its optimizer; `cast` is the block

A batch goes forward. Inside the block PyTorch hands each op to the cast:

    blocks           a block, and a pin around one module, on a thread's stack of modes
    cast             finds the handler of an op, and keeps one half copy of each weight
    handlers         what each rule does to the inputs: round to half, widen, hold, pass on
    emulation        float16 on a CPU: half inputs, fp32 sums, one rounding
    unwrapping       Python functions of torch are looked into, so that their ops are cast
    recomputation    a forward pass that runs again in the backward pass gets the same casts

The objective makes a loss of it, in fp32, and the loss goes backward, scaled:

    objective        model and batch to `StepOutput(loss, outputs, targets, count)`
    loss_scaling/    the scale: none, static, Backoff or LogMax

The gradients arrive in half. They are measured, widened to fp32, then unscaled:

    gradients        amax and norm first, then fp32; micro-batches summed by their counts
    comm             the other processes: backward, accumulate, reduce; they agree on all of it

Then the update happens as a whole, or not at all:

    masters          the fp32 value behind each half weight, and the watch over that weight
    widening         half weights that other code moves, and that go back to fp32
    optimizer        a torch optimizer over masters: its groups, state, checkpoints
    master_weights   collect, check, clip, update or skip, round into the weights
    step_result      what was done; the one place where the host reads a skip
    buffers          BatchNorm's statistics, put back after a skip

And all of it together:

    trainer          the step, line by line
    callback         what watches a run, and what follows each step

tree, ranges, errors and user_code serve all of them: batches of any shape, checks of a number,
errors in one line, and whose code has failed.

Whoever has read this far can write a loss scaler (`Scaler`), a way to run an op (`OpHandler`), an
objective, a callback, or a `Comm` of processes. docs/own_parts.md and docs/precision.md
have examples.
"""
