"""Saved weights for a model. Nothing is left out in silence.

What is missing, not used, or of another shape or kind is refused, unless it is named as what may
differ. Formats may differ: every half value is an fp32 value, too.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from mpframe.checkpoint.init_from.renaming import few, hint
from mpframe.distributed.shards import address_of
from mpframe.errors import CheckpointError, ConfigError
from mpframe.tree import HALF, dtype_name

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Fitted:
    """Weights for the whole model.

    Attributes:
        weights: by the model's names; floating ones in fp32, or float64 if they were saved so.
        kept: names of the model that keep their first values.
        unused: names of saved weights that the model does not take.
        formats: how many floating weights were saved in each format.
    """

    weights: dict[str, Tensor]
    kept: list[str]
    unused: list[str]
    formats: Mapping[torch.dtype, int]

    def remarks(self) -> list[str]:
        """A line each on what was left out, and on parameters that start from other formats."""
        lines = []
        if self.kept:
            lines.append(f"with their first values: {', '.join(self.kept)}")
        if self.unused:
            lines.append(f"not used: {', '.join(self.unused)}")
        for dtype, count in self.formats.items():
            if dtype == torch.float64:
                lines.append(f"{count} tensors are float64, and are rounded where fp32 is kept")
            elif dtype != torch.float32:
                start = ": masters start from half values" if dtype in HALF else ""
                lines.append(
                    f"{count} tensors are {dtype_name(dtype)}, and were widened exactly{start}"
                )
        return lines


def fitted(saved: Weights, own: Weights, left_out: Sequence[str], source: str) -> Fitted:
    """The saved weights for a model with the weights `own`, except those that may differ.

    A name that the model ties to another one, and that was not saved, takes the other's weight.

    Args:
        saved: by name, under the model's names.
        own: the model's; a left-out name keeps this value.
        left_out: name patterns as in `head.*`.
        source: the value of `init_from`, for messages.

    Raises:
        ConfigError: a pattern matches no name, or no weight is left.
        CheckpointError: names are missing or unexpected, or shapes or kinds differ; all are listed.
    """
    _refuse_idle(left_out, {*saved, *own})

    def wanted(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in left_out)

    saved = {**saved, **_tied(saved, own)}
    missing = [name for name in own if wanted(name) and name not in saved]
    unexpected = [name for name in saved if wanted(name) and name not in own]
    taken = [name for name in own if wanted(name) and name in saved]
    lists = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": list(_of_other_shape(taken, saved, own)),
        "of another kind": list(_of_other_kind(taken, saved, own)),
        "tied, and of different values": list(_of_other_value(taken, saved, own)),
    }
    if any(lists.values()) or not taken:
        found = "; ".join(f"{what}: {few(names)}" for what, names in lists.items() if names)
        first = next((name for names in lists.values() for name in names), "head.weight")
        raise CheckpointError(
            f"init_from={source}: {found or 'nothing is left to take'}; use the model it was made "
            f"with,{_renaming(saved, own, missing, unexpected)} or name what may differ: "
            f"init_from_except=[{first.split()[0].rpartition('.')[0] or first.split()[0]}.*]"
        )
    return Fitted(
        {**own, **{name: _wide(saved[name]) for name in taken}},
        [name for name in own if name not in taken],
        [name for name in saved if name not in taken],
        Counter(saved[name].dtype for name in taken if saved[name].is_floating_point()),
    )


def _refuse_idle(patterns: Sequence[str], names: Set[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"init_from_except={pattern}: matches no weight of the checkpoint or the model; "
                f"{hint(pattern, names)}"
            )


def _wide(tensor: Tensor) -> Tensor:
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.float() if narrow else tensor


def _of_other_shape(names: Sequence[str], saved: Weights, own: Weights) -> Iterator[str]:
    for name in names:
        if saved[name].shape != own[name].shape:
            yield f"{name} {tuple(saved[name].shape)} for {tuple(own[name].shape)}"


def _of_other_kind(names: Sequence[str], saved: Weights, own: Weights) -> Iterator[str]:
    for name in names:
        if _kind(saved[name]) != _kind(own[name]):
            yield f"{name} {_kind(saved[name])} for {_kind(own[name])}"


def _kind(tensor: Tensor) -> str:
    """What a copy must not change without notice: all floating formats are one kind."""
    if tensor.is_quantized:
        return dtype_name(tensor.dtype)
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "floating" if tensor.is_floating_point() else dtype_name(tensor.dtype)


def _of_other_value(names: Sequence[str], saved: Weights, own: Weights) -> Iterator[str]:
    """Two names of one weight of the model, for which two values were saved."""
    first: dict[tuple[object, ...], str] = {}
    for name in names:
        if own[name].numel():
            other = first.setdefault(_place(own[name]), name)
            if other != name and not torch.equal(saved[name], saved[other]):
                yield f"{other} and {name}"


def _tied(saved: Weights, own: Weights) -> dict[str, Tensor]:
    """What was not saved because the model has the same memory under another name."""
    places = {_place(own[name]): name for name in own if name in saved and own[name].numel()}
    left = {name: _place(tensor) for name, tensor in own.items() if name not in saved}
    return {name: saved[places[place]] for name, place in left.items() if place in places}


def _place(tensor: Tensor) -> tuple[object, ...]:
    return address_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _renaming(
    saved: Weights, own: Weights, missing: Sequence[str], unexpected: Sequence[str]
) -> str:
    """The pattern that would name most of what is unexpected as the model does, as a clause."""
    counts: Counter[tuple[str, str]] = Counter()
    by_last: dict[str, list[str]] = {}
    for name in missing:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    for old in unexpected:
        for new in by_last.get(old.rpartition(".")[2], []):
            if saved[old].shape == own[new].shape:
                counts[_prefixes(old, new)] += 1
    if not counts:
        return ""
    (before, after), _ = counts.most_common(1)[0]
    return f" name its weights as the model does: init_from_names={{{before}*:{after}*}},"


def _prefixes(old: str, new: str) -> tuple[str, str]:
    """What is left of two names without the dotted parts that both end with, each with its dot."""
    one, other = old.split("."), new.split(".")
    while one and other and one[-1] == other[-1]:
        one.pop()
        other.pop()
    return "".join(f"{part}." for part in one), "".join(f"{part}." for part in other)
