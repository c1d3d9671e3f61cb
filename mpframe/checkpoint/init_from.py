"""The weights that a run begins with, from another run or from another program.

The files of other programs (safetensors, shards, state dicts) are read without running any code.
Patterns give the weights the model's names. Then all weights must fit, except those that the user
names. run/resume.py calls these steps in turn.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from mpframe.checkpoint.state import place_of
from mpframe.checkpoint.untrusted import load_untrusted, raise_as_damaged
from mpframe.core.comm import part_for, shard_like
from mpframe.core.errors import CheckpointError, ConfigError, nearest
from mpframe.core.tree import dtype_name
from mpframe.files.plain_file import open_regular, read_regular
from mpframe.files.text import few

Weights = Mapping[str, Tensor]
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel's and torch.compile's


def rename_weights(
    saved: Weights, names: Mapping[str, str], model: Set[str], source: str
) -> dict[str, Tensor]:
    """Return saved weights under new names, first without a wrapper's prefix that all have.

    names: pattern to pattern, as in `backbone.*` -> `encoder.*`. Each `*` on the right becomes the
        match of the same one on the left, and the first pattern that matches a name is used.
    model: the model's names. source: the value of `init_from`.
    """
    rules, result = [_rule(old, new) for old, new in names.items()], dict[str, Tensor]()
    for name, tensor in _unwrap(saved, model).items():
        made = (rule(name) for rule in rules)
        new = next((one for one in made if one is not None), name)
        if new in result:
            raise CheckpointError(
                f"init_from={source}: two of its weights would be {new} by init_from_names; "
                "let each pattern give different names"
            )
        result[new] = tensor
    return result


def _rule(old: str, new: str) -> Callable[[str], str | None]:
    """Make a function that renames by a pattern, and returns None for a name without a match."""
    if new.count("*") > old.count("*"):
        raise ConfigError(
            f"init_from_names={{{old}: {new}}}: each * on the right stands for one on the "
            "left, which has fewer"
        )
    pattern = re.compile("(.*)".join(map(re.escape, old.split("*"))))

    def applied(name: str) -> str | None:
        match = pattern.fullmatch(name)
        parts = iter(match.groups() if match else ())
        return re.sub(r"\*", lambda _: next(parts), new) if match else None

    return applied


def _unwrap(saved: Weights, model: Set[str]) -> Weights:
    for prefix in _WRAPPERS:
        wrapped = all(name.startswith(prefix) for name in saved)
        if wrapped and not any(name.startswith(prefix) for name in model):
            return _unwrap({n.removeprefix(prefix): t for n, t in saved.items()}, model)
    return saved


class Fitted(NamedTuple):
    """Weights for the whole model by name, in fp32 (float64 if saved so) or not floating."""

    weights: dict[str, Tensor]
    kept: list[str]  # the names of those that keep the model's first values
    unused: list[str]  # the names of the saved ones that are not used


def fit_weights(saved: Weights, model: Weights, left_out: Sequence[str], source: str) -> Fitted:
    """Fit saved weights to a model with the weights `model`.

    Weights that match a pattern of `left_out`, e.g. `head.*`, keep the model's values. A name that
    was not saved, and that the model ties to another one, takes that one's weight. CheckpointError:
    names are missing or unexpected, or shapes or kinds differ; it lists all of them.
    """
    names = {*saved, *model}
    for pattern in left_out:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"init_from_except={pattern}: matches no weight of the checkpoint or the model; "
                f"{nearest(pattern, names) or 'there are ' + few(sorted(names), 5)}"
            )

    saved = {**saved, **_find_tied(saved, model)}
    wanted = {n for n in names if not any(fnmatchcase(n, pattern) for pattern in left_out)}
    missing = [name for name in model if name in wanted and name not in saved]
    unexpected = [name for name in saved if name in wanted and name not in model]
    taken = [name for name in model if name in wanted and name in saved]
    lists = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": _compare(taken, saved, model, lambda tensor: tuple(tensor.shape)),
        "of another kind": _compare(taken, saved, model, _kind),
        "tied, and of different values": list(_of_other_value(taken, saved, model)),
    }
    if any(lists.values()) or not taken:
        found = "; ".join(f"{what}: {few(names, 5)}" for what, names in lists.items() if names)
        differ = [name.split()[0] for names in lists.values() for name in names] or ["head.weight"]
        patterns = dict.fromkeys(re.sub(r"\.[^.]+$", ".*", name) for name in differ)
        raise CheckpointError(
            f"init_from={source}: {found or 'nothing is left to take'}; use the model it was made "
            f"with,{' rename them by init_from_names,' * bool(missing and unexpected)} or name "
            f"what may differ: init_from_except=[{few(patterns, 5).replace(', ', ',')}]"
        )
    return Fitted(
        {**model, **{name: _wide(saved[name], model[name]) for name in taken}},
        [name for name in model if name not in taken],
        [name for name in saved if name not in taken],
    )


def _wide(tensor: Tensor, place: Tensor) -> Tensor:
    """Return a half tensor in fp32: of one that goes to a sharded `place` only this rank's part."""
    narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return shard_like(place, part_for(place, tensor).float()) if narrow else tensor


