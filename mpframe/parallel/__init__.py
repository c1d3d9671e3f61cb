"""One process or many: the place at which the ranks of a run agree.

    launch          what torchrun tells a process of its place, read without torch
    world           `World`: the processes of a run; alone, it does nothing and costs nothing
    process_group   the same for many processes, over torch.distributed
    sharding        divides a model's weights among the ranks, by torch's FSDP2
    shards          tensors of which each rank holds a part
    joining         joins the ranks for one run, and leaves cleanly however it ends
    saying          an error that many ranks meet is printed once

Every rank runs the same program. After each step all ranks hold the same weights, buffers,
optimizer state, averages and loss scale, bit for bit, or each its part of them, because whatever
one of them could decide by itself goes through `World`: gradients, the verdict on them, the loss,
validations, signals. Only rank 0 has the run's folder. Trainer, optimizer and loader have one code
path: with one process `World` gives back what it was given.
"""
