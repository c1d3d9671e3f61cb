"""The state or the weights that a run starts from: `resume` and `init_from`.

Begin with `resume_from`. It finds the newest good checkpoint, verifies it, and loads all of it or
nothing. Then it reports why the resumed run cannot equal the uninterrupted one bit for bit, if it
cannot. Callbacks get their states by name. `init_from` loads saved weights.
"""

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint.folder import all_in, newest
from mpframe.checkpoint.state import OTHER_RANKS, rounding, weights_of
from mpframe.config.check import flatten, refuse_missing
from mpframe.config.schema import RunOptions, only_watches
from mpframe.config.sweep import ELSEWHERE, changes
from mpframe.core.errors import CheckpointError, ConfigError, MpframeError, RunInterrupted
from mpframe.core.tree import device_of, dtype_name
from mpframe.files.stored_yaml import parse_stored
from mpframe.tracking.environment import arithmetic
from mpframe.training.run_context import has_state
from mpframe.training.trainer import Callbacks, Trainer

log = logging.getLogger(__name__)

Options = Mapping[str, Any]  # by their dotted paths

# A checkpoint's facts name its device. Ranks may gather weights and keep their parts otherwise.
_ELSEWHERE = ELSEWHERE | {
    f"distributed.{n}" for n in ("reshard_after_forward", "cpu_offload", "blocks_together")
}
_LENGTH = {"trainer.epochs", "trainer.max_steps"}
_HARMLESS = ("callbacks.early_stopping", "init_from")  # A resumed run takes no first weights.
_STATES = ("optimizer", "scheduler")
_PLATEAU = "ReduceLROnPlateau"  # Fed by validations, and sized by nothing.


def refuse_other_parts(then: Options, now: Options) -> None:
    """Refuse another kind of optimizer or schedule, which would load the state as nonsense."""
    for path, (old, new) in changes(then, now).items():
        if path.startswith(_STATES) and path.endswith("_target_"):
            raise CheckpointError(
                f"made with {path}={old}, and this run has {new}; "
                "resume with the same, or take only the weights with init_from"
            )


def compare(then: Options, now: Options) -> tuple[list[str], list[str]]:
    """Return the changed options that make the resumed run differ, and the ones not used.

    The optimizer's options are in the saved state and so not used, and the options of a schedule
    that is fed by validations. Other schedules follow the new options.
    """
    schedule = str(flatten(now).get("scheduler._target_", ""))
    plateau = schedule.endswith(_PLATEAU)
    saved = _STATES if plateau else _STATES[:1]
    feeding = {"trainer.eval_every", "trainer.monitor"} if plateau else set()
    harmless = _ELSEWHERE | _LENGTH if plateau or not schedule else _ELSEWHERE
    differing, unused = [], []
    for path, (old, new) in changes(then, now).items():
        without_effect = path in harmless or path.startswith(_HARMLESS) or only_watches(path)
        if path.startswith(saved):
            unused.append(f"{path}={new} (goes on with {old})")
        elif path in feeding or not without_effect:
            differing.append(f"{path}={new} (was {old})")
    return differing, unused


def restore(callbacks: Callbacks, saved: Any) -> None:
    """Load each callback's state, and warn of states without a callback and of the reverse."""
    if not isinstance(saved, dict):
        raise CheckpointError("its callbacks are not a dict; use another checkpoint")
    for name in callbacks.keys() & saved.keys():
        try:
            callbacks[name].load_state_dict(saved[name])
        except (RunInterrupted, CheckpointError, ConfigError):
            raise
        except Exception as error:  # A checkpoint may hold anything there.
            raise CheckpointError(
                f"its state of callbacks.{name} does not fit ({error!r:.200}); "
                "resume from another checkpoint"
            ) from None
    dropped = [name for name in saved if name not in callbacks]
    if dropped:
        log.warning(
            "warning: the checkpoint holds the state of %s, and this run has no such callback: "
            "the next checkpoint is without",
            ", ".join(f"callbacks.{name}" for name in dropped),
        )
    fresh = [name for name, c in callbacks.items() if has_state(c) and name not in saved]
    if fresh:
        log.warning(
            "warning: the checkpoint holds no state of %s, which begins without",
            ", ".join(f"callbacks.{name}" for name in fresh),
        )


def resume_from(trainer: Trainer, option: str, folder: Path, config: str) -> str:
    """Load a checkpoint into the trainer, its callbacks and the random generators.

    `option` is `none`, `auto`, or a checkpoint's or run's folder. `folder`, and `config` with the
    resolved options as YAML, are this run's. Returns the run's identity, 16 letters that no other
    run has, new ones if there is no checkpoint to load.
    """
    if option == "none":
        return secrets.token_hex(8)
    if option != "auto":
        refuse_missing(option)
        return _resume(trainer, newest(Path(option)), config)
    found = trainer.comm.broadcast_object(all_in(folder))
    for path in reversed(found):
        try:
            return _resume(trainer, path, config)
        except CheckpointError as error:
            log.warning("warning: resume=auto passes over %s: %s", path.name, error)
    if found:
        raise CheckpointError(
            f"resume=auto: none of the {len(found)} checkpoints in {folder} can be used; "
            "repair or delete them, or start again in another hydra.run.dir"
        )
    log.info("resume=auto: no checkpoint in %s, starting from the beginning", folder)
    return secrets.token_hex(8)


