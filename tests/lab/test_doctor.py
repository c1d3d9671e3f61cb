"""Every check of the doctor: silent without the fault, one line with it, silent once mended."""

import copy
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_experiments import EXPERIMENTS, TINY, tiny

from mpframe.cli.commands import doctor as doctor_command
from mpframe.cli.commands.doctor import subject_of
from mpframe.config.command_line import jobs
from mpframe.lab import hints
from mpframe.lab.autopsy.replay import noises_of
from mpframe.lab.doctor import CHECKS, Finding, Severity, Subject, checks, examine

DIGITS = "dataset._target_=planted.digits"
NET = "model._target_=planted.net"


class Case(NamedTuple):
    """A fault: the words that plant it, those without it, and the line it gets."""

    check: Callable[[Subject], Any]
    fault: str
    sound: str
    line: str

    def __str__(self) -> str:
        return f"{self.check.__name__}-{self.fault}"


CASES = [
    Case(checks.check_numbers, "dtype.master_weights=false", "",
         r"error: optimizer\.eps=1e-08 is 0 in float16, the format optimizer works in; fix: dtype\.master_weights=true"),
    Case(checks.check_numbers, "dtype.master_weights=false optimizer.eps=1e-4 optimizer.lr=1e-8", "optimizer.lr=1e-8",
         r"error: optimizer\.lr=1e-08 is 0 in float16, the format optimizer works in; fix: dtype\.master_weights=true"),
    Case(checks.check_numbers, "dtype.master_weights=false optimizer.eps=1e-4", "dtype=fp32",
         r"warning: optimizer\.betas\[1\]=0\.999 becomes 0\.999023 in float16, the format .*"),
    Case(checks.check_numbers, "dtype=mixed_bf16 dtype.master_weights=false", "dtype=mixed_bf16",
         r"error: optimizer\.betas\[1\]=0\.999 is 1 in bfloat16, the format optimizer works in; fix: dtype\.master_weights=true"),
    Case(checks.check_numbers, "dtype=fp32 optimizer.eps=1e-50", "dtype=fp32",
         r"error: optimizer\.eps=1e-50 is 0 in float32, the format optimizer works in; fix: optimizer\.eps=1e-08"),
    Case(checks.check_numbers, "dtype=fp32 optimizer.betas=[0.9,0.999999999]", "dtype=fp32",
         r"error: optimizer\.betas\[1\]=0\.999999999 is 1 in float32, the format optimizer works in; fix: 'optimizer\.betas=\[0\.9,0\.999\]'"),
    Case(checks.check_numbers, "experiment=digits_gan +optimizer.parts.generator.eps=1e-60", "experiment=digits_gan",
         r"error: optimizer\.parts\.generator\.eps=1e-60 is 0 in float32, .*; fix: \+\+optimizer\.parts\.generator\.eps=1e-08"),
    Case(checks.check_masters, "dtype.master_weights=false", "dtype=amp",
         r"warning: dtype\.master_weights=false: updates below half a unit in the last place of the \d+ float16 weights are lost; fix: dtype\.master_weights=true"),
    Case(checks.check_weight_range, f"{NET} model.head=1e7", NET,
         r"error: head\.weight: weights beyond 65504, the largest float16 number \(head\.weight reaches 1\.\d+e\+06\); fix: 'ops\.modules=\{head:fp32\}'"),
    Case(checks.check_weight_range, f"{NET} model.head=1e7 dtype=amp", f"{NET} model.head=1e7 dtype=fp32",
         r"error: head\.weight: weights beyond 65504, .*"),
    Case(checks.check_weight_range, "model._target_=planted.numbered model.head=1e7", f"{NET} model.head=1e7 dtype=amp_bf16",
         r"error: 2\.weight: weights beyond .*; fix: ops\.modules\.2=fp32"),
    Case(checks.check_small_weights, f"{NET} model.head=1e-7", f"{NET} model.head=1e-7 dtype=mixed_bf16",
         r"warning: head\.weight: small weights; in float16 100\.0% of head\.weight become 0 and 0\.0% subnormal; fix: 'ops\.modules=\{head:fp32\}'"),
    Case(checks.check_small_weights, f"{NET} model.head=1e-4", NET,
         r"warning: head\.weight: small weights; in float16 0\.\d% of head\.weight become 0 and 100\.0% subnormal; .*"),
    Case(checks.check_training_format, f"{NET} model.form=bfloat16", f"{NET} model.form=float16",
         r"warning: head\.weight: all values are bfloat16 numbers; weights trained in bfloat16 may make activations beyond 65504, the largest float16 number; fix: dtype\.half=bfloat16"),
    Case(checks.check_overflow, "model._target_=planted.loud model.gain=1e5", "model._target_=planted.loud",
         r"error: middle, op linear, forward pass on the first batch: its input reaches 100000 in fp32; float16 ends at 65504, 0\.\d bits below; fix: 'ops\.modules=\{middle:fp32\}'"),
    Case(checks.check_overflow, "model._target_=planted.loud model.gain=1e5 'ops.modules={first:fp32}'", "model._target_=planted.loud model.gain=1e5 'ops.modules={middle:fp32}'",
         r"error: middle, .*; fix: 'ops\.modules=\{middle:fp32\}'"),
    Case(checks.check_overflow, "model._target_=planted.loud model.gain=1e5 dtype=amp", "model._target_=planted.loud model.gain=1e5 dtype=amp_bf16",
         r"error: middle, .*; fix: 'ops\.modules=\{middle:fp32\}'"),
    Case(checks.check_overflow, "model._target_=planted.loud model.gain=1e5 loss_scaling=static", "model._target_=planted.loud model.gain=1e5 'ops.deny+=[linear]'",
         r"error: middle, .*; fix: 'ops\.modules=\{middle:fp32\}'"),
    Case(checks.check_norms, "ops=none model._target_=planted.normed", "model._target_=planted.normed",
         r"warning: 2, 3: norms stored and computed in float16; their sums lose small terms; fix: ops=default"),
    Case(checks.check_norms, "ops=fast model._target_=planted.normed dtype=amp", "ops=fast",
         r"note: 2: norms with float16 inputs and outputs; the kernels sum in fp32 and each output is rounded once; fix: 'ops\.deny\+=\[layer_norm\]'"),
    Case(checks.check_norms, "ops=fast model._target_=planted.normed", "ops=fp32_norms model._target_=planted.normed",
         r"warning: 2: norms stored and computed in float16; their sums lose small terms; fix: 'ops\.deny\+=\[layer_norm\]'"),
    Case(checks.check_norms, "ops.modules={2*:half} model._target_=planted.normed", "model._target_=planted.normed",
         r"warning: 2: norms stored .*; fix: ops\.modules\.2=fp32"),
    Case(checks.check_dimensions, "experiment=digits_mlp model.hidden=100", "experiment=digits_mlp model.hidden=104",
         r"note: model\.hidden=100: not a multiple of 8; tensor cores compute float16 products in tiles of it; fix: model\.hidden=104"),
    Case(checks.check_dimensions, "dataset.batch_size=60", "dataset.batch_size=60 dtype=fp32",
         r"note: dataset\.batch_size=60: not .*; fix: dataset\.batch_size=64"),
    Case(hints.check_unscaled, "loss_scaling=none", "loss_scaling=none dtype=mixed_bf16",
         r"warning: loss_scaling=none with float16: gradients of at most 3e-08 become 0; fix: loss_scaling=Backoff"),
    Case(hints.check_needless_scaling, "dtype=mixed_bf16 loss_scaling=LogMax", "dtype=mixed loss_scaling=LogMax",
         r"note: loss_scaling=LogMax with dtype=mixed, and bfloat16 has the range of fp32: no gradient needs a scale; fix: loss_scaling=none"),
    Case(hints.check_needless_scaling, "dtype=fp32 loss_scaling=Backoff", "dtype=fp32",
         r"note: loss_scaling=Backoff with dtype=fp32: no gradient needs a scale; fix: loss_scaling=none"),
    Case(hints.check_growth, "loss_scaling=Backoff loss_scaling.growth_interval=1", "loss_scaling=Backoff",
         r"warning: loss_scaling\.growth_interval=1: the scale doubles after each clean step, so about every second step overflows and is skipped; fix: loss_scaling\.growth_interval=2000"),
    Case(hints.check_static_scale, "loss_scaling=static loss_scaling.scale=1e-3", "loss_scaling=static",
         r"warning: loss_scaling\.scale=0\.001: below 1 it makes small gradients smaller; usual are 128 to 65536; fix: loss_scaling\.scale=1024"),
    Case(hints.check_learning_rate, "optimizer.lr=1e-10", "optimizer.lr=1e-7",
         r"warning: optimizer\.lr=1e-10: below \d\.\de-\d\d, half a unit in the last place of most float32 weights, which therefore do not move; fix: optimizer\.lr=0\.001"),
    Case(hints.check_learning_rate, "optimizer.lr=1e-6 dtype.master_weights=false", "optimizer.lr=1e-6",
         r"warning: optimizer\.lr=1e-06: below .* of most float16 weights, .*; fix: dtype\.master_weights=true"),
    Case(hints.check_learning_rate, "optimizer.lr=2e-5 dtype=mixed_bf16 dtype.master_weights=false", "optimizer.lr=2e-5 dtype=amp_bf16",
         r"warning: optimizer\.lr=2e-05: below .* of most bfloat16 weights, .*; fix: dtype\.master_weights=true"),
    Case(hints.check_clip_norm, "trainer.clip_norm=1e-9", "trainer.clip_norm=0.1",
         r"warning: trainer\.clip_norm=1e-09: each step's gradients are cut down to this norm; usual are 0\.1 to 10; fix: trainer\.clip_norm=1\.0"),
    Case(hints.check_average, "trainer.ema_decay=0.9999", "trainer.accumulate=4 trainer.ema_decay=0.99",
         r"warning: trainer\.ema_decay=0\.9999: averages over the last 10000 steps, and the run has 440; fix: trainer\.ema_decay=0\.977"),
    Case(hints.check_accumulation, "trainer.accumulate=23", "trainer.accumulate=22",
         r"warning: trainer\.accumulate=23: an epoch has 22 batches, all that a step takes; fix: trainer\.accumulate=22"),
    Case(hints.check_classes, "model.classes=12", "model.classes=10",
         r"warning: model\.classes=12: the data set has 10, so 2 outputs are never right; fix: model\.classes=10"),
    Case(hints.check_classes, "model.classes=9", "model.classes=10",
         r"warning: model\.classes=9: the data set has 10, so its labels from 9 on have no output; fix: model\.classes=10"),
    Case(checks.check_overflow, f"{NET} {DIGITS} loss_scaling=static dataset.gain=1e4", f"{NET} {DIGITS} loss_scaling=static",
         r"error: loss_scaling\.scale=1024: too large, the first batch overflows at it; fix: loss_scaling\.scale=\d+"),
    Case(checks.check_small_scale, f"{NET} {DIGITS} loss_scaling=static dataset.gain=1e-9", f"{NET} {DIGITS} loss_scaling=static dataset.gain=1e-9 dtype=mixed_bf16",
         r"warning: loss_scaling\.scale=1024: too small, 99\.\d% of the first batch's gradients become 0 \(\d\.\d% at [\d.e+]+\); fix: loss_scaling\.scale=\d+"),
    Case(checks.check_small_scale, f"{NET} {DIGITS} dataset.gain=1e-9", f"{NET} {DIGITS} dataset.gain=1e-4",
         r"warning: loss_scaling\.init_scale=65536: too small, \d+\.\d% of the first batch's gradients become 0 \(\d\.\d% at [\d.e+]+\); fix: loss_scaling=Backoff loss_scaling\.init_scale=(\d+) loss_scaling\.max_scale=\1"),
    Case(checks.check_small_scale, f"{NET} {DIGITS} dataset.gain=1e-6 loss_scaling=LogMax loss_scaling.init_scale=1", f"{NET} {DIGITS} loss_scaling=LogMax",
         r"warning: loss_scaling\.init_scale=1: too small, \d+\.\d% of the first batch's gradients become 0 \(\d\.\d% at [\d.e+]+\); fix: loss_scaling\.init_scale=(\d+) loss_scaling\.max_scale=\1"),
    Case(checks.check_overflow, f"{NET} {DIGITS} dataset.gain=1e3", f"{NET} {DIGITS}",
         r"note: loss_scaling\.init_scale=65536: the first batch overflows, and steps are skipped until the scale is down to about \d+; fix: loss_scaling=Backoff loss_scaling\.init_scale=probe"),
    Case(checks.check_overflow, f"{NET} {DIGITS} dataset.gain=1e4 loss_scaling=LogMax loss_scaling.min_scale=1024", f"{NET} {DIGITS} loss_scaling=LogMax",
         r"error: loss_scaling\.min_scale=1024: too large, the first batch overflows at it; fix: loss_scaling\.init_scale=probe loss_scaling\.min_scale=\d+"),
    Case(checks.check_products, "dtype=mixed_bf16 dtype.products=fp8_tensorwise model._target_=planted.outlier", "dtype=mixed_bf16 model._target_=planted.outlier",
         r"warning: dtype\.products=fp8_tensorwise: takes too much of middle forward\.w \(\d+ dB, 100% lost\), middle dx\.w \(.*\) on the first batch; fix: 'ops\.modules=\{middle:none\}'"),
    Case(checks.check_emulation, "device=cpu", "device=cpu dtype=fp32",
         r"note: dtype\.half=float16 on cpu is emulated: the numbers are a tensor core's, the speed and memory are not; fix: (dtype\.half=bfloat16|dtype=fp32|device=cuda)"),
    Case(checks.check_emulation, "device=cpu dtype.compute=native", "device=cpu dtype=fp32 dtype.compute=native",
         r"warning: dtype\.compute=native: this cpu has no float16 products, and PyTorch's kernels for them are many times slower than fp32's; fix: dtype\.compute=auto"),
]  # fmt: skip


