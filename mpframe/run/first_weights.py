"""What `init_from` does: a run begins with saved weights, except those that may differ."""

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mpframe import checkpoint
from mpframe.checkpoint.init_from import fitted, is_foreign, read_foreign, renamed
from mpframe.checkpoint.state import rounding, trained_in, weights_of
from mpframe.config.schema import RunOptions
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


def take_first_weights(trainer: Trainer, options: RunOptions) -> str | None:
    """Load the weights that `init_from` names into the trainer, and log what became of each.

    Args:
        trainer: newly built.
        options: those of the run, with an `init_from`.

    Returns:
        The precision that they were trained in, e.g. `mixed(float16)`; None if mpframe did not
        train them.

    Raises:
        CheckpointError: the file is damaged or does not fit the model; nothing is taken.
        ConfigError: a pattern matches no weight.
    """
    source, left_out = str(options.init_from), options.init_from_except
    saved, precision, left = _read(Path(source))
    own = trainer.weights()
    saved = renamed(saved, options.init_from_names or {}, own.keys(), source)
    taken = fitted(saved, own, left_out, source)
    trainer.load_weights(taken.weights)
    log.info(
        "weights taken from %s%s: %s",
        source,
        f", but for {', '.join(left_out)}" if left_out else "",
        rounding(trainer.model, taken.weights),
    )
    if left:
        log.info("init_from: other entries of the file, not used: %s", ", ".join(left))
    for line in taken.remarks():
        log.info("init_from: %s", line)
    return precision


def _read(path: Path) -> tuple[Mapping[str, Tensor], str | None, tuple[str, ...]]:
    """Weights by name, the precision of their run, and other entries beside them."""
    if is_foreign(path):
        foreign = read_foreign(path)
        return foreign.tensors, None, foreign.left
    state = checkpoint.load(path)
    return weights_of(state, "trained", path), trained_in(state, path), ()
