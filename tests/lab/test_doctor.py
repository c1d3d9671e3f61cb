"""The doctor's checks: a line for each fault, which its words mend, and none without a fault."""

import copy
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, Shown
from in_process import StartRun, composed
from tiny_data import EXPERIMENTS, TINY, tiny
from vocabulary import differing

from mpframe.cli.commands import doctor as doctor_command
from mpframe.cli.commands.doctor import subject_of
from mpframe.config.composing import check_config
from mpframe.lab import doctor as checks
from mpframe.lab import hints
from mpframe.lab.autopsy.diagnosis import diagnose
from mpframe.lab.doctor import CHECKS, Subject
from mpframe.lab.hints import Severity, findings_of
from mpframe.lab.ranges import KINDS, RangeProbe

DIGITS = "dataset._target_=planted.digits"
NET = "model._target_=planted.net"
LOUD, NORMED = "model._target_=planted.loud model.gain=1e5", "model._target_=planted.normed"
Check = Callable[[Subject], Any]

# Each command line has faults that do not touch each other: the check, and the line it gives.
FAULTY: dict[str, list[tuple[Check, str]]] = {
    f"{NORMED} dtype.master_weights=false optimizer.lr=1e-8": [
        (hints.check_numbers, r"error: optimizer\.eps=1e-08: is 0 in float16, the format optimizer works in; fix: dtype\.master_weights=true"),
        (hints.check_numbers, r"error: optimizer\.lr=1e-08: is 0 in float16, the format optimizer works in; fix: dtype\.master_weights=true"),
        (hints.check_masters, r"warning: dtype\.master_weights=false: updates below half a unit in the last place of float16 weights are lost; fix: dtype\.master_weights=true")],
    "dtype=mixed_bf16 dtype.master_weights=false": [
        (hints.check_numbers, r"error: optimizer\.betas\[1\]=0\.999: is 1 in bfloat16, the format optimizer works in; fix: dtype\.master_weights=true")],
    "loss_scaling=none model.hidden=100 dataset.batch_size=60 device=cpu": [
        (hints.check_unscaled, r"warning: loss_scaling=none with float16: gradients of at most 3e-08 become 0; fix: loss_scaling=Backoff"),
        (checks.check_dimensions, r"note: (model\.hidden=100|dataset\.batch_size=60|, ){3}: not a multiple of 8; tensor cores compute float16 products in tiles of it; fix: (model\.hidden=104|dataset\.batch_size=64| ){3}")],
    f"{NET} model.head=1e7 dtype=amp": [(checks.check_weights, r"error: head\.weight \(reaches 1\.\d+e\+06\): weights beyond 65504, the largest float16 number; fix: 'ops\.modules=\{head:fp32\}'")],
    f"{NET} model.head=1e-7": [(checks.check_weights, r"warning: head\.weight \(100\.0% become 0, 0\.0% subnormal\): small weights for float16; fix: 'ops\.modules=\{head:fp32\}'")],
    f"{NET} model.head=1e-4 model.form=bfloat16": [
        (checks.check_weights, r"warning: head\.weight \(0\.\d% become 0, 100\.0% subnormal\): small weights for float16; .*"),
        (checks.check_training_format, r"warning: head\.weight: all values are bfloat16 numbers; weights trained in bfloat16 may make activations beyond 65504, the largest float16 number; fix: dtype\.half=bfloat16")],
    LOUD: [(checks.check_first_step, r"error: middle, op linear, forward pass on the first batch: its input reaches 100000 in fp32; float16 ends at 65504, 0\.\d bits below; fix: 'ops\.modules=\{middle:fp32\}'")],
    f"ops=none {NORMED}": [(hints.check_casts, r"warning: ops=none: norms, softmax and reductions run in float16 too, and lose small terms; fix: ops=default")],
    "ops=none dtype=amp": [(hints.check_casts, r"warning: ops=none: casts nothing with dtype=amp: the run is an fp32 run; fix: ops=default")],
    f"{NET} {DIGITS} loss_scaling=static dataset.gain=1e4": [(checks.check_first_step, r"error: loss scale 1024: the first batch overflows above [\d.]+, and the scaler does not go there; fix: loss_scaling=static loss_scaling\.scale=\d+")],
    f"{NET} {DIGITS} loss_scaling=static dataset.gain=1e-9": [(checks.check_first_step, r"warning: loss scale 1024: too low for the first batch, \d+% of the gradients are below float16's normal range \(\d+% at [\d.e+]+\); fix: loss_scaling=static loss_scaling\.scale=\d+")],
    f"{NET} {DIGITS} dataset.gain=1e-9": [(checks.check_first_step, r"warning: loss scale 65536: too low for the first batch, \d+% of the gradients are below float16's normal range \(\d+% at [\d.e+]+\); fix: loss_scaling=Backoff loss_scaling\.init_scale=(\d+) loss_scaling\.max_scale=\1")],
    f"{NET} {DIGITS} dataset.gain=1e3": [(checks.check_first_step, r"note: loss scale 65536: the first batch overflows above \d+, and skipped steps lead there; fix: loss_scaling=Backoff loss_scaling\.init_scale=\d+")],
    f"{NET} {DIGITS} dataset.gain=1e4 loss_scaling=LogMax loss_scaling.min_scale=1024": [(checks.check_first_step, r"error: loss scale 65536: the first batch overflows above [\d.]+, and the scaler does not go there; fix: loss_scaling=LogMax loss_scaling\.init_scale=(\d+) loss_scaling\.min_scale=\1")],
    "dtype=mixed_bf16 dtype.products=fp8_tensorwise model._target_=planted.outlier": [(checks.check_products, r"warning: dtype\.products=fp8_tensorwise: takes too much of middle forward\.w \(\d+ dB, 100% lost\), middle dx\.w \(.*\) on the first batch; fix: 'ops\.modules=\{middle:none\}'")],
}  # fmt: skip

