"""Which format each op and each weight has, and how an op is run in it.

It imports torch and mpframe.core, and lowbit/ also a reader of YAML. The step enters its blocks
around each forward pass.

    op_lists         which ops run in half (allow), fp32 (deny), or as their inputs (infer)
    policy           the format of one op, from the mode, the lists and the pins
    trace            which ops read each weight, seen in one forward pass
    storage          which weights are stored in half: the ones that only half ops read
    cast             a block, and a pin around one module; finds the handler of each op
    handlers         what each rule does to the inputs: round to half, widen, clamp, pass on
    emulation        float16 on a CPU: half inputs, fp32 sums, one rounding
    torch_functions  functions of torch that are copied, so that the ops inside are cast, or
                     replaced, so that a backward pass gets the casts of its forward pass
    lowbit/          products below 16 bits, imported when a recipe is named
    precision        `prepare` sets up model and optimizer; `cast` is the forward's block

Having read this far, you can write a way to run an op (`OpHandler`); docs/precision.md has one.
"""
