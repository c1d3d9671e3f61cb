"""Puts a run's Slurm job back into the queue, so that it continues from its checkpoint."""

import logging
import os
import signal
import subprocess

log = logging.getLogger(__name__)


def requeue(received: signal.Signals) -> None:
    """Ask Slurm to run this job again, if the signal is SIGUSR1: its warning of the time limit.

    Any other signal does nothing, nor does a run outside Slurm; a refusal of Slurm is logged.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or received.name != "SIGUSR1":
        return
    try:
        subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        log.warning("warning: job %s was not requeued: %s", job, said[0] if said else error)
    else:
        log.info("job %s requeued", job)