# Beside those, and what the words of the lines above lead to: nothing on these.
SOUND: dict[str, tuple[Check, ...]] = {
    "optimizer.lr=1e-7 trainer.accumulate=4 trainer.ema_decay=0.99 loss_scaling=LogMax": CHECKS,
    "dtype=amp loss_scaling=static": hints.HINTS,
    "dtype=amp_bf16 optimizer.lr=1e-6": CHECKS,
    "dtype=fp32 dataset.batch_size=60": CHECKS,
    "dtype=mixed_bf16 loss_scaling=none dtype.master_weights=true": hints.HINTS,
    f"{NET} model.form=float16": CHECKS,
    f"{NET} model.head=0": (checks.check_weights, checks.check_training_format),
    f"{NET} model.head=1e7 dtype=amp_bf16": (checks.check_weights,),
    f"{NET} model.head=1e-7 dtype=mixed_bf16": (checks.check_weights,),
    f"{LOUD} dtype=amp_bf16": (checks.check_first_step,),
    f"{NET} {DIGITS} dataset.gain=1e-4": CHECKS,
    f"{NET} {DIGITS} dataset.gain=1e-9 dtype=mixed_bf16": (checks.check_first_step,),
    "model._target_=planted.Plain dtype=fp32": CHECKS,
    "model._target_=planted.Plain dtype=amp": CHECKS,
}  # fmt: skip


def subject(words: str) -> Subject:
    """A run of the smallest model that the words allow."""
    given = shlex.split(words)
    if "planted" not in words and "experiment=" not in words:
        given.insert(0, "model=mlp")
    own = [group for group in ("model", "dataset") if f"{group}._target_=planted" in words]
    given += [*(f"{group}=own" for group in own), *(["scheduler=none"] if "dataset" in own else [])]
    return subject_of(check_config(composed(*given)))


def some(table: dict[str, Any]) -> list[Any]:
    """Every second line of a table, and in `./dev all` the others: each is a run with its data."""
    marks = [(), pytest.mark.slow]
    return [pytest.param(words, marks=marks[n % 2]) for n, words in enumerate(table)]


@pytest.mark.parametrize("words", some(FAULTY))
def test_a_fault_is_one_line_and_what_it_says_to_type_mends_it(words: str) -> None:
    faulty, planted = subject(words), []
    for check, line in FAULTY[words]:  # There may be other lines beside it.
        (finding,) = [one for one in check(faulty) if re.fullmatch(line, str(one))]
        planted.append((check, finding))
    typed = dict.fromkeys(str(finding).split("; fix: ")[1] for _, finding in planted)
    mended = subject(" ".join([words, *typed]))
    for check, finding in planted:
        assert [one for one in check(mended) if one.severity <= finding.severity] == []


@pytest.mark.parametrize("words", some(SOUND))
def test_nothing_is_said_without_a_fault(words: str) -> None:
    own = subject(words)
    assert [str(finding) for check in SOUND[words] for finding in check(own)] == []


