"""Say before training what will go wrong, and which option fixes it.

Usage: mpframe doctor [-m] [GROUP=CHOICE] [option=value] ...

    mpframe doctor experiment=digits_mlp dtype=mixed loss_scaling=static
    mpframe doctor -m dtype=fp32,mixed,amp

Options:
    those of mpframe train
    -m              examine each job of a sweep
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The command builds what training would build, and examines it. It leaves nothing behind. The exit
code is 1 if there is an error.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from mpframe import assembly
from mpframe.cli.program import program, without_secrets
from mpframe.config.command_line import jobs
from mpframe.config.schema import Config
from mpframe.lab.doctor import Finding, Severity, Subject, examine
from mpframe.run.resume import take_first_weights


def main(arguments: list[str] | None = None) -> None:
    """Examine what `mpframe train` would train; the exit code is 1 if a finding is an error.

    Args:
        arguments: as for training; the command line if None.
    """
    errors = 0
    with program():
        for job in jobs(sys.argv[1:] if arguments is None else arguments):
            findings = examine(subject_of(job.config, job.overrides))
            print(without_secrets(as_text(job.typed, findings), job.typed))
            errors += any(finding.severity is Severity.ERROR for finding in findings)
    sys.exit(1 if errors else 0)


def subject_of(config: Config, words: Sequence[str] = ()) -> Subject:
    """Build what the options say; no step has been made.

    Args:
        config: the options.
        words: the overrides they come from, as Hydra is given them.

    Raises:
        MpframeError: training could not start either.
    """
    # A compiled graph is the same numbers, after minutes of compiling.
    config = replace(config, trainer=replace(config.trainer, compile=False))
    assembly.seed_everything(config.run.seed)
    task = assembly.build_task(config)
    train = assembly.build_loaders(config, task).train
    trainer = assembly.build_trainer(config, task, len(train))
    trained_in = None if config.run.init_from is None else take_first_weights(trainer, config.run)
    added = {word.lstrip("+").partition("=")[0] for word in words if word.startswith("+")}
    return Subject(trainer, train, config.flat, added, trained_in)


def as_text(words: Sequence[str], findings: list[Finding]) -> str:
    """The words that were typed for a job, a line for each finding, and how many there are."""
    head = f"{shlex.join(words) or 'the default configuration'}:"
    counts = {kind: sum(f.severity is kind for f in findings) for kind in Severity}
    said = [f"{n} {kind.name.lower()}{'s' * (n != 1)}" for kind, n in counts.items() if n]
    return "\n".join([head, *map(str, findings), ", ".join(said) or "nothing found"])
