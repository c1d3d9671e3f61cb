"""Export a checkpoint as a file for anybody, with a sidecar that explains it.

Usage: mpframe export checkpoint=PATH out=FILE [format=...] [weights=...] [option=value] ...

    mpframe export checkpoint=runs/2026-11-21/05-45-42 out=model.safetensors
    mpframe export checkpoint=runs/mine out=half.safetensors weights_dtype=float16
    mpframe export checkpoint=runs/mine out=model.onnx format=onnx weights=ema
    mpframe export checkpoint=runs/mine out=model.pt2 format=torch_export

Options:
    checkpoint=PATH       a run or one checkpoint; must be given. A run stands for the checkpoint
                          that was tested, and if none was for its newest one
    out=FILE              must be given
    format=safetensors|state_dict|onnx|torch_export    default: safetensors
    weights=trained|ema   default: as the run was validated; ema: the averages of trainer.ema_decay
    weights_dtype=fp32|float16|bfloat16    default: fp32; rounded once, from the fp32 masters
    overwrite=true        replace a file that exists; default: false
    model.OPTION=VALUE    for a graph: options of the model
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train; only a graph needs them

The sidecar is FILE.json.

safetensors and state_dict hold weights. onnx and torch_export hold the model as a graph, which runs
without its code, for any batch size and for any length of a text that the model's code does not
fix. It takes inputs of weights_dtype and computes in it. For a graph a class that is not mpframe's
must be named again, as in model._target_=my_pkg.Net. onnx needs pip install mpframe[onnx].
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint.export import (
    FORMATS,
    GRAPHS,
    as_json,
    as_safetensors,
    as_state_dict,
    beside,
    facts_of,
    model_facts,
    refuse_taken,
    write,
)
from mpframe.checkpoint.export_graph import (
    DTYPES,
    Exported,
    as_onnx,
    as_pt2,
    converted,
    describe_inputs,
    graph_inputs,
    require_onnx,
    traced,
    without_labels,
)
from mpframe.checkpoint.state import KINDS, validated_kind, weights_of
from mpframe.cli.program import command, refuse_unknown, take_own
from mpframe.cli.restored import checkpoint_of
from mpframe.config.overrides import take_source
from mpframe.config.redaction import redacted, secrets_of
from mpframe.config.stored import config_of
from mpframe.core.errors import ConfigError, nearest
from mpframe.core.tree import dtype_name
from mpframe.files.text import printable
from mpframe.run.parts import build_model

_DEFAULTS = {
    "checkpoint": "",
    "out": "",
    "format": "safetensors",
    "weights": "",  # as the run was validated
    "weights_dtype": "fp32",
    "overwrite": "false",
}
_CHOICES = {
    "format": tuple(FORMATS),
    "weights": KINDS,
    "weights_dtype": tuple(DTYPES),
    "overwrite": ("false", "true"),
}


@dataclass(frozen=True)
class Export:
    """An export, read and rounded."""

    options: dict[str, str]  # the command's own
    given: list[str]  # words that change the run's options
    source: Path  # the checkpoint's folder
    snapshot: Snapshot  # its content
    weights: Exported  # in the format asked for


@command
def main(arguments: list[str]) -> None:
    """Export the checkpoint of `checkpoint=...` into `out=...` and a sidecar `out.json`."""
    options, given = _checked(arguments)
    out = Path(options["out"])
    refuse_taken(out, options["overwrite"] == "true")
    if options["format"] == "onnx":
        require_onnx()
    export = _read(options, given)
    facts = _facts_of(export)
    content = _content(export, facts)
    write(out, content, options["format"], _without_secrets(facts))
    print(printable(_text(export, out, facts)))


def _read(options: dict[str, str], given: list[str]) -> Export:
    path = checkpoint_of(Path(options["checkpoint"]))
    snapshot, source = checkpoint.read(path), checkpoint.newest(path)
    options = {**options, "weights": options["weights"] or validated_kind(snapshot.state)}
    weights = weights_of(snapshot.state, options["weights"], source)
    return Export(options, given, source, snapshot, converted(weights, options["weights_dtype"]))


def _facts_of(export: Export) -> dict[str, Any]:
    """Return the sidecar; a graph's also has its inputs and the format it computes in."""
    options, facts = export.options, facts_of(export.snapshot, export.source)
    dtype = dtype_name(DTYPES[options["weights_dtype"]])
    saturated = export.weights.saturated
    facts["weights"] = {"kind": options["weights"], "dtype": dtype, "saturated": saturated}
    if options["format"] in GRAPHS:
        facts["computes_in"] = dtype
        facts["inputs"] = graph_inputs(facts, options["weights_dtype"])
    return facts


def _content(export: Export, facts: dict[str, Any]) -> bytes:
    form, tensors = export.options["format"], export.weights.tensors
    if form == "state_dict":
        return as_state_dict(tensors)
    if form == "safetensors":
        return as_safetensors(tensors, _without_secrets(facts))
    config = config_of(export.snapshot.config, export.source / "config.yaml", export.given)
    facts["model"] = model_facts(config.model)
    model: nn.Module = build_model(config)
    facts["inputs"] = without_labels(facts["inputs"], model)
    graph = traced(model, export.weights, export.options["weights_dtype"], facts["inputs"])
    facts["inputs"] = describe_inputs(graph, facts["inputs"])
    words = as_json(_without_secrets(facts))
    return as_onnx(graph, words) if form == "onnx" else as_pt2(graph, words)


def _without_secrets(facts: dict[str, Any]) -> dict[str, Any]:
    hidden: dict[str, Any] = redacted(facts, secrets_of([], os.environ))
    return hidden


def _checked(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    taken, given = take_own(arguments, _DEFAULTS, "checkpoint")
    options = {**_DEFAULTS, **taken}
    if not options["out"]:
        raise ConfigError("out: must be given, e.g. out=model.safetensors")
    for name, choices in _CHOICES.items():
        refuse_unknown(name, options[name] or None, choices)
    out, form = Path(options["out"]), options["format"]
    for other, endings in FORMATS.items():
        if out.suffix in endings and other != form:
            raise ConfigError(
                f"out={out}: a file of format={form} ends in {FORMATS[form][0]}; rename it, or "
                f"give format={other}"
            )
    if form not in GRAPHS:
        _refuse_more(take_source(given)[1], form)
    return options, given


def _refuse_more(given: list[str], form: str) -> None:
    for word in given:
        name = word.partition("=")[0]
        if name.partition(".")[0] == "model":
            raise ConfigError(
                f"{word}: format={form} builds no model; leave it out, or give format=onnx or "
                "torch_export"
            )
        hint = nearest(name, _DEFAULTS)
        raise ConfigError(f"{word}: no such option; {hint or 'known: ' + ', '.join(_DEFAULTS)}")


def _text(export: Export, out: Path, facts: dict[str, Any]) -> str:
    options, held = export.options, export.weights.saturated
    worst = sorted(held, key=lambda name: -held[name])
    saturation = (
        f"; {sum(held.values())} values beyond the range of {options['weights_dtype']} are held "
        f"at its end ({', '.join(worst[:3])}{', ...' if len(worst) > 3 else ''})"
    )
    unknown = [key for key in ("inputs", "preprocessing", "class_names") if facts[key] is None]
    count, dtype = len(export.weights.tensors), options["weights_dtype"]
    return (
        f"{out}: {count} tensors in {dtype}, weights {options['weights']}, step "
        f"{facts['run']['step']}"
        + saturation * bool(held)
        + f"; {beside(out).name} says how to use them"
        + f", but for {', '.join(unknown)}, which the run did not know" * bool(unknown)
    )
