"""Where a resumed run starts from: the newest good checkpoint, taken whole or not at all.

A checkpoint is verified before anything is touched, and where it turns out to be of something else
after all, what was there before is put back.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.errors import CheckpointError, MpframeError, RunInterrupted
from mpframe.files.stored_yaml import parsed
from mpframe.run.exactness import carried_over, differences, other_arithmetic, refuse_other_parts
from mpframe.tracking.environment import arithmetic
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What a run goes on with, beside the state of its trainer.

    Attributes:
        run: the identity of the run; a new one where it starts anew.
        callbacks: the states of the callbacks, by `trainer.by_key`; empty where it starts anew.
    """

    run: str = field(default_factory=checkpoint.new_identity)
    callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Resume:
    """What to go on from.

    Attributes:
        option: `none`, `auto`, or a checkpoint's or run's folder.
        folder: this run's folder.
        config: this run's resolved options as YAML.
    """

    option: str
    folder: Path
    config: str

    def into(self, trainer: Trainer) -> Resumed:
        """Take the checkpoint into the trainer and the random generators.

        Raises:
            CheckpointError: what was named is missing, damaged, or of something else; nothing has
                changed.
        """
        if self.option == "none":
            return Resumed()
        if self.option == "auto":
            return self._newest_good(trainer)
        path = Path(self.option)
        if not path.exists():
            raise CheckpointError(
                f"resume={path}: no such folder; name a run's folder or a checkpoint"
            )
        checkpoint.refuse_mixed(path)
        return self._take(checkpoint.newest(path), trainer)

    def _newest_good(self, trainer: Trainer) -> Resumed:
        found = checkpoint.all_in(self.folder)
        for path in reversed(found):
            try:
                return self._take(path, trainer)
            except CheckpointError as error:
                log.warning("warning: resume=auto passes over %s: %s", path.name, error)
        if found:
            raise CheckpointError(
                f"resume=auto: none of the {len(found)} checkpoints in {self.folder} can be used; "
                "mend or delete them, or start anew in another hydra.run.dir"
            )
        log.info("resume=auto: no checkpoint in %s, starting from the beginning", self.folder)
        return Resumed()

    def _take(self, path: Path, trainer: Trainer) -> Resumed:
        snapshot = checkpoint.read(path)
        then, now = _options(snapshot.config, path), _options(self.config, self.folder)
        _apply(snapshot, (then, now), path, trainer)
        _say_what_differs(snapshot, then, now, trainer)
        log.info("resumed from %s at step %d", path, trainer.progress.global_step)
        run = checkpoint.identity_of(snapshot.facts) or checkpoint.new_identity()
        return Resumed(run, snapshot.state.get("callbacks", {}))


def _options(config: str, path: Path) -> dict[str, Any]:
    """Options stored as YAML; none where a loop of the user's own saved without."""
    return parsed(config, path / "config.yaml") if config else {}


def _say_what_differs(
    snapshot: Snapshot, then: dict[str, Any], now: dict[str, Any], trainer: Trainer
) -> None:
    here = arithmetic(next(trainer.model.parameters()).device)
    changed = differences(then, now)
    changed += other_arithmetic(snapshot.facts.get("made_on"), here)
    if changed:
        log.warning(
            "warning: the resumed run will not equal an undisturbed one bit for bit: %s",
            ", ".join(changed),
        )
    carried = carried_over(then, now)
    if carried:
        log.warning(
            "warning: not used, for the checkpoint holds its own: %s; "
            "start anew with init_from to change it",
            ", ".join(carried),
        )


def _apply(
    snapshot: Snapshot, options: tuple[dict[str, Any], dict[str, Any]], path: Path, trainer: Trainer
) -> None:
    """Take a state in, all of it or none."""
    before = Snapshot(0, {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()})
    before = before.detached()
    try:
        refuse_other_parts(*options)
        _load(snapshot, trainer)
    except RunInterrupted:
        raise
    except Exception as error:  # A state of the wrong structure may raise anything below torch.
        _load(before, trainer)
        said = error if isinstance(error, MpframeError) else f"of something else ({error!r:.200})"
        raise CheckpointError(f"{path}: {said}") from None


def _load(snapshot: Snapshot, trainer: Trainer) -> None:
    if not isinstance(snapshot.state.get("callbacks", {}), dict):
        raise CheckpointError("its callbacks are no dict; use another checkpoint")
    trainer.load_state_dict(snapshot.state["trainer"])
    checkpoint.restore_rng(snapshot.state["rng"])
