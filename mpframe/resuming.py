"""Where a resumed run starts from: the newest good checkpoint, taken whole or not at all.

A checkpoint is verified before anything is touched, and where it turns out to be of something else
after all, what was there before is put back.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot, retention
from mpframe.environment import arithmetic
from mpframe.errors import CheckpointError
from mpframe.exactness import carried_over, differences, other_arithmetic, refuse_other_parts
from mpframe.trainer import Trainer

log = logging.getLogger(__name__)

# What taking in a state of the wrong structure may raise, anywhere in torch or below.
_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


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

    def into(self, trainer: Trainer) -> dict[str, Any]:
        """Take the checkpoint into the trainer and the random generators.

        Returns:
            The states of the callbacks, by `trainer.by_key`; empty where the run starts anew.

        Raises:
            CheckpointError: what was named is missing, damaged, or of something else; nothing has
                changed.
        """
        if self.option == "none":
            return {}
        if self.option == "auto":
            return self._newest_good(trainer)
        path = Path(self.option)
        if not path.exists():
            raise CheckpointError(
                f"resume={path}: no such folder; name a run's folder or a checkpoint"
            )
        return self._take(checkpoint.newest(path), trainer)

    def _newest_good(self, trainer: Trainer) -> dict[str, Any]:
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
        return {}

    def _take(self, path: Path, trainer: Trainer) -> dict[str, Any]:
        snapshot = checkpoint.read(path)
        _apply(snapshot, self.config, path, trainer)
        if path.parent.resolve() == (self.folder / checkpoint.FOLDER).resolve():
            for moved in retention.set_aside_after(self.folder, trainer.progress.attempts):
                log.warning("warning: newer than where the run goes on, now %s", moved)
        self._say_what_differs(snapshot, trainer)
        log.info("resumed from %s at step %d", path, trainer.progress.attempts)
        callbacks: dict[str, Any] = snapshot.state.get("callbacks", {})
        return callbacks

    def _say_what_differs(self, snapshot: Snapshot, trainer: Trainer) -> None:
        here = arithmetic(next(trainer.model.parameters()).device)
        changed = differences(snapshot.config, self.config)
        changed += other_arithmetic(snapshot.facts.get("made_on", {}), here)
        if changed:
            log.warning(
                "warning: the resumed run will not equal an undisturbed one bit for bit: %s",
                ", ".join(changed),
            )
        carried = carried_over(snapshot.config, self.config)
        if carried:
            log.warning(
                "warning: not used, for the checkpoint holds its own: %s; "
                "start anew with init_from to change it",
                ", ".join(carried),
            )


def _apply(snapshot: Snapshot, config: str, path: Path, trainer: Trainer) -> None:
    """Take a state in, all of it or none."""
    before = Snapshot(0, {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()})
    before = before.detached()
    try:
        refuse_other_parts(snapshot.config, config)
        _load(snapshot, trainer)
    except (CheckpointError, *_MISFITS) as error:
        _load(before, trainer)
        said = error if isinstance(error, CheckpointError) else f"of something else ({error!r})"
        raise CheckpointError(f"{path}: {said}") from None


def _load(snapshot: Snapshot, trainer: Trainer) -> None:
    trainer.load_state_dict(snapshot.state["trainer"])
    checkpoint.restore_rng(snapshot.state["rng"])