def _compare(
    names: Sequence[str], saved: Weights, model: Weights, fact: Callable[[Tensor], object]
) -> list[str]:
    pairs = ((name, fact(saved[name]), fact(model[name])) for name in names)
    return [f"{name} {one} for {other}" for name, one, other in pairs if one != other]


def _kind(tensor: Tensor) -> str:
    """Return the kind of a tensor, which a copy must not change: all floating formats are one."""
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "floating" if tensor.is_floating_point() else dtype_name(tensor.dtype)


def _of_other_value(names: Sequence[str], saved: Weights, model: Weights) -> Iterator[str]:
    """Yield two names of one weight of the model for which two values were saved."""
    first: dict[tuple[object, ...], str] = {}
    for name in names:
        if model[name].numel():
            other = first.setdefault(place_of(model[name]), name)
            if other != name and not torch.equal(saved[name], saved[other]):
                yield f"{other} and {name}"


def _find_tied(saved: Weights, model: Weights) -> dict[str, Tensor]:
    """Return the weights that were not saved, and that the model ties to saved ones."""
    found = [name for name in model if name in saved and model[name].numel()]
    places = {place_of(model[name]): name for name in found}
    left = {name: place_of(tensor) for name, tensor in model.items() if name not in saved}
    return {name: saved[places[place]] for name, place in left.items() if place in places}


_INDEX = ".index.json"
_KINDS = (".safetensors", ".bin")
_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model")
# The files of a folder of weights, the better format first.
_FILES = tuple(f"{stem}{kind}{end}" for kind in _KINDS for stem in _STEMS for end in (_INDEX, ""))
# The entries in which trainers save the weights, the most common first.
_ENTRIES = ("state_dict", "model_state_dict", "model", "module", "net", "params")
_LARGEST_INDEX = 2**24  # bytes
_OTHER = "use another file of weights"
_ONLY = "save only its state dict, or use its safetensors file"


def read_foreign(path: Path) -> dict[str, Tensor] | None:
    """Read all weights of a file, of an index, or of a folder with one, by name, on the CPU.

    Return None for another folder, as of a checkpoint, and if there is nothing at `path`.

    `path` may be a link. A link within its folder may only lead to the same folder, or to the store
    of Hugging Face's cache beside it. CheckpointError: a file is missing or damaged, or
    holds code or no weights, or the shards do not match the index.
    """
    if not path.is_dir():
        return _read_file(path) if path.exists() else None
    found = next((name for name in _FILES if (path / name).is_file()), None)
    return None if found is None else _read_file(_beside(path, found))


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.name.endswith(_INDEX):
        return _read_shards(path)
    with raise_as_damaged(path, "not a file of weights", _OTHER):
        open_regular(path, "rb", follow=True).close()
        if path.suffix == ".safetensors":
            return load_file(path)
        return _weights_in(load_untrusted(path, _ONLY), path)


def _read_shards(index: Path) -> dict[str, Tensor]:
    with raise_as_damaged(index, "not an index of weights", _OTHER):
        places = json.loads(read_regular(index.resolve(), _LARGEST_INDEX))["weight_map"]
        shards = sorted(set(places.values()))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        found = _read_file(_beside(index.parent, shard))
        named = {name for name, place in places.items() if place == shard}
        for name in sorted(named ^ found.keys()):
            what = "misses" if name in named else "also holds"
            raise CheckpointError(f"{index}: {shard} {what} {name}, against the index; {_OTHER}")
        tensors |= found
    return tensors


def _beside(folder: Path, name: Any) -> Path:
    """Return a file of `folder`, whose link may only lead within it or to the cache's store.

    Hugging Face's cache has `snapshots/<version>/<name>` as a link to `blobs/<digest>`.
    """
    path = folder / str(name)
    real = Path(os.path.realpath(path))  # Path.resolve fails on a link to itself.
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if path.name != name or real.parent not in allowed:
        raise CheckpointError(
            f"{path}: refused, it leads out of its folder; put the file itself there"
        )
    return path


def _weights_in(state: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict that a saved object is, or has as one of its entries."""
    known = isinstance(state, Mapping)
    for place in [state, *map(state.get, _ENTRIES)] if known else ():
        items = place.items() if isinstance(place, Mapping) else ()
        tensors = {n: t.detach() for n, t in items if isinstance(n, str) and isinstance(t, Tensor)}
        if tensors:
            return tensors
    held = ", ".join(sorted(map(str, state)) if known else [type(state).__name__])
    raise CheckpointError(
        f"{path}: holds no state dict, but {held[:200] or 'nothing'}; save only the state dict"
    )
