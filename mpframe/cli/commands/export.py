"""Export a checkpoint as a file or folder for anybody, with a sidecar about it.

Usage: mpframe export checkpoint=PATH out=PATH [format=...] [weights=...] [option=value] ...

    mpframe export checkpoint=runs/2026-11-21/05-45-42 out=model.safetensors
    mpframe export checkpoint=runs/mine out=half.safetensors weights_dtype=float16
    mpframe export checkpoint=runs/mine out=model.onnx format=onnx weights=ema
    mpframe export checkpoint=runs/mine out=model.pt2 format=torch_export dynamic=[length]
    mpframe export checkpoint=runs/mine out=my-bert format=huggingface

Options:
    checkpoint=PATH       required: a run or one checkpoint. A run stands for the checkpoint
                          that was tested, and if none was for its newest one
    out=FILE              required
    format=safetensors|state_dict|onnx|torch_export|huggingface    default: safetensors
    weights=trained|ema   default: as the run was validated. ema: the averages of trainer.ema_decay
    weights_dtype=fp32|float16|bfloat16    rounded once, from the fp32 masters (default: fp32)
    dynamic=[length]      for a graph: the sizes besides the batch that may vary: length, height,
                          width, or any as in dynamic={images:{2:rows}} (default: of integers)
    overwrite=true        replace a file or an exported folder (default: false)
    model.OPTION=VALUE    for a graph or a folder: options of the model
    --config-dir=FOLDER, --config-name=NAME    for these: as for mpframe train

The sidecar is FILE.json. huggingface writes a folder with a model card, which transformers or timm
loads if the model is theirs.

safetensors and state_dict hold weights. onnx and torch_export hold the model as a graph, which runs
without its code, for any batch size and for any length of a text that the model's code does not
fix. It takes inputs of weights_dtype and computes in it. For a graph or a folder, a class that is
not mpframe's must be named again: model._target_=my_pkg.Net. onnx needs pip install mpframe[onnx].
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mpframe import checkpoint
from mpframe.checkpoint import export, export_graph, huggingface
from mpframe.checkpoint.export import FORMATS, GRAPHS
from mpframe.checkpoint.export_graph import DTYPES
from mpframe.checkpoint.state import KINDS, read_validated_kind, weights_of
from mpframe.cli.program import command, refuse_words, take_own, writing
from mpframe.cli.restored import checkpoint_of
from mpframe.config.overrides import parse_words, take_source
from mpframe.config.redaction import redact, secrets_of
from mpframe.config.stored import config_of
from mpframe.core.errors import ConfigError
from mpframe.core.tree import dtype_name
from mpframe.files.text import few, printable, say
from mpframe.run.parts import build_model

_FOLDER = "huggingface"
_DEFAULTS = {
    "checkpoint": "",
    "out": "",
    "format": "safetensors",
    "weights": "",  # as the run was validated
    "weights_dtype": "fp32",
    "dynamic": "",  # sizes of integer inputs
    "overwrite": "false",
}
_CHOICES = {
    "format": tuple(FORMATS),
    "weights": KINDS,
    "weights_dtype": tuple(DTYPES),
    "overwrite": ("false", "true"),
}


@command
def main(arguments: list[str]) -> None:
    options, given = _check(arguments)
    out, form, dtype = Path(options["out"]), options["format"], options["weights_dtype"]
    taken = huggingface.refuse_taken if form == _FOLDER else export.refuse_taken
    taken(out, options["overwrite"] == "true")
    if form == "onnx":
        export_graph.require_onnx()
    path = checkpoint_of(Path(options["checkpoint"]))
    snapshot, folder = checkpoint.read(path), checkpoint.newest(path)
    kind = options["weights"] or read_validated_kind(snapshot.state)
    weights = weights_of(snapshot.state, kind, folder)
    tensors, saturated = export_graph.convert_weights(weights, dtype)
    facts = export.facts_of(snapshot, folder)
    precise = dtype_name(DTYPES[dtype])
    facts["weights"] = {"kind": kind, "dtype": precise, "saturated": saturated}
    if form in GRAPHS:  # Refused before the model is built.
        facts["computes_in"] = precise
        facts["inputs"] = export_graph.graph_inputs(facts, dtype)
    model = None
    if form in (*GRAPHS, _FOLDER):
        config = config_of(snapshot.config, folder / "config.yaml", given)
        facts["model"] = export.model_facts(config.model)
        model = build_model(config)
        export_graph.load_exported(model, tensors, dtype)
    if form == _FOLDER and model is not None:
        with writing(out):
            library = huggingface.write_folder(out, model, _without_secrets(facts))
        guide = f"a {library} model, and its README.md"
    else:
        content = _content(options, model, tensors, facts)
        with writing(out):
            export.write(out, content, form, _without_secrets(facts))
        guide = export.beside(out).name
    say(printable(_text(options, len(tensors), facts, guide)))


def _content(
    options: dict[str, str],
    model: nn.Module | None,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
) -> bytes:
    """Return the bytes of a file of weights, or of a graph, whose inputs go into the facts."""
    if model is None:
        if options["format"] == "state_dict":
            return export.as_state_dict(tensors)
        return export.as_safetensors(tensors, _without_secrets(facts))
    inputs = export_graph.without_labels(facts["inputs"], model)
    dynamic = options["dynamic"] and parse_words([f"dynamic={options['dynamic']}"])
    sizes = export_graph.open_sizes(inputs, dynamic[0].value() if dynamic else None)
    graph = export_graph.trace_model(model, inputs, sizes)
    facts["inputs"] = export_graph.describe_inputs(graph, inputs, sizes)
    words = export.as_json(_without_secrets(facts))
    if options["format"] == "onnx":
        return export_graph.as_onnx(graph, words, facts["inputs"])
    return export_graph.as_pt2(graph, words)


def _without_secrets(facts: dict[str, Any]) -> dict[str, Any]:
    return dict(redact(facts, secrets_of([])))


def _check(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    taken, given = take_own(arguments, _DEFAULTS, "checkpoint", _CHOICES)
    options = {**_DEFAULTS, **taken}
    if not options["out"]:
        raise ConfigError("out: must be given, e.g. out=model.safetensors")
    out, form = Path(options["out"]), options["format"]
    for other, endings in FORMATS.items():
        if out.suffix in endings and other != form and FORMATS[form]:
            fits = f"a file of format={form} ends in {FORMATS[form][0]}"
            raise ConfigError(f"out={out}: {fits}; rename it, or give format={other}")
    if options["dynamic"] and form not in GRAPHS:
        way_out = "give format=onnx or torch_export"
        raise ConfigError(f"dynamic={options['dynamic']}: format={form} has no graph; {way_out}")
    if form not in (*GRAPHS, _FOLDER):  # No model is built, which would take options.
        refuse_words(take_source(given)[1], _DEFAULTS)
    return options, given


def _text(options: dict[str, str], count: int, facts: dict[str, Any], guide: str) -> str:
    held, dtype = facts["weights"]["saturated"], options["weights_dtype"]
    worst = sorted(held, key=lambda name: -held[name])
    beyond = f"; {sum(held.values())} values beyond the range of {dtype} are held at its end "
    unknown = [key for key in ("inputs", "preprocessing", "class_names") if facts[key] is None]
    return (
        f"{options['out']}: {count} tensors in {dtype}, weights "
        f"{facts['weights']['kind']}, step {facts['run']['step']}"
        + f"{beyond}({few(worst, 5)})" * bool(held)
        + f"; {guide} says how to use them"
        + f", but for {', '.join(unknown)}, which the run did not know" * bool(unknown)
    )
