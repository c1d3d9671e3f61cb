"""Saved weights for a model: under its names, and nothing left out in silence.

renamed    gives saved weights the model's names, by patterns
fitted     takes those that fit; what is missing, unused or of another shape is refused, unless
           it is named as what may differ
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from mpframe.errors import CheckpointError, ConfigError, nearest
from mpframe.tree import HALF, dtype_name

_WRAPPERS = ("module.", "_orig_mod.")  # Of DistributedDataParallel, and of torch.compile.


@dataclass(frozen=True)
class Fitted:
    """Weights for the whole model.

    Attributes:
        weights: by the model's names, in the formats they were saved in.
        kept: names of the model that keep their first values.
        unused: names of saved weights that the model does not take.
    """

    weights: dict[str, Tensor]
    kept: list[str]
    unused: list[str]

    def remarks(self) -> list[str]:
        """A line each on what was left out, and on parameters that start from other formats."""
        lines = []
        if self.kept:
            lines.append(f"with their first values: {', '.join(self.kept)}")
        if self.unused:
            lines.append(f"not used: {', '.join(self.unused)}")
        taken = [self.weights[name] for name in self.weights.keys() - set(self.kept)]
        formats = Counter(w.dtype for w in taken if w.is_floating_point())
        for dtype, count in formats.items():
            if dtype in HALF:
                lines.append(
                    f"{count} tensors are {dtype_name(dtype)}, and were widened exactly: masters "
                    "start from half values"
                )
            elif dtype not in (torch.float32, torch.float64):
                lines.append(f"{count} tensors are {dtype_name(dtype)}, and were widened exactly")
            elif dtype == torch.float64:
                lines.append(f"{count} tensors are float64, and are rounded where fp32 is kept")
        return lines


def renamed(
    saved: Mapping[str, Tensor], names: Mapping[str, str], own: Set[str], source: str
) -> dict[str, Tensor]:
    """Saved weights under new names.

    A wrapper's prefix that all names have (`module.`) is taken off first.

    Args:
        saved: by name.
        names: pattern -> pattern, as in `backbone.*` -> `encoder.*`. Each `*` on the right stands
            for what the one in its place on the left matched. The first that matches a name counts.
        own: the model's names.
        source: the value of `init_from`, for messages.

    Raises:
        ConfigError: a pattern matches no name, or has fewer `*` than its replacement.
        CheckpointError: two weights would get one name.
    """
    saved = _unwrapped(saved, own)
    rules = [(_compiled(old, new), old, new) for old, new in names.items()]
    idle = {old for _, old, _ in rules}
    result: dict[str, Tensor] = {}
    for name, tensor in saved.items():
        to = name
        for rule, old, new in rules:
            match = rule.fullmatch(name)
            if match is not None:
                idle.discard(old)
                parts = iter(match.groups())
                to = re.sub(r"\*", lambda _, parts=parts: next(parts), new)  # type: ignore[misc]
                break
        if to in result:
            raise CheckpointError(
                f"init_from={source}: two of its weights would be {to} by init_from_names; "
                "let each pattern give names of its own"
            )
        result[to] = tensor
    for old in sorted(idle):
        raise ConfigError(
            f"init_from_names={old}: matches no weight of {source} that an earlier pattern leaves; "
            f"{_hint(old, saved)}"
        )
    return result


def fitted(
    saved: Mapping[str, Tensor], own: Mapping[str, Tensor], left_out: Sequence[str], source: str
) -> Fitted:
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
    differing = [
        f"{name} {tuple(saved[name].shape)} for {tuple(own[name].shape)}"
        for name in taken
        if saved[name].shape != own[name].shape
    ]
    other = [
        f"{name} {_kind(saved[name])} for {_kind(own[name])}"
        for name in taken
        if _kind(saved[name]) != _kind(own[name])
    ]
    lists = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": differing,
        "of another kind": other,
    }
    found = "; ".join(f"{what}: {_few(names)}" for what, names in lists.items() if names)
    if found or not taken:
        first = (missing + unexpected + differing + other or ["head"])[0].split()[0]
        first = first.rpartition(".")[0]
        raise CheckpointError(
            f"init_from={source}: {found or 'nothing is left to take'}; use the model it was made "
            f"with,{_rename(saved, own, missing, unexpected)} or name what may differ: "
            f"init_from_except=[{first or 'head'}.*]"
        )
    weights = {**own, **{name: saved[name] for name in taken}}
    return Fitted(
        weights,
        [name for name in own if name not in taken],
        [name for name in saved if name not in taken],
    )


def _unwrapped(saved: Mapping[str, Tensor], own: Set[str]) -> Mapping[str, Tensor]:
    for prefix in _WRAPPERS:
        wrapped = all(name.startswith(prefix) for name in saved)
        if wrapped and not any(name.startswith(prefix) for name in own):
            return _unwrapped({n.removeprefix(prefix): t for n, t in saved.items()}, own)
    return saved


def _compiled(old: str, new: str) -> re.Pattern[str]:
    if new.count("*") > old.count("*"):
        raise ConfigError(
            f"init_from_names={{{old}: {new}}}: each * on the right stands for one on the left, "
            "which has fewer"
        )
    return re.compile("(.*)".join(map(re.escape, old.split("*"))))


def _tied(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was not saved because the model has the same memory under another name."""
    places: dict[tuple[object, ...], str] = {}
    for name, tensor in own.items():
        if name in saved and tensor.numel():
            places.setdefault(_place(tensor), name)
    return {
        name: saved[places[_place(tensor)]]
        for name, tensor in own.items()
        if name not in saved and tensor.numel() and _place(tensor) in places
    }


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _kind(tensor: Tensor) -> str:
    """What a copy must not change without notice: floating formats are one kind."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return str(tensor.layout if not tensor.is_quantized else tensor.dtype).partition(".")[2]
    return "floating" if tensor.is_floating_point() else dtype_name(tensor.dtype)


def _rename(
    saved: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    missing: Sequence[str],
    unexpected: Sequence[str],
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
    (old, new), _ = counts.most_common(1)[0]
    return f" name its weights as the model does: init_from_names={{{old}*:{new}*}},"


def _prefixes(old: str, new: str) -> tuple[str, str]:
    """What is left of two names without the dotted parts that both end with, each with its dot."""
    one, other = old.split("."), new.split(".")
    while one and other and one[-1] == other[-1]:
        one.pop()
        other.pop()
    return "".join(f"{part}." for part in one), "".join(f"{part}." for part in other)


def _refuse_idle(patterns: Sequence[str], names: Set[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"init_from_except={pattern}: matches no weight of the checkpoint or the model; "
                f"{_hint(pattern, names)}"
            )


def _hint(pattern: str, names: Iterable[str]) -> str:
    names = sorted(names)
    return nearest(pattern, names) or "there are " + _few(names)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
