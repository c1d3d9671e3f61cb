"""The model card of an exported folder: how to use it, its data, metrics, precision and origin.

The metrics are those that the run measured with the very weights in the folder.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from mpframe.checkpoint.init_from import few
from mpframe.files.text import markdown

_CARD = """---
library_name: {library}
tags: [mpframe]
---

# {name}

```python
{usage}
```

## Metrics

{metrics}

## Training

{table}
"""
_USAGE = {
    "transformers": """from {module} import {kind}

model = {kind}.from_pretrained("{name}")""",
    "timm": """import timm

model = timm.create_model("local-dir:{name}", pretrained=True).eval()""",
    "torch": """import json
from safetensors.torch import load_file
from {module} import {kind}

model = {kind}(**json.load(open("{name}/config.json"))["arguments"]).eval()
model.load_state_dict(load_file("{name}/model.safetensors"))""",
}


def format_card(name: str, library: str, model: nn.Module, facts: Mapping[str, Any]) -> str:
    """Return the card of the folder `name`, whose model `library` loads, from a sidecar's facts."""
    module, kind = type(model).__module__, type(model).__name__
    if module.startswith("transformers."):
        module = "transformers"
    usage = _USAGE[library].format(module=module, kind=kind, name=name)
    table = markdown([("", ""), *((key, str(value)) for key, value in _rows(facts).items())])
    return _CARD.format(
        library=library, name=name, usage=usage, metrics=_metrics(facts), table=table
    )


def _metrics(facts: Mapping[str, Any]) -> str:
    metrics, run = facts["metrics"], facts["metrics"]["run"] or {}
    last = run.get("steps", 0) + run.get("skipped_steps", 0)
    measured = dict(metrics["checkpoint"] or {})
    if {"best": run.get("best_step"), "last": last}.get(run.get("tested")) == facts["run"]["step"]:
        measured |= {key: value for key, value in run.items() if key.startswith("test_")}
    if not measured or metrics["weights"] != facts["weights"]["kind"]:
        return "The run has measured nothing with these weights."
    counts = facts["run"]["samples"] or {}
    samples = {key: counts.get(key.partition("_")[0]) for key in measured}
    rows = [(key, str(value), str(samples[key] or "unknown")) for key, value in measured.items()]
    precision = _precision(facts).get("evaluated_in", "an unknown precision")
    return (
        markdown([("metric", "value", "samples"), *rows], right=(1, 2))
        + f"\n\nMeasured in {precision} during the run, before the export rounded the weights."
    )


def _rows(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts by name, without those that are not known."""
    run, weights, precision = facts["run"], facts["weights"], _precision(facts)
    names, versions = facts["class_names"], facts["versions"]["trained_with"] or {}
    how, half = facts["preprocessing"] or {}, precision.get("half_weights")
    rows = {
        "dataset": run["dataset"],
        "samples": ", ".join(f"{part} {n}" for part, n in (run["samples"] or {}).items() if n),
        "classes": names and f"{len(names)}: {few(names)}",
        "preprocessing": ", ".join(f"{key} {how[key]}" for key in how if key != "vocab"),
        "dtype mode": precision.get("mode"),
        "half format": precision.get("half"),
        "half weights": half and f"{len(half)} with fp32 masters",
        "op lists": precision.get("ops"),
        "loss scaling": precision.get("loss_scaling"),
        "exported weights": f"{weights['kind']}, {weights['dtype']}, rounded once from fp32",
        "clamped values": ", ".join(f"{key} {n}" for key, n in weights["saturated"].items()),
        "command": run["command"] and f"`{run['command']}`",
        "step": run["step"],
        "seed": run["seed"],
        "run": run["id"],
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items() if number),
    }
    return {key: value for key, value in rows.items() if value not in (None, "", [])}


def _precision(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    return facts["precision"] or {}