def subject(words: str) -> Subject:
    given = shlex.split(words)
    own = [group for group in ("model", "dataset") if f"{group}._target_=planted" in words]
    given += [*(f"{group}=own" for group in own), *(["scheduler=none"] if "dataset" in own else [])]
    (job,) = jobs(given)
    return subject_of(job.config, job.overrides)


def found(check: Callable[[Subject], Any], words: str) -> list[Finding]:
    return list(check(subject(words)))


def planted_fault(case: Case) -> Finding:
    """The one finding with the case's line; there may be others beside it."""
    (finding,) = [f for f in found(case.check, case.fault) if re.fullmatch(case.line, str(f))]
    return finding


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_is_said_without_the_fault(case: Case) -> None:
    assert found(case.check, case.sound) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_is_one_line_and_what_it_says_to_type_mends_it(case: Case) -> None:
    finding = planted_fault(case)
    typed = str(finding).split("; fix: ")[1]
    left = found(case.check, f"{case.fault} {typed}")
    assert [f for f in left if f.severity <= finding.severity] == []


@pytest.mark.parametrize("dtype", ["mixed", "amp_bf16"])
def test_the_noisiest_operands_are_named(dtype: str) -> None:
    """The noise of four bits, the gradients' of them rounded at random; the head is in half."""
    words = f"experiment=digits_mlp dtype={dtype} dtype.products=nvfp4"
    (finding,) = found(checks.check_products, words)
    assert re.fullmatch(
        r"note: dtype\.products=nvfp4: the noisiest on the first batch are "
        r"(hidden\d\.linear \w+\.\w+ \(1\d dB, \d+% lost\)(, )?){3}",
        str(finding),
    )