def _resume(trainer: Trainer, path: Path, config: str) -> str:
    snapshot = checkpoint.read(path, trainer.comm)
    texts = [snapshot.config, config]
    if not all(texts):  # A user's own loop saves none.
        texts = ["{}", "{}"]
    then, now = (parse_stored(text, path / "config.yaml") for text in texts)
    _apply(snapshot, (then, now), path, trainer)
    _warn_of_differences(snapshot, then, now, trainer)
    log.info("resumed from %s at step %d", path, trainer.progress.global_step)
    return str(snapshot.facts.get("run") or secrets.token_hex(8))


def _warn_of_differences(snapshot: Snapshot, then: Options, now: Options, trainer: Trainer) -> None:
    here = arithmetic(device_of(trainer.model), trainer.comm)
    differing, unused = compare(then, now)
    made_on = snapshot.facts.get("made_on")
    if isinstance(made_on, Mapping):  # A checkpoint may hold anything there.
        differing += [
            f"{k}={v} (was {made_on[k]})" for k, v in here.items() if made_on.get(k, v) != v
        ]
    if differing:
        log.warning(
            "warning: the resumed run will not equal an uninterrupted one bit for bit: %s",
            ", ".join(differing),
        )
    if unused:
        log.warning(
            "warning: not used, because the checkpoint holds its own: %s; "
            "start a new run with init_from to change it",
            ", ".join(unused),
        )


def _apply(
    snapshot: Snapshot, options: tuple[dict[str, Any], dict[str, Any]], path: Path, trainer: Trainer
) -> None:
    """Load a state, on all ranks all of it or none. A rank keeps a copy of its parts till then."""
    state = {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()}
    before = Snapshot(0, state).to_cpu().state  # The averages are a copy already.
    said = None
    try:
        refuse_other_parts(*options)
        _load(snapshot, trainer)
        restore(trainer.callbacks, snapshot.state.get("callbacks", {}))
    except RunInterrupted:
        raise
    except Exception as error:  # A state of the wrong structure may raise anything below torch.
        known = isinstance(error, MpframeError)
        said = str(error) if known else f"of something else ({error!r:.200})"
    errors = trainer.comm.broadcast_object(trainer.comm.gather_object(said))
    if any(errors):
        trainer.load_state_dict(before["trainer"])
        checkpoint.restore_rng(before["rng"])
        raise CheckpointError(f"{path}: {next(filter(None, errors))}")


def load_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Load a trainer's state, and log how it was converted from another precision."""
    trainer.load_state_dict(state)
    if state["precision"] != str(trainer.precision):
        scale = {
            (True, False): "; its loss scale is not used",
            (False, True): "; the loss scale starts at its initial value",
        }.get((bool(state["scaler"]), bool(trainer.scalers)), "")
        log.info(
            "checkpoint of %s taken into %s: masters and optimizer state as they were, %s%s",
            *(state["precision"], trainer.precision),
            *(rounding(trainer.model, state["weights"]), scale),
        )


def _load(snapshot: Snapshot, trainer: Trainer) -> None:
    load_state(trainer, snapshot.state["trainer"])
    if trainer.comm.data_rank == 0:
        checkpoint.restore_rng(snapshot.state["rng"])
        return
    others, rank = snapshot.state.get(OTHER_RANKS, []), trainer.comm.data_rank
    if len(others) < rank:  # There were fewer ranks, so this one draws new numbers.
        shared = snapshot.state["trainer"]["products"]
        trainer.precision.load_state_dict({**shared, "generators": {}})
    else:
        trainer.precision.load_state_dict(others[rank - 1]["products"])
        checkpoint.restore_rng(others[rank - 1]["rng"])


def take_first_weights(trainer: Trainer, options: RunOptions) -> None:
    """Load the weights that `init_from` names into the trainer, and log which were used."""
    from mpframe.checkpoint.init_from import fit_weights, read_foreign, rename_weights  # seldom

    source, left_out = str(options.init_from), options.init_from_except
    path, weights = Path(source), trainer.weights()
    saved = read_foreign(path)
    if saved is None:
        saved = weights_of(checkpoint.load(path, trainer.comm), "trained", path)
    saved = rename_weights(saved, options.init_from_names or {}, weights.keys(), source)
    taken = fit_weights(saved, weights, left_out, source)
    trainer.load_weights(taken.weights)
    log.info(
        "weights taken from %s%s: %s",
        source,
        f", except {', '.join(left_out)}" if left_out else "",
        rounding(trainer.model, taken.weights),
    )
    formats = {dtype_name(one.dtype) for one in saved.values() if one.is_floating_point()}
    for what, names in {
        "with their first values": taken.kept,
        "not used": taken.unused,
        "saved in other formats than fp32": sorted(formats - {"float32"}),
    }.items():
        if names:
            log.info("init_from: %s: %s", what, ", ".join(names))
