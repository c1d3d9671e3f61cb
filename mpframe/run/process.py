"""What a program sets and sees to in its own process before a run on a CPU.

`mpframe.train` in a notebook leaves the process as it is.
"""

import logging
import os

import torch

from mpframe.assembly import resolve_device
from mpframe.config.schema import Config
from mpframe.run.threads import advice_on_threads
from mpframe.training.allocator import keep_freed_memory

log = logging.getLogger(__name__)


def prepare_process(config: Config) -> None:
    """Keep freed memory if the options say so, and warn of threads without cores."""
    device = config.run.device
    if device not in ("auto", "cpu") or resolve_device(device).type != "cpu":
        return
    if config.trainer.keep_freed_memory:
        keep_freed_memory()
    advice = advice_on_threads(torch.get_num_threads(), os.environ)
    if advice is not None:
        log.warning("warning: %s", advice)