def test_what_is_counted_leaves_no_trace() -> None:
    """Random numbers and histories are as before, and no gradient is left."""
    own = subject("experiment=digits_mlp dtype=mixed dtype.products=fp8_delayed")
    before, drawn = copy.deepcopy(own.trainer.precision.state_dict()), torch.get_rng_state()
    assert noises_of(own.case) == noises_of(own.case)
    assert own.trainer.precision.state_dict() == before == {"generators": {}, "amax": {}}
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in own.trainer.model.parameters())


def test_weights_of_a_bfloat16_run_are_recognised(tmp_path: Path, start_run: Any) -> None:
    start_run(tmp_path, "experiment=digits_mlp", "dtype=mixed_bf16", "trainer.max_steps=1")
    words = f"experiment=digits_mlp init_from={tmp_path}"
    (finding,) = found(checks.check_training_format, words)
    assert str(finding) == (
        f"warning: init_from={tmp_path}: trained as mixed(bfloat16), whose activations may be "
        "beyond 65504, the largest float16 number; fix: dtype.half=bfloat16"
    )
    assert not found(checks.check_training_format, f"{words} {finding.fix[0]}")


def test_weights_of_a_float16_run_are_not(tmp_path: Path, start_run: Any) -> None:
    start_run(tmp_path, "experiment=digits_mlp", "dtype=mixed", "trainer.max_steps=1")
    assert not found(checks.check_training_format, f"experiment=digits_mlp init_from={tmp_path}")


