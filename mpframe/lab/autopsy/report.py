"""A diagnosis in words: what to type, and the report on a step, written beside its evidence."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpframe.config.overrides import deny_words, pin_words
from mpframe.core.tree import dtype_name
from mpframe.files.durable import write_atomically
from mpframe.files.text import align, few
from mpframe.lab.autopsy.diagnosis import Culprit, Diagnosis, Kind, diagnose
from mpframe.lab.autopsy.evidence import Evidence
from mpframe.lab.autopsy.replay import Case, Setting
from mpframe.lab.autopsy.watch import OpCall
from mpframe.lab.hints import ADAPTIVE
from mpframe.training.trainer import Trainer

_FEW = 8
_CEILING = 2.0**24  # of Backoff and LogMax, unless an option moves it
_ADD = "add to the command line: "
MODEL = "look for a division by zero, a logarithm of zero, or first weights that are too large"


def remedy_words(diagnosis: Diagnosis, case: Case) -> tuple[str, ...]:
    """Return the words that mend the step, none if no option of the precision does.

    Pins and ops are the ones that were tried, or fp32 if none helped. A scale's words name the
    scaler: one that `loss_scaling=auto` chose has no options to set.
    """
    if diagnosis.kind is Kind.BEYOND_FORMAT:
        return setting_words(diagnosis.remedy) if diagnosis.proven else ("dtype=fp32",)
    if diagnosis.kind in (Kind.SCALE_TOO_HIGH, Kind.UNDERFLOW):
        return tuple(_scale_words(case, fitting_scale(diagnosis, case)))
    return ()


def setting_words(setting: Setting) -> tuple[str, ...]:
    """Return the words for a replay's pins and ops, none if it had none."""
    return (*pin_words(setting.pins), *deny_words(setting.denied))


def fitting_scale(diagnosis: Diagnosis, case: Case) -> float:
    """Return a power of two that is low enough for the step, or high enough."""
    if diagnosis.octaves < 0:
        # An octave below the scale that was tried: the next batch may have larger gradients.
        return 2.0 ** (math.floor(math.log2(min(case.scales.values())) + diagnosis.octaves) - 1)
    return 2.0 ** math.floor(math.log2(max(case.scales.values())) + diagnosis.octaves)


def scaler_goes_there(diagnosis: Diagnosis, case: Case) -> bool:
    """Return whether the scaler itself goes down to the scale at which the step was finite."""
    times = 2.0**diagnosis.octaves
    return all(case.floors.get(name, scale) <= scale * times for name, scale in case.scales.items())


def _scale_words(case: Case, scale: float) -> Iterator[str]:
    if case.scaling == "static":
        yield from ("loss_scaling=static", f"loss_scaling.scale={_exactly(scale)}")
        return
    yield f"loss_scaling={case.scaling if case.scaling in ADAPTIVE else ADAPTIVE[0]}"
    yield f"loss_scaling.init_scale={_exactly(scale)}"
    if scale < max(case.floors.values(), default=1.0):
        yield f"loss_scaling.min_scale={_exactly(scale)}"
    if scale > _CEILING:
        yield f"loss_scaling.max_scale={_exactly(scale)}"


def _exactly(power: float) -> str:
    """Write a power of two in all its digits."""
    return str(int(power)) if power >= 1.0 else repr(power)


@dataclass(frozen=True)
class Report:
    title: str  # the diagnosis in one line
    facts: Sequence[tuple[str, str]]  # (word, sentence) pairs: where, value, samples, do, ...

    def text(self, path: Path | None = None) -> str:
        facts = [*self.facts, *([("report", str(path))] if path else [])]
        return "\n".join([self.title, align([("", *fact) for fact in facts])])

    def markdown(self) -> str:
        facts = [f"- **{word}**: {sentence}" for word, sentence in self.facts]
        return "\n".join([f"# {self.title}", "", *facts, ""])


def report_on(diagnosis: Diagnosis, case: Case, step: Evidence) -> Report:
    culprit = diagnosis.culprit
    facts = [("why", str(step.reason))]
    if culprit is not None:
        facts += [("where", where_of(culprit)), ("value", value_of(culprit))]
        if culprit.origin is not None:
            facts.append(("from", f"{_place(culprit.origin)}: so large first there"))
        if culprit.objective:
            facts.append(("loss", culprit.objective))
        facts.append(_samples(culprit, step))
    facts.append(("do", _advice(diagnosis, case, step)))
    title = f"autopsy of step {step.step}: {_title(diagnosis, case, step)}"
    return Report(title, facts)


def _title(diagnosis: Diagnosis, case: Case, step: Evidence) -> str:
    culprit = diagnosis.culprit
    if diagnosis.kind is Kind.NOT_FINITE_IN_FP32 and not step.updates:
        return "not finite in fp32 too: model or data"
    if diagnosis.kind is Kind.SCALE_TOO_HIGH and not scaler_goes_there(diagnosis, case):
        return "scale too high, and the scaler does not go lower"
    if diagnosis.kind is Kind.BEYOND_FORMAT and culprit is not None:
        what = "gradient" if culprit.direction == "backward" else "activation"
        return f"{what} beyond {culprit.half} in {_module(culprit.call)}"
    return diagnosis.kind.value


