"""Say before training what will go wrong, and which option fixes it.

Usage: mpframe doctor [-m] [GROUP=CHOICE] [option=value] ...

    mpframe doctor experiment=digits_mlp dtype=mixed loss_scaling=static
    mpframe doctor -m dtype=fp32,mixed,amp

Options:
    all of mpframe train
    -m              examine each job of a sweep
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train

The command builds what training would build, and examines it. It leaves nothing behind. The exit
code is 1 if there is an error.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from mpframe.cli.program import command, without_secrets
from mpframe.cli.restored import rebuilt
from mpframe.config.command_line import jobs
from mpframe.config.schema import Config
from mpframe.files.text import say
from mpframe.lab.doctor import CHECKS, Subject
from mpframe.lab.hints import Finding, Severity, findings_of
from mpframe.run.resume import take_first_weights


@command
def main(arguments: list[str]) -> int:
    errors = 0
    for words, config in jobs(arguments):
        findings = findings_of(CHECKS, subject_of(config))
        say(without_secrets(as_text(words, findings), words))
        errors += any(finding.severity is Severity.ERROR for finding in findings)
    return 1 if errors else 0


def subject_of(config: Config) -> Subject:
    """Build a run from options and their overrides, before its first step."""
    # A compiled graph is the same numbers, after minutes of compiling.
    config = replace(config, trainer=replace(config.trainer, compile=False))
    trainer, train = rebuilt(config)
    if config.run.init_from is not None:
        take_first_weights(trainer, config.run)
    return Subject(trainer, train, config.flat)


def as_text(words: Sequence[str], findings: list[Finding]) -> str:
    """Write the words that were typed for a job, a line for each finding, and their number."""
    head = f"{shlex.join(words) or 'the configuration as it is'}:"
    counts = {kind: sum(f.severity is kind for f in findings) for kind in Severity}
    said = [f"{n} {kind.name.lower()}{'s' * (n != 1)}" for kind, n in counts.items() if n]
    end = ", ".join(said) or "nothing found"
    if not counts[Severity.ERROR]:
        end += ": the first step was tried and is finite"
    return "\n".join([head, *map(str, findings), end])