@pytest.mark.parametrize("dtype", ["fp32", "mixed", "amp"])
def test_a_norm_without_weights_is_not_stored_in_half(dtype: str) -> None:
    assert not found(checks.check_norms, f"model._target_=planted.bare_norm dtype={dtype}")


def test_constant_weights_are_born_nowhere() -> None:
    assert not found(checks.check_training_format, f"{NET} model.head=0")


def test_every_shipped_experiment_is_examined() -> None:
    assert sorted(TINY) == EXPERIMENTS


def in_modes() -> list[tuple[str, str]]:
    """Each experiment in each mode; one that has a small sibling, with the same parts, in mixed."""
    return [
        (name, mode)
        for name in EXPERIMENTS
        for mode in (MODES if f"{name}_small" not in EXPERIMENTS else ["mixed"])
    ]


MODES = ["fp32", "mixed", "amp", "mixed_bf16", "amp_bf16"]


@pytest.mark.parametrize(("name", "dtype"), [*(("", mode) for mode in MODES), *in_modes()])
def test_shipped_configurations_start_without_a_hint_and_have_no_errors(
    name: str, dtype: str, tiny_data: Path
) -> None:
    words = " ".join(tiny(name, tiny_data))
    shipped = subject(f"device=cpu dtype={dtype} {words}")
    assert hints.hints_on(shipped) == []
    if name and dtype in ("fp32", "mixed"):
        assert [str(f) for f in examine(shipped) if f.severity is Severity.ERROR] == []


