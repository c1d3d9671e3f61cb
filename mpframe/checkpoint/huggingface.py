"""A folder as on Hugging Face's hub, which transformers or timm loads if the model is theirs.

It has config.json, model.safetensors with the sidecar of every export, and the model card. The
library writes its files, for a text model of transformers also the tokenizer, and must build a
model with the same weights from them. Any other model is saved with the arguments of its class.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpframe.checkpoint.export import as_json, as_safetensors, beside, sidecar
from mpframe.checkpoint.export_graph import quiet
from mpframe.checkpoint.folder import hidden_path
from mpframe.checkpoint.saving import put_in_place
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError
from mpframe.core.user_code import describe_error, name_of
from mpframe.files.durable import sync_paths
from mpframe.files.text import few, markdown

Facts = Mapping[str, Any]  # of the sidecar

_WEIGHTS = "model.safetensors"


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
    with quiet():
        for part in parts:
            part.save_pretrained(folder, max_shard_size=sys.maxsize)
    _refuse_changed(model, lambda: type(model).from_pretrained(folder, local_files_only=True))


def _save_timm(model: Any, folder: Path, facts: Facts) -> None:
    import timm

    names, how = facts["class_names"] or (), facts["preprocessing"] or {}
    if how.keys() >= {"mean", "std", "size", "value_range"}:  # as `Normalize` describes them
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


_USES = {
    "transformers": 'import {home}\n\nmodel = {home}.{kind}.from_pretrained("{name}")',
    "timm": 'import timm\n\nmodel = timm.create_model("local-dir:{name}", pretrained=True).eval()',
    "torch": "import json, {home}\nfrom safetensors.torch import load_file\n\n"
    'model = {home}.{kind}(**json.load(open("{name}/config.json"))["arguments"]).eval()\n'
    'model.load_state_dict(load_file("{name}/model.safetensors"))',
}


def format_card(name: str, library: str, model: nn.Module, facts: Facts) -> str:
    """Return the card of the folder `name`, whose model `library` loads, from a sidecar's facts."""
    home, kind = type(model).__module__, type(model).__name__
    if library == "torch":
        home, _, kind = str(facts["model"]["target"]).rpartition(".")
    home = "transformers" if home.startswith("transformers.") else home
    use = _USES[library].format(home=home, kind=kind, name=name)
    precision = facts["precision"] or {}
    half = len(precision.get("half_weights", ()))
    sections = {
        "Data": {"class_names": facts["class_names"], **(facts["preprocessing"] or {})},
        "Precision": {**precision, "half_weights": half, **facts["weights"]},
        "Training": {**facts["run"], **(facts["versions"]["trained_with"] or {})},
    }
    return "\n\n".join([
        f"---\nlibrary_name: {library}\ntags: [mpframe]\n---\n\n# {name}\n\n```python\n{use}\n```",
        f"## Metrics\n\n{_metrics(facts)}",
        *(f"## {title}\n\n{table}" for title, rows in sections.items() if (table := _table(rows))),
    ]) + "\n"  # fmt: skip


def _metrics(facts: Facts) -> str:
    """Return the measurements of these weights, with the number of samples of each."""
    metrics, run = facts["metrics"], facts["metrics"]["run"] or {}
    last = run.get("steps", 0) + run.get("skipped_steps", 0)  # A checkpoint's step counts both.
    tested = {"best": run.get("best_step"), "last": last}.get(run.get("tested", ""))
    measured = dict(metrics["checkpoint"] or {})
    if tested == facts["run"]["step"]:
        measured |= {key: value for key, value in run.items() if key.startswith("test_")}
    if not measured or metrics["weights"] != facts["weights"]["kind"]:
        return "The run has measured nothing with these weights."
    counts = facts["run"]["samples"] or {}
    samples = {key: counts.get(key.partition("_")[0], "unknown") for key in measured}
    rows = [(key, str(value), str(samples[key])) for key, value in measured.items()]
    return markdown([("metric", "value", "samples"), *rows], right=(1, 2))


def _table(facts: Facts) -> str:
    """Return the known facts, if there are any, except a vocabulary, which has a file."""
    known = {k: v for k, v in facts.items() if v not in (None, "", [], {}) and k != "vocab"}
    plain = {k: re.sub(r"[{}'\[\]]", "", f"{v}") for k, v in known.items() if k != "command"}
    return markdown([("", ""), *{**known, **plain}.items()]) if known else ""
