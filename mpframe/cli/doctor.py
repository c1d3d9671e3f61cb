"""The program behind `scripts/doctor.py`: builds what training would, and examines it.

No run folder is made. A sweep (`-m`) is examined job by job.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mpframe import build, checkpoint
from mpframe.checkpoint.saved_weights import fitted, weights_of
from mpframe.cli.program import program
from mpframe.config.command_line import jobs
from mpframe.config.schema import Config
from mpframe.errors import ConfigError
from mpframe.numerics.doctor import Finding, Severity, Subject, examine
from mpframe.training.trainer import Trainer


def main(arguments: list[str] | None = None) -> None:
    """Examine what `scripts/train.py` would train; exit code 1 if a finding is an error.

    Args:
        arguments: as for training; the command line if None.
    """
    errors = 0
    with program():
        for job in jobs(sys.argv[1:] if arguments is None else arguments):
            findings = examine(subject_of(job.config, job.overrides))
            print(as_text(job.typed, findings))
            errors += any(finding.severity is Severity.ERROR for finding in findings)
    sys.exit(1 if errors else 0)


def subject_of(config: Config, words: Sequence[str] = ()) -> Subject:
    """What the options build, before its first step.

    Args:
        config: the options.
        words: the overrides they come from, as Hydra is given them.

    Raises:
        MpframeError: training could not start either.
    """
    # A compiled graph is the same numbers, after minutes of compiling.
    config = replace(config, trainer=replace(config.trainer, compile=False))
    build.seed_everything(config.run.seed)
    task = build.build_task(config)
    train = build.build_loaders(config, task).train
    trainer = build.build_trainer(config, task, len(train))
    trained_in = _take_weights(trainer, config) if config.run.init_from else None
    added = {word.lstrip("+").partition("=")[0] for word in words if word.startswith("+")}
    return Subject(trainer, train, config.flat, added, trained_in)


def as_text(words: Sequence[str], findings: list[Finding]) -> str:
    """The findings, a line each, under the words typed for their job, and how many there are."""
    head = f"{shlex.join(words) or 'the default configuration'}:"
    counts = {kind: sum(f.severity is kind for f in findings) for kind in Severity}
    said = [f"{n} {kind.name.lower()}{'s' * (n != 1)}" for kind, n in counts.items() if n]
    return "\n".join([head, *map(str, findings), ", ".join(said) or "nothing found"])


def _take_weights(trainer: Trainer, config: Config) -> str:
    """Load init_from; returns the precision its weights were trained in."""
    source = str(config.run.init_from)
    state = checkpoint.load(Path(source))
    saved = weights_of(state, "trained", Path(source))
    trainer.load_weights(fitted(saved, trainer.weights(), config.run.init_from_except, source))
    try:
        return str(state["trainer"]["precision"])
    except (KeyError, TypeError):
        raise ConfigError(f"init_from={source}: does not say its precision; retrain it") from None
