"""Where a resumed run starts from: the newest good checkpoint, loaded completely or not at all.

A checkpoint is verified before anything changes. If it then turns out not to fit, the earlier state
is put back.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint.saved_weights import conversion, rounding
from mpframe.errors import CheckpointError, MpframeError, RunInterrupted
from mpframe.files.stored_yaml import parsed
from mpframe.run.resume.callback_states import restore
from mpframe.run.resume.exactness import (
    carried_over,
    differences,
    other_arithmetic,
    refuse_other_parts,
)
from mpframe.tracking import record_sizes
from mpframe.tracking.environment import arithmetic
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of

log = logging.getLogger(__name__)


Renew = Callable[[Trainer], None]
"""Gives a trainer new callbacks, without a state."""


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run continues from.

    Attributes:
        option: `none`, `auto`, or a checkpoint's or run's folder.
        folder: this run's folder.
        config: this run's resolved options as YAML.
    """

    option: str
    folder: Path
    config: str

    def into(self, trainer: Trainer, renew: Renew = lambda trainer: None) -> str:
        """Load the checkpoint into the trainer, its callbacks and the random generators.

        Args:
            trainer: newly built.
            renew: called before each checkpoint that is tried, and if there is none.

        Returns:
            The identity of the run; a new one if it starts from the beginning.

        Raises:
            CheckpointError: the checkpoint is missing, is damaged or does not fit; nothing has
                changed.
        """
        if self.option == "none":
            return _from_the_beginning(trainer, renew)
        if self.option == "auto":
            return self._newest_good(trainer, renew)
        path = Path(self.option)
        if not path.exists():
            raise CheckpointError(
                f"resume={path}: no such folder; name a run's folder or a checkpoint"
            )
        checkpoint.refuse_mixed(path)
        return self._take(checkpoint.newest(path), trainer, renew)

    def _newest_good(self, trainer: Trainer, renew: Renew) -> str:
        found = checkpoint.all_in(self.folder)
        for path in reversed(found):
            try:
                return self._take(path, trainer, renew)
            except CheckpointError as error:
                log.warning("warning: resume=auto passes over %s: %s", path.name, error)
        if found:
            raise CheckpointError(
                f"resume=auto: none of the {len(found)} checkpoints in {self.folder} can be used; "
                "repair or delete them, or start again in another hydra.run.dir"
            )
        log.info("resume=auto: no checkpoint in %s, starting from the beginning", self.folder)
        return _from_the_beginning(trainer, renew)

    def _take(self, path: Path, trainer: Trainer, renew: Renew) -> str:
        snapshot = checkpoint.read(path)
        renew(trainer)
        then, now = _options(snapshot.config, path), _options(self.config, self.folder)
        _apply(snapshot, (then, now), path, trainer)
        _say_what_differs(snapshot, then, now, trainer)
        if path.absolute().parents[1] == self.folder.absolute():
            _say_what_is_short(snapshot, path)
        log.info("resumed from %s at step %d", path, trainer.progress.global_step)
        return checkpoint.identity_of(snapshot.facts) or checkpoint.new_identity()


def _from_the_beginning(trainer: Trainer, renew: Renew) -> str:
    renew(trainer)
    return checkpoint.new_identity()


def _options(config: str, path: Path) -> dict[str, Any]:
    """The stored options; none if a user's own loop saved without them."""
    return parsed(config, path / "config.yaml") if config else {}


def _say_what_differs(
    snapshot: Snapshot, then: dict[str, Any], now: dict[str, Any], trainer: Trainer
) -> None:
    here = arithmetic(device_of(trainer.model), trainer.world)
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
            "warning: not used, because the checkpoint holds its own: %s; "
            "start a new run with init_from to change it",
            ", ".join(carried),
        )


def _say_what_is_short(snapshot: Snapshot, path: Path) -> None:
    """Name the records of the run that have lost rows since the checkpoint was made."""
    then, now = snapshot.facts.get("records"), record_sizes(path.parents[1])
    if not isinstance(then, dict):
        return  # A checkpoint may hold anything there.
    short = [
        f"{name} ({now.get(name, 0)} of {size} bytes)"
        for name, size in then.items()
        if isinstance(size, int) and now.get(name, 0) < size
    ]
    if short:
        log.warning(
            "warning: shorter than when %s was made: %s; what was lost stays missing from the "
            "curves",
            path.name,
            ", ".join(short),
        )


def _apply(
    snapshot: Snapshot, options: tuple[dict[str, Any], dict[str, Any]], path: Path, trainer: Trainer
) -> None:
    """Load a state, all of it or none."""
    before = Snapshot(0, {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()})
    before = before.detached()
    try:
        refuse_other_parts(*options)
        _load(snapshot, trainer)
        restore(trainer.callbacks, snapshot.state.get("callbacks", {}))
    except RunInterrupted:
        raise
    except Exception as error:  # A state of the wrong structure may raise anything below torch.
        trainer.load_state_dict(before.state["trainer"])
        checkpoint.restore_rng(before.state["rng"])
        said = error if isinstance(error, MpframeError) else f"of something else ({error!r:.200})"
        raise CheckpointError(f"{path}: {said}") from None


def load_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Load a trainer's state, and say what another precision makes of it.

    Raises:
        CheckpointError: the state belongs to another model, optimizer or scaler.
    """
    trainer.load_state_dict(state)
    if state["precision"] != str(trainer.precision):
        rounded = rounding(trainer.model, state["weights"])
        scaled = bool(state["scaler"]), bool(trainer.scalers)
        log.info("%s", conversion(state["precision"], str(trainer.precision), rounded, scaled))


def _load(snapshot: Snapshot, trainer: Trainer) -> None:
    load_state(trainer, snapshot.state["trainer"])
    if trainer.world.is_main:
        checkpoint.restore_rng(snapshot.state["rng"])
        return
    own = checkpoint.of_rank(snapshot.state, trainer.world.rank)
    if own is None:  # There were fewer ranks: this one draws numbers of its own.
        shared = snapshot.state["trainer"].get("products", {})
        trainer.precision.load_state_dict({**shared, "generators": {}})
    else:
        trainer.precision.load_state_dict(own["products"])
        checkpoint.restore_rng(own["rng"])