@pytest.mark.parametrize(
    ("check", "words", "line"),
    [
        (hints.check_numbers, "experiment=digits_gan +optimizer.parts.generator.eps=1e-60", r"error: optimizer\.parts\.generator\.eps=1e-60: is 0 in float32, the format optimizer\.parts\.generator works in"),
        (hints.check_average, "trainer.ema_decay=0.9999", r"warning: trainer\.ema_decay=0\.9999: averages over the last 10000 steps, and the run has 440"),
        (checks.check_first_step, f"{NET} {DIGITS} dataset.gain=1e39 dtype=fp32", r"error: model, dataset: the first batch is not finite in fp32 either \(first the loss, op mul, forward pass\); look for a division by zero, .*"),
        (checks.check_first_step, f"{NET} {DIGITS} dataset.gain=0", r"warning: model, dataset: all gradients of the first batch are 0, in fp32 too, and nothing is learnt from it; look at the loss"),
        (checks.check_first_step, "model._target_=planted.scattered", r"error: layers\.0, op linear, forward pass on the first batch: .*; fix: dtype=fp32"),
        (checks.check_products, "dtype=amp dtype.products=nvfp4", r"note: dtype\.products=nvfp4: the noisiest on the first batch are (hidden\d\.linear \w+\.\w+ \(1\d dB, \d+% lost\)(, )?){3}"),
    ],
)  # fmt: skip
def test_where_no_pin_helps_it_is_said_in_one_line(check: Check, words: str, line: str) -> None:
    assert re.fullmatch(line, "|".join(map(str, check(subject(words)))))


def test_a_run_says_what_the_doctor_says(tmp_path: Path, start_run: StartRun, caplog: Log) -> None:
    words = "model=mlp loss_scaling=none trainer.max_steps=1 trainer.ema_decay=0.9"
    start_run(tmp_path, *words.split())
    said = [message for message in caplog.messages if message.startswith("warning: ")]
    assert said == [str(hint) for hint in findings_of(hints.HINTS, subject(words))]
    assert len(said) == 2


@pytest.mark.parametrize(
    "words",
    ["model.dropout=0.5", "dtype.products=mxfp4", "experiment=digits_gan dtype=fp32"],
)
def test_an_examination_changes_nothing(words: str) -> None:
    examined = subject(words)
    trainer = examined.trainer

    def state() -> Any:
        return copy.deepcopy([trainer.state_dict(), torch.get_rng_state()])

    before = state()
    severities = [finding.severity for finding in findings_of(CHECKS, examined)]
    assert severities == sorted(severities)
    assert Severity.ERROR not in severities
    assert differing(before, state()) == []
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


# Pairs, dicts, two losses: each kind of batch and step but lists of dicts once in ./dev.
CHEAP = ("digits_mlp", "bert_spans", "digits_gan")
ROWS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in CHEAP))
    for name in EXPERIMENTS
    if not name.endswith("_small")
]


@pytest.mark.parametrize("experiment", ROWS)
def test_hints_doctor_ranges_and_autopsy_see_the_first_step(
    experiment: str, tiny_data: Path
) -> None:
    """On each shipped workload at a small size."""
    assert sorted(TINY) == EXPERIMENTS
    words = [*tiny(experiment, tiny_data), "device=cpu", "dtype=mixed"]
    checked = subject_of(check_config(composed(*words)))
    assert findings_of(hints.HINTS, checked) == []
    assert [str(f) for f in findings_of(CHECKS, checked) if f.severity is Severity.ERROR] == []
    # At a scale of 2^40 the gradient of the loss itself is beyond float16.
    loud = replace(checked.case, scales=dict.fromkeys(checked.case.scales, 2.0**40))
    culprit = diagnose(loud).culprit
    assert culprit is not None
    assert (culprit.direction, culprit.value > culprit.limit) == ("backward", True)
    probe = RangeProbe(checked.trainer, torch.float16)
    checked.trainer.train_step(checked.batch)
    ranges = probe.ranges()
    assert all(ranges.bins(kind).sum() > 0 or kind == "updates" for kind in KINDS)


def test_an_error_is_exit_code_one(here: Path, capsys: Shown) -> None:
    words = "experiment=digits_mlp dtype=fp32 'ops.deny-=[exp]'"
    nothing = "nothing found: the first step was tried and is finite\n"
    with pytest.raises(SystemExit) as ended:
        doctor_command.main(shlex.split(f"-m {words} optimizer.eps=0.5,1e-50"))
    assert ended.value.code == 1
    said = capsys.readouterr().out
    error = "error: optimizer.eps=1e-50: is 0 in float32, the format optimizer works in"
    assert said.startswith(f"{words} optimizer.eps=0.5:\n{nothing}")
    assert f"{words} optimizer.eps=1e-50:\n{error}\n1 error\n" in said
    assert list(here.iterdir()) == []
