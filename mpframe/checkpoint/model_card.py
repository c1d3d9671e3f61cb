"""The model card of an exported folder: how to use it, its metrics, data, precision and training.

The metrics are those that the run measured with the weights in the folder.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from mpframe.files.text import markdown

Facts = Mapping[str, Any]  # of the sidecar
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
        *(f"## {title}\n\n{_table(rows)}" for title, rows in sections.items()),
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
    """Return the known facts, except a vocabulary, which has a file."""
    known = {k: v for k, v in facts.items() if v is not None and k != "vocab"}
    plain = {k: re.sub(r"[{}'\[\]]", "", f"{v}") for k, v in known.items() if k != "command"}
    return markdown([("", ""), *{**known, **plain}.items()])
