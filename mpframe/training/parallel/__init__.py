"""Several processes: how the ranks of a run find each other, and what they send.

    place           the rank of this process, as torchrun tells it
    launch          joins the ranks for one run, and prints an error once
    process_group   `Comm` (core/comm.py) for many processes, over torch.distributed
    layout          the grid of ranks that divide a model
    data_parallel   averages gradients while the backward pass runs, on torch's DDP
    sharding        shards a model's weights across the ranks, by torch's FSDP2
    deferred        a model without values, filled block by block as it is sharded
    tensor_parallel divides layers by a plan, on torch's parallelize_module
    sync_batchnorm  BatchNorm over the statistics of all ranks
    same_weights    the check that the ranks have not drifted apart

Every rank runs the same program. After each step all ranks hold the same weights, buffers,
optimizer state, averages and loss scale, bit for bit, or each its part of them. For everything that
one of them could decide by itself goes through `Comm`: gradients, verdicts, losses, validations,
signals. Only rank 0 has the run's folder.
"""
