"""The program behind `scripts/train.py`: Hydra composes, the command line is checked, a run starts.

A mistake ends in one line on stderr and exit code 1; `HYDRA_FULL_ERROR=1` shows the traceback.
torch is imported only once the command line has been found good.
"""

import os
import sys
from pathlib import Path
from typing import cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from mpframe.config.command_line import checked, prepare
from mpframe.config.locations import CONF
from mpframe.config.redaction import hide, secrets_of, values_of
from mpframe.errors import MpframeError, RunInterrupted, printable


class JobError(CompactHydraException):
    """A job of a sweep that ended in an error; Hydra prints its text and goes on."""


def main() -> None:
    """Train as the command line says.

    The exit code is 1 where it could not, and 128 + the signal's number where one stopped it.
    """
    try:
        sys.argv[1:] = prepare(sys.argv[1:])
        failures: list[MpframeError] = []
        _hydra_main(failures)
        if failures:
            raise failures[0]
    except MpframeError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(_printed(error))
    except KeyboardInterrupt:  # Before there was a run that could be saved.
        sys.exit(130)


def _hydra_main(failures: list[MpframeError]) -> None:
    """Run Hydra; the error of a single run is kept in `failures`, for one clean line.

    A job of a sweep raises instead, as Hydra's launchers expect: the sweep goes on, and its exit
    code is 1 in the end.
    """

    def job(composed: DictConfig) -> None:
        try:
            config = checked(composed)
            from mpframe.run.run import Run  # torch comes in here, and not before.

            own = cast(DictConfig, HydraConfig.get())
            Run(config, composed, Path(own.runtime.output_dir), own).train()
        except MpframeError as error:
            error.args = (hide(str(error), secrets_of(values_of(composed), os.environ)),)
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                if isinstance(error, RunInterrupted):
                    sys.exit(_printed(error))  # The jobs that are left are not started either.
                raise JobError(str(error)) from error
            failures.append(error)

    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(job)()


def _printed(error: MpframeError) -> int:
    said = hide(str(error), secrets_of(sys.argv, os.environ))
    print(f"mpframe: {printable(said)}", file=sys.stderr)
    return error.exit_code
