"""What an autopsy says, to be understood in ten seconds: what, where, how much, what to do."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.evidence import Evidence
from mpframe.numerics.autopsy.findings import Finding
from mpframe.numerics.autopsy.replay import Replay, Setting
from mpframe.numerics.autopsy.verdict import Kind, Verdict
from mpframe.numerics.autopsy.watch import OUTSIDE, Place
from mpframe.numerics.overrides import deny_words, pin_words

_FEW = 8


@dataclass(frozen=True)
class Report:
    """A report, in parts.

    Attributes:
        title: the verdict in one line.
        facts: (word, sentence) pairs: where, value, samples, do, ...
        replays: rows of the table of replays, the head first.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    replays: Sequence[Sequence[str]]

    def text(self, path: Path | None = None) -> str:
        """For a terminal, a line a fact."""
        facts = [*self.facts, *([("report", str(path))] if path else [])]
        width = max(len(word) for word, _ in facts)
        lines = [f"  {word.ljust(width)}  {sentence}" for word, sentence in facts]
        return "\n".join([self.title, *lines])

    def markdown(self) -> str:
        """For a reader who wants the replays as well."""
        facts = [f"- **{word}**: {sentence}" for word, sentence in self.facts]
        head, *rows = (f"| {' | '.join(row)} |" for row in self.replays)
        rule = "|" + "---|" * len(self.replays[0])
        table = ["The step, run again; no weight moved:", "", head, rule, *rows]
        return "\n".join([f"# {self.title}", "", *facts, "", *table, ""])


def report_on(verdict: Verdict, case: Case, step: Evidence) -> Report:
    """Word a verdict.

    Args:
        verdict: on the step.
        case: the step.
        step: what else is known of it.
    """
    finding = verdict.finding
    facts = [("why", step.reason)]
    if finding is not None:
        facts += _where(finding, verdict, case)
        facts += _samples(finding, step)
    facts += [("do", line) for line in _advice(verdict, case, step)]
    title = f"autopsy of step {step.step}: {_title(verdict, case)}"
    return Report(title, facts, _table(verdict.replays))


def _title(verdict: Verdict, case: Case) -> str:
    finding = verdict.finding
    if verdict.kind is Kind.SCALE_TOO_HIGH and not _scaler_goes_there(verdict, case):
        return "scale too high, and the scaler does not go lower"
    if verdict.kind is Kind.BEYOND_FORMAT and finding is not None:
        what = "gradient" if finding.direction == "backward" else "activation"
        return f"{what} beyond {finding.half} in {_module(finding.place)}"
    return verdict.kind.value


def _where(finding: Finding, verdict: Verdict, case: Case) -> list[tuple[str, str]]:
    if finding.direction == "data":
        return [("where", f"the {finding.place.op} of the batch hold {_number(finding.value)}")]
    if finding.direction == "weights":
        name = ".".join(part for part in (finding.place.module, finding.place.op) if part)
        return [("where", f"weight or buffer {name} holds {_number(finding.value)}")]
    facts = [("where", f"{_place(finding.place, case)}, {finding.direction} pass")]
    facts.append(("value", value_of(finding, verdict)))
    if finding.origin is not None:
        facts.append(("from", f"{_place(finding.origin, case)}: so large first there"))
    if finding.objective:
        facts.append(("loss", finding.objective))
    return facts


def _place(place: Place, case: Case) -> str:
    if place.module == OUTSIDE:
        return f"the loss and the model's output, op {place.op}"
    modules: dict[str, nn.Module] = dict(case.model.named_modules())
    kind = type(modules[place.module]).__name__ if place.module in modules else "?"
    return f"{_module(place)} ({kind}), op {place.op}"


def where_of(finding: Finding) -> str:
    """Where the first value out of range is, in a few words."""
    place = finding.place
    if finding.direction in ("data", "weights"):
        return ".".join(part for part in (place.module, place.op) if part)
    module = "the loss" if place.module == OUTSIDE else _module(place)
    return f"{module}, op {place.op}, {finding.direction} pass"


def _module(place: Place) -> str:
    return place.module or "the model itself"


def value_of(finding: Finding, verdict: Verdict) -> str:
    """How large the first value out of range is, beside the limit of its format."""
    if verdict.kind is Kind.UNDERFLOW:
        return (
            f"its largest gradient is {finding.value:.3g} at this scale; {finding.half} has full "
            f"precision down to {finding.limit:.3g}; {verdict.lost:.0%} of all gradients lie below"
        )
    if not math.isfinite(finding.value):
        return f"its {finding.what} is {_number(finding.value)} in float32"
    if finding.value <= finding.limit:
        return f"its {finding.what} reaches {finding.value:.6g} in fp32, yet is not finite here"
    return (
        f"its {finding.what} reaches {finding.value:.6g} in fp32; {finding.half} ends at "
        f"{finding.limit:.6g}, {finding.bits_beyond:.1f} bits below"
    )