@pytest.mark.parametrize("scaling", ["static", "Backoff", "LogMax"])
def test_shipped_scalers_start_without_a_hint(scaling: str) -> None:
    assert hints.hints_on(subject(f"loss_scaling={scaling}")) == []


@pytest.mark.parametrize("dtype", ["fp32", "mixed", "amp_bf16"])
def test_what_no_format_holds_is_said_in_any_mode(dtype: str) -> None:
    words = f"{NET} {DIGITS} dataset.gain=1e39 dtype={dtype}"
    (finding,) = found(checks.check_overflow, words)
    assert str(finding) == (
        "error: model, dataset: the first batch is not finite in fp32 either (first the loss, op "
        "mul, forward pass); look for a division by zero, a logarithm of zero, or first weights "
        "that are too large"
    )


@pytest.mark.parametrize("dtype", ["fp32", "mixed", "amp_bf16"])
def test_gradients_that_are_0_in_fp32_too(dtype: str) -> None:
    (finding,) = found(checks.check_small_scale, f"{NET} {DIGITS} dataset.gain=0 dtype={dtype}")
    assert str(finding) == (
        "warning: model, dataset: all gradients of the first batch are 0, in fp32 too, and nothing "
        "is learnt from it; look at the loss"
    )


def test_where_no_pin_helps_fp32_does() -> None:
    (finding,) = found(checks.check_overflow, "model._target_=planted.scattered")
    assert finding.what.startswith("layers.0, op linear, forward pass on the first batch: ")
    assert finding.fix == ("dtype=fp32",)


def test_a_pattern_of_layers_that_matches_none_has_a_hint() -> None:
    words = "numerics=on callbacks.ranges.layers=[stage1.*,haed]"
    assert [str(hint) for hint in found(hints.check_layers, words)] == [
        "warning: callbacks.ranges.layers: 'haed' matches no layer; nearest: head"
    ]


