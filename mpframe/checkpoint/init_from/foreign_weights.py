"""Weights that another program wrote: the values alone, and no code.

    model.safetensors               one file
    model.safetensors.index.json    names the files, called shards, in which the weights are
    resnet18.pth, model.bin         a state dict by torch.save, alone or as an entry of a dict
    a folder                        of Hugging Face's save_pretrained, with one of the above

Such files may come from anybody, as checkpoints do: a shard lies beside its index, a pickle runs no
code, and nothing takes more memory than its file has bytes.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from mpframe.checkpoint.untrusted import damaged_if_raising, load_untrusted
from mpframe.errors import CheckpointError
from mpframe.files.plain_file import open_regular, read_regular

_INDEX = ".index.json"
_KINDS = (".safetensors", ".bin")
_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model")
# What a folder of weights may hold, the better format first.
_FILES = tuple(f"{stem}{kind}{end}" for kind in _KINDS for stem in _STEMS for end in (_INDEX, ""))
# Where trainers put the weights beside all else, the commonest first.
_ENTRIES = ("state_dict", "model_state_dict", "model", "module", "net", "params")
_LARGEST_INDEX = 2**24  # bytes
_OTHER = "use another file of weights"
_CODE = (
    "holds code or objects, which are never loaded; save its state dict alone, or use its "
    "safetensors file"
)


@dataclass(frozen=True)
class ForeignWeights:
    """What a file, or all shards of an index, hold.

    Attributes:
        tensors: by name, on the CPU, in the formats of the file.
        left: entries of the file that are no weights, or other ones; they are not used.
    """

    tensors: dict[str, Tensor]
    left: tuple[str, ...] = ()


def is_foreign(path: Path) -> bool:
    """Whether `path` is a file, or a folder with a file of weights: no checkpoint of mpframe."""
    return path.is_file() or (path.is_dir() and _in_folder(path) is not None)


def read_foreign(path: Path) -> ForeignWeights:
    """All weights of a file, of an index, or of a folder with one of them.

    Args:
        path: what `is_foreign` accepts. It may be a link; a link within its folder may only lead to
            the same folder, or to the store of Hugging Face's cache beside it.

    Raises:
        CheckpointError: a file is missing, damaged or crafted, or holds no weights; or the shards
            are not what the index says.
    """
    if not path.is_dir():
        return _read_file(path)
    found = _in_folder(path)
    if found is None:
        raise CheckpointError(f"{path}: holds none of {', '.join(_FILES)}; name a file")
    return _read_file(_beside(path, found.name))


def _in_folder(folder: Path) -> Path | None:
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def _read_file(path: Path) -> ForeignWeights:
    if path.name.endswith(_INDEX):
        return _read_shards(path)
    with damaged_if_raising(path, "not a file of weights", _OTHER):
        open_regular(path, "rb", follow=True).close()
        if path.suffix == ".safetensors":
            return ForeignWeights(load_file(path))
        return _weights_in(load_untrusted(path, _CODE, old_format=True), path)


def _read_shards(index: Path) -> ForeignWeights:
    with damaged_if_raising(index, "not an index of weights", _OTHER):
        places = json.loads(read_regular(index.resolve(), _LARGEST_INDEX))["weight_map"]
        shards = sorted(set(places.values()))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        own = _read_file(_beside(index.parent, shard)).tensors
        named = {name for name, place in places.items() if place == shard}
        for name in sorted(named ^ own.keys()):
            what = "misses" if name in named else "also holds"
            raise CheckpointError(f"{index}: {shard} {what} {name}, against the index; {_OTHER}")
        tensors |= own
    return ForeignWeights(tensors)


def _beside(folder: Path, name: Any) -> Path:
    """A file of `folder`; a link may lead within it, or into the store of the same cache.

    Hugging Face's cache has `snapshots/<version>/<name>` as a link to `blobs/<digest>`.
    """
    path = folder / str(name)
    real = Path(os.path.realpath(path))  # Not resolve, which fails on a link to itself.
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if path.name != name or real.parent not in allowed:
        raise CheckpointError(
            f"{path}: refused, it leads out of its folder; put the file itself there"
        )
    return path


def _weights_in(state: Any, path: Path) -> ForeignWeights:
    """The state dict in what was saved, and the names of all else."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a state dict; {_OTHER}")
    if _tensors_of(state):
        return ForeignWeights(_tensors_of(state), _names_of(state.keys() - _tensors_of(state)))
    for entry in _ENTRIES:
        inner = state.get(entry)
        if isinstance(inner, Mapping) and _tensors_of(inner):
            tensors = _tensors_of(inner)
            beside = _names_of(inner.keys() - tensors)
            return ForeignWeights(tensors, _names_of(state.keys() - {entry}) + beside)
    raise CheckpointError(
        f"{path}: holds no state dict, but {', '.join(_names_of(state))[:200] or 'nothing'}; save "
        "the state dict alone"
    )


def _tensors_of(state: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in state.items()
        if isinstance(name, str) and isinstance(tensor, Tensor)
    }


def _names_of(keys: Any) -> tuple[str, ...]:
    return tuple(sorted(map(str, keys)))
