"""A folder as on Hugging Face's hub, which transformers or timm loads if the model is theirs.

It has config.json, model.safetensors with the sidecar of every export, and the model card. For
transformers it also has the tokenizer or the preprocessing of images, if the run knows them. The
library writes its files and must build a model with the same weights from them. Any other model is
saved with the arguments of its class.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpframe.checkpoint.export import as_json, as_safetensors, beside, sidecar
from mpframe.checkpoint.export_graph import quiet
from mpframe.checkpoint.folder import hidden_path
from mpframe.checkpoint.model_card import Facts, format_card
from mpframe.checkpoint.saving import put_in_place
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError
from mpframe.core.user_code import describe_error, name_of
from mpframe.files.durable import sync_paths
from mpframe.files.text import few

_WEIGHTS = "model.safetensors"
_IMAGES = {"mean", "std", "size", "resize", "value_range"}  # as `Normalize` describes them


def refuse_taken(out: Path, overwrite: bool) -> None:
    """Refuse a place where something is, except, with `overwrite`, an exported folder."""
    exported = beside(out / _WEIGHTS).is_file() and not out.is_symlink()
    if os.path.lexists(out) and not (overwrite and exported):
        way_out = "choose another folder, or replace an exported one with overwrite=true"
        raise ConfigError(f"out={out}: {out} exists; {way_out}")


def _library_of(model: nn.Module) -> str:
    """Return the library whose model this is, or torch."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        return "transformers"
    timms = type(model).__module__.startswith("timm.") and hasattr(model, "pretrained_cfg")
    return "timm" if timms else "torch"


def write_folder(out: Path, model: nn.Module, facts: Facts) -> str:
    """Write a model with its exported weights, whole or not at all, and return its library.

    CheckpointError, UserCodeError: its library does not build it again. OSError: there is no room.
    """
    new, library = hidden_path(out, "new"), _library_of(model)
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        _SAVE[library](model, new, facts)
        text = sidecar(facts, _WEIGHTS, "huggingface", (new / _WEIGHTS).read_bytes())
        beside(new / _WEIGHTS).write_text(text)
        (new / "README.md").write_text(format_card(out.name, library, model, facts))
        sync_paths([*new.iterdir()])
        put_in_place(new, out)
        return library
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _save_torch(model: nn.Module, folder: Path, facts: Facts) -> None:
    tensors = {name: held.clone() for name, held in model.state_dict().items()}
    (folder / _WEIGHTS).write_bytes(as_safetensors(tensors, facts))
    (folder / "config.json").write_text(as_json(facts["model"], indent=2) + "\n")


def _save_transformers(model: Any, folder: Path, facts: Facts) -> None:
    import transformers

    names, how, parts = facts["class_names"] or (), facts["preprocessing"] or {}, [model]
    if len(names) == model.config.num_labels:
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: number for number, name in enumerate(names)}
    if how.get("tokenizer") == "WordPiece":
        pieces = {piece: number for number, piece in enumerate(how["vocab"].split("\n"))}
        longest = {"model_max_length": how["max_tokens"]}
        parts += [transformers.BertTokenizer(vocab=pieces, do_lower_case=True, **longest)]
    if how.keys() >= _IMAGES:
        side, scale = min(how["size"]), {"rescale_factor": 1 / how["value_range"][1]}
        sizes = {"size": {"shortest_edge": side}, "crop_size": side, "resample": 2}  # bilinear
        norm = {"image_mean": how["mean"], "image_std": how["std"]}
        flags = dict.fromkeys(("do_resize", "do_center_crop"), how["resize"] is not None)
        flags["do_convert_rgb"] = len(how["mean"]) == 3
        parts += [transformers.CLIPImageProcessor(**sizes, **scale, **norm, **flags)]
    with quiet():
        for part in parts:
            part.save_pretrained(folder, max_shard_size=sys.maxsize)
    _refuse_changed(model, lambda: type(model).from_pretrained(folder, local_files_only=True))


def _save_timm(model: Any, folder: Path, facts: Facts) -> None:
    import timm

    names, how = facts["class_names"] or (), facts["preprocessing"] or {}
    if how.keys() >= _IMAGES:
        scale = how["value_range"][1] / 255  # timm divides pixels by 255.
        norm = {key: tuple(value * scale for value in how[key]) for key in ("mean", "std")}
        sizes = {"input_size": (len(how["mean"]), *how["size"]), "interpolation": "bilinear"}
        kept = {k: held for k, held in model.pretrained_cfg.items() if not k.startswith("test_")}
        model.pretrained_cfg = {**kept, **norm, **sizes, "crop_pct": 1.0}
    labels = {"label_names": names} if len(names) == model.num_classes else {}
    with quiet():
        timm.models.save_for_hf(model, folder, model_config=labels, safe_serialization=True)
    source = f"local-dir:{folder.absolute()}"
    _refuse_changed(model, lambda: timm.create_model(source, pretrained=True))


_SAVE = {"transformers": _save_transformers, "timm": _save_timm, "torch": _save_torch}


def _refuse_changed(model: nn.Module, load: Callable[[], nn.Module]) -> None:
    """Refuse a model that its library does not build again, with the same weights."""
    found = f"format=huggingface: {name_of(model)} loaded from its config.json is another model"
    try:
        with quiet():
            ours, loaded = model.state_dict(), load().state_dict()
    except Exception as error:  # Whatever a library raises.
        raise UserCodeError(f"{found}: {describe_error(error)}; use format=safetensors") from error
    both = ours.keys() & loaded.keys()
    alike = {n for n in both if torch.equal(ours[n], loaded[n].to(ours[n].dtype))}
    if other := sorted({*ours, *loaded} - alike):
        raise CheckpointError(f"{found}: {few(other, 5)}; use format=safetensors")