def _samples(finding: Finding, step: Evidence) -> list[tuple[str, str]]:
    size = len(step.samples[finding.batch]) if finding.batch < len(step.samples) else 0
    where = f"epoch {step.epoch}, batch {step.batch + finding.batch}"
    if finding.samples:
        return [("samples", f"{_few(finding.samples)} ({len(finding.samples)} of {size}), {where}")]
    ids = step.samples[finding.batch] if size else []
    return [("batch", f"{where}: samples {_few(ids)}" if size else where)]


def _few(numbers: Sequence[int]) -> str:
    rest = len(numbers) - _FEW
    return ", ".join(map(str, numbers[:_FEW])) + (f" and {rest} more" if rest > 0 else "")


def _advice(verdict: Verdict, case: Case, step: Evidence) -> list[str]:
    if verdict.kind is Kind.BEYOND_FORMAT:
        return _pins(verdict)
    if verdict.kind is Kind.SCALE_TOO_HIGH:
        return [_lower(verdict, case)]
    if verdict.kind is Kind.UNDERFLOW:
        return [_raise(verdict, case)]
    if verdict.kind is Kind.NOT_FINITE_IN_FP32:
        return [_of_fp32(verdict.finding, step)]
    if verdict.kind is Kind.DIVERGING:
        loss = verdict.replays[0].loss
        return [
            "lower optimizer.lr or set trainer.clip_norm: in fp32 too the loss is "
            f"{loss:.3g}, and it was {step.first_loss:.3g} at the first step"
        ]
    return ["nothing: the step replays with finite gradients, and its scale loses few of them"]


def _pins(verdict: Verdict) -> list[str]:
    typed = _typed(verdict.remedy)
    if verdict.proven:
        return [f"add to the command line: {typed}   (replayed with it: finite)"]
    tried = f"; {typed} alone does not help" if typed else ""
    return [f"train with dtype=fp32 or dtype.half=bfloat16{tried}"]


def _typed(remedy: Setting) -> str:
    """A remedy as it is typed on the command line of train.py."""
    return shlex.join((*pin_words(remedy.pins), *deny_words(remedy.denied)))


def _lower(verdict: Verdict, case: Case) -> str:
    name = next(iter(case.scales))
    fits = case.scales[name] * 2.0**verdict.octaves
    if case.scaling == "static":
        return f"loss_scaling.scale={fits:g} is finite; or loss_scaling=Backoff, which finds it"
    if not _scaler_goes_there(verdict, case):
        return f"loss_scaling.min_scale={fits:g}: there the step is finite, above it is not"
    skips = -verdict.octaves
    return (
        f"nothing: the scale goes from {case.scales[name]:g} to {fits:g} by itself, in about "
        f"{skips} skipped steps; loss_scaling.init_scale={fits:g} starts there"
    )


def _scaler_goes_there(verdict: Verdict, case: Case) -> bool:
    floors = case.floors
    return all(floors.get(n, s) <= s * 2.0**verdict.octaves for n, s in case.scales.items())


def _raise(verdict: Verdict, case: Case) -> str:
    fits = 2.0 ** math.floor(math.log2(max(case.scales.values())) + verdict.octaves)
    then = f"at scale {fits:g} it is {verdict.lost_then:.0%}"
    option = {"static": "loss_scaling.scale", "none": "loss_scaling=static loss_scaling.scale"}
    return f"{option.get(case.scaling, 'loss_scaling.init_scale')}={fits:g}: {then}"


def _of_fp32(finding: Finding | None, step: Evidence) -> str:
    if finding is not None and finding.direction == "data":
        return "correct or remove the samples: no format holds them"
    if finding is not None and finding.direction == "weights":
        if step.lost_eps:
            return (
                f"start again with dtype.master_weights=true: the optimizer's {step.lost_eps}, "
                "the format it works in"
            )
        return "start from a checkpoint whose weights are finite; see resume and init_from"
    return (
        "no format helps: lower optimizer.lr or set trainer.clip_norm, and look at these "
        "samples and at this op's inputs"
    )


def _table(replays: Sequence[Replay]) -> list[list[str]]:
    rows = [["replay", "scale", "loss", "gradients"]]
    for replay in replays:
        finite = all(one.weights_finite for one in replay.passes)
        scale = f"{replay.passes[0].scale:g}"
        words = "finite" if finite else "not finite"
        rows.append([_setting(replay.setting), scale, f"{replay.loss:.6g}", words])
    return rows


def _setting(setting: Setting) -> str:
    if setting.fp32:
        return "fp32"
    more = _typed(setting).replace("|", "")
    return f"`{more}`" if more else "as it ran" if setting.octaves == 0 else "another scale"


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:g}"
