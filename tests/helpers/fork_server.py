"""The server from which tests fork processes. It imports once what would take each its seconds.

There is one for each process of pytest: multiprocessing keeps it, and reads the names at its start.
"""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "mpframe.run.run", "mpframe.cli.commands.train", "mpframe.data", "pytest",
    "mpframe.parallel.process_group",
    "torch._dynamo", "torch.distributed.fsdp",  # With the first step, of whatever model.
])  # fmt: skip


def as_a_new_program() -> None:
    """In a forked process: Python's own way to start others, as data workers, and not this one."""
    multiprocessing.set_start_method(None, force=True)