def where_of(culprit: Culprit) -> str:
    """Say in a few words where a value first left the range."""
    call = culprit.call
    if culprit.direction == "data":
        return f"{call.op} of the batch"
    if culprit.direction == "weights":
        return ".".join(filter(None, (call.module, call.op)))
    return f"{_place(call)}, {culprit.direction} pass"


def _place(call: OpCall) -> str:
    return f"{_module(call)}, op {call.op}"


def _module(call: OpCall) -> str:
    return call.module or "the model itself"  # `OUTSIDE` is a name as well.


def value_of(culprit: Culprit) -> str:
    """Say how large that value is, compared with the limit of its format."""
    if not math.isfinite(culprit.value):
        value = "NaN" if math.isnan(culprit.value) else "inf"
        return f"its {culprit.what} is {value} in float32"
    if culprit.value <= culprit.limit:
        return f"its {culprit.what} reaches {culprit.value:.6g} in fp32, yet is not finite here"
    bits = math.log2(culprit.value / culprit.limit)
    return (
        f"its {culprit.what} reaches {culprit.value:.6g} in fp32; {culprit.half} ends at "
        f"{culprit.limit:.6g}, {bits:.1f} bits below"
    )


def _samples(culprit: Culprit, step: Evidence) -> tuple[str, str]:
    size = len(step.samples[culprit.batch]) if culprit.batch < len(step.samples) else 0
    number, rank = divmod(culprit.batch, step.world_size)
    of_rank = f", rank {rank}" if step.world_size > 1 else ""
    where = f"epoch {step.epoch}, batch {step.batch + number}{of_rank}"
    if culprit.samples:
        known = few(map(str, culprit.samples), _FEW)
        return "samples", f"{known} ({len(culprit.samples)} of {size}), {where}"
    ids = step.samples[culprit.batch] if size else []
    return "batch", f"{where}: samples {few(map(str, ids), _FEW)}" if size else where


def _advice(diagnosis: Diagnosis, case: Case, step: Evidence) -> str:
    words = shlex.join(remedy_words(diagnosis, case))
    if diagnosis.kind is Kind.BEYOND_FORMAT:
        return _pin(diagnosis, words)
    if diagnosis.kind is Kind.SCALE_TOO_HIGH:
        return _lower(diagnosis, case, words)
    if diagnosis.kind is Kind.UNDERFLOW:
        return f"{_ADD}{words}; {underflow_of(diagnosis, case)}"
    if diagnosis.kind is Kind.NOT_FINITE_IN_FP32:
        return _mend_fp32(diagnosis.culprit, case, step)
    if diagnosis.kind is Kind.DIVERGING:
        loss = f"{diagnosis.replays[0].loss:.3g}, and it was {step.first_loss:.3g}"
        return f"{_calm(step)}: in fp32 too the loss is {loss} at the first step"
    return "nothing: the step replays with finite gradients, and its scale loses few of them"


def underflow_of(diagnosis: Diagnosis, case: Case) -> str:
    """Say how many gradients half keeps badly, and how many at a fitting scale."""
    return (
        f"{diagnosis.underflow:.0%} of the gradients are below {dtype_name(case.half)}'s normal "
        f"range ({diagnosis.underflow_then:.0%} at {fitting_scale(diagnosis, case):g})"
    )


def _pin(diagnosis: Diagnosis, words: str) -> str:
    if diagnosis.proven:
        return f"{_ADD}{words}   (replayed with it: finite)"
    typed = shlex.join(setting_words(diagnosis.remedy))
    tried = f"; {typed} alone does not help" if typed else ""
    return f"train with {words} or dtype.half=bfloat16{tried}"


def _lower(diagnosis: Diagnosis, case: Case, words: str) -> str:
    scale = next(iter(case.scales.values()))
    highest = scale * 2.0**diagnosis.octaves
    if case.scaling == "static":
        return f"{_ADD}{words}; or loss_scaling=Backoff, which finds a scale"
    if not scaler_goes_there(diagnosis, case):
        return f"{_ADD}{words}; at scale {highest:g} the step is finite, above it is not"
    return (
        f"nothing: the scale goes from {scale:g} to {highest:g} by itself, in about "
        f"{-diagnosis.octaves} skipped steps; {words} starts below that"
    )


def _mend_fp32(culprit: Culprit | None, case: Case, step: Evidence) -> str:
    direction = culprit.direction if culprit else ""
    if direction == "data":
        return "correct or remove the samples: no format holds them"
    if direction == "weights":
        if step.updates:
            masters = "" if case.precision.master_weights else "set dtype.master_weights=true; or "
            return f"{masters}lower optimizer.lr; or start from an earlier checkpoint"
        return "start from a checkpoint whose weights are finite; see resume and init_from"
    return f"no format helps: {_calm(step)}, and look at these samples and at this op's inputs"


def _calm(step: Evidence) -> str:
    """Advise smaller updates, or before the first update a look at the model."""
    if not step.updates:
        return MODEL
    return "lower optimizer.lr or set a lower trainer.clip_norm"


def examine(step: Evidence, trainer: Trainer) -> Report:
    """Replay a step with a trainer that has its weights, and say what is wrong with it."""
    case = step.case(trainer)
    return report_on(diagnose(case), case, step)


def write_report(folder: Path, report: Report) -> Path:
    """Write a report beside its evidence, and return its path."""
    path = folder / "report.md"
    write_atomically(path, report.markdown())
    return path