def test_a_run_says_at_its_start_what_the_doctor_says(
    tmp_path: Path, start_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    words = "model=mlp loss_scaling=none trainer.max_steps=1 trainer.clip_norm=1e-9"
    start_run(tmp_path, *words.split())
    said = [record.getMessage() for record in caplog.records if "fix:" in record.getMessage()]
    assert said == [str(hint) for hint in hints.hints_on(subject(words))]
    assert len(said) == 2


def test_the_words_typed_are_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("experiment=digits_mlp dtype=fp32 'ops.deny-=[exp]' 'ops.modules={head:fp32}'") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "experiment=digits_mlp dtype=fp32 'ops.deny-=[exp]' 'ops.modules={head:fp32}':"


@pytest.mark.parametrize("dtype", ["mixed", "mixed_bf16"])
def test_a_model_stored_in_half_throughout_is_examined(dtype: str) -> None:
    found_here = examine(subject(f"ops=none device=cpu dtype={dtype} trainer.epochs=1"))
    assert found_here[0].what.startswith("stage1.norm1, stage1.norm2")


@pytest.mark.parametrize("dtype", ["fp32", "mixed", "amp", "mixed_bf16", "amp_bf16"])
def test_a_module_with_parameters_of_its_own_is_examined(dtype: str) -> None:
    found_here = examine(subject(f"model._target_=planted.Plain device=cpu dtype={dtype}"))
    assert all(finding.severity is Severity.NOTE for finding in found_here)


@pytest.mark.parametrize("dtype", ["fp32", "mixed"])
@pytest.mark.parametrize("experiment", ["digits_mlp", "digits_gan"])
def test_an_examination_changes_nothing(experiment: str, dtype: str) -> None:
    dropout = "model.dropout=0.5" if experiment == "digits_mlp" else ""
    examined = subject(f"experiment={experiment} dtype={dtype} {dropout}")
    trainer = examined.trainer
    state = copy.deepcopy(trainer.state_dict()["optimizer"])
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    scales = {name: float(own.scale) for name, own in trainer.scalers.items()}
    generator = torch.get_rng_state()
    examine(examined)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())
    assert scales == {name: float(own.scale) for name, own in trainer.scalers.items()}
    assert trainer.progress.global_step == 0
    assert trainer.state_dict()["optimizer"] == state  # no moments, so no tensors, in either


def run(arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        doctor_command.main(shlex.split(arguments))
    return int(exit_.value.code or 0)


def test_the_exit_code_is_one_where_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("experiment=digits_mlp dtype=fp32") == 0
    nothing = "nothing found: the first step was tried and is finite"
    assert capsys.readouterr().out == f"experiment=digits_mlp dtype=fp32:\n{nothing}\n"
    assert run("experiment=digits_mlp dtype=fp32 optimizer.eps=1e-50") == 1
    assert capsys.readouterr().out == (
        "experiment=digits_mlp dtype=fp32 optimizer.eps=1e-50:\n"
        "error: optimizer.eps=1e-50 is 0 in float32, the format optimizer works in; "
        "fix: optimizer.eps=1e-08\n"
        "1 error\n"
    )


def test_the_projects_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, override dtype: fp32, override model: mlp, _self_]\n"
        "hydra: {searchpath: ['pkg://mpframe.conf']}\n"
    )
    assert run(f"--config-dir={tmp_path} --config-name=mine") == 0
    assert capsys.readouterr().out.startswith("configuration mine:\n")


def test_a_sweep_is_examined_job_by_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m experiment=digits_mlp optimizer.eps=0.5,1e-50 dtype=fp32") == 1
    heads = [line for line in capsys.readouterr().out.splitlines() if line.endswith(":")]
    assert heads == [
        f"experiment=digits_mlp optimizer.eps={eps} dtype=fp32:" for eps in ("0.5", "1e-50")
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("optimizer.epps=1", "mpframe: optimizer.epps: no such option; nearest: optimizer.eps"),
        ("--info", "mpframe: --info: no such option; give option=value, and -m for a sweep"),
        ("seed=1,2", "mpframe: seed=1,2: several values make a sweep; add -m"),
        ("init_from=/nonexistent", "mpframe: /nonexistent: no "),
    ],
)
def test_a_slip_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 1
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("experiment=digits_mlp")
    assert list(tmp_path.iterdir()) == []


def test_every_check_has_a_case() -> None:
    # A pattern of layers is for the user to correct: there is nothing to type.
    assert {case.check for case in CASES} | {hints.check_layers} == set(CHECKS)
