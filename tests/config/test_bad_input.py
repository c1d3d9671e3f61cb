"""Every mistake ends in exit code 1, one line that says the way out, and nothing left behind."""

import errno
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import Patch, Shown, refused
from in_process import train

from mpframe.cli.commands import evaluate, export, predict, report
from mpframe.cli.commands import train as training
from mpframe.config.command_line import compose_named, jobs, prepare
from mpframe.core.errors import MpframeError
from mpframe.files.text import unreachable_in_one_line

# Words, and the line that answers them; ... stands for what is left out of it.
FLAGS = [
    ("--epochs=3", "--epochs=3: no such flag; write options as option=value; see --help"),
    ("--config-dir=/nonexistent", "--config-dir=/nonexistent: no such folder; name one with .yaml files"),
    ("--cfg nope", "--cfg/-c: invalid choice: 'nope' (choose from 'job', 'hydra', 'all'); see --help"),
    ("--cfg job -m seed=1,2", "--cfg and --multirun: cannot be combined; give only one"),
    ("--experimental-rer=x.pickle", "--experimental-rerun=x.pickle: reads a pickle, which ..."),
    ("=5", "=5: not of the form option=value; the option is missing"),
    ("trainer..epochs=3", "trainer..epochs=3: not of the form option=value; token recognition error at: '.'"),
]  # fmt: skip
COMPOSED = [
    ("dtype=fp16", "dtype=fp16: choose amp, amp_bf16, fp32, mixed, mixed_bf16; use dtype=mixed or dtype=amp"),
    ("experiment=gpt_small", "experiment=gpt_small: choose bert_classifier, ...; nearest: cifar10_small, gpt"),
    ("hydra/launcher=nope", "hydra/launcher=nope: choose basic; Optuna, joblib and submitit come with pip install mpframe[sweep]"),
    ("experiment=gpt size=small", "size: no such option; use +size=small"),
    ("numerics.every=10", "numerics.every: no such option; use callbacks.ranges.every=N"),
    ("experiment=gpt +size=tiny", "size=tiny: must be small; leave it out for the full size"),
    ("+size=small", "size=small: nothing chosen here has two sizes; docs/workloads.md lists the experiments that do"),
    ("trainer.precision=bf16-mixed", "trainer.precision: no such option; use dtype=amp_bf16"),
    ("model.widht=3", "model.widht: no such option; nearest: model.width; an argument of your own class: +model.widht=..."),
    ("loss_scaling.scale=8", "loss_scaling.scale: no such option; known: loss_scaling._target_, loss_scaling.half, loss_scaling.mode; an argument of your own class: +loss_scaling.scale=..."),
    ("optimizer.lr=${nope}", "optimizer.lr: Interpolation key 'nope' not found; set optimizer.lr=VALUE"),
    ("~optimizer", "optimizer=null: must be a mapping; choose a file of conf/optimizer"),
    ("+loss_scaling=nan", "+loss_scaling=nan: a choice takes no +; write loss_scaling=nan"),
    ("hydra.mode=nope", "hydra.mode=nope: Invalid value 'nope', expected one of [RUN, MULTIRUN]"),
    ("-m seed=range(1,2,0)", "seed=range(1,2,0): range() arg 3 must not be zero; give other values"),
    ("-m seed=glob(*)", "seed=glob(*): holds no value, so the sweep would have no job; give at least one"),
    ("-m dtype=[] seed=1,2", "dtype=[]: give one choice, as dtype=NAME"),
]  # fmt: skip
# Of a stored configuration.
NAMED = [
    ("--config-path=nowhere", "--config-path=nowhere: no such folder; name one with .yaml files"),
    ("--config-dir", "--config-dir/-cd: expected one argument; see --help"),
    ("--cfg=job", "--cfg: is for mpframe train; leave it out"),
    ("seed=1,2", "seed=1,2: give one value; there is no sweep here"),
]
BEFORE_A_JOB = [
    ("++experiment=bikes", "++experiment=bikes: a choice takes no +; write experiment=bikes"),
    ("model=[mlp,cnn]", "model=[mlp,cnn]: give one choice, as model=NAME"),
    ("+trainer.max_stepz=3", "trainer.max_stepz: no such option; nearest: trainer.max_steps"),
    ("-h sed=1", "sed: no such option; nearest: seed"),
    ("optimizer.lr=???", "optimizer.lr: must be given, e.g. optimizer.lr=VALUE"),
    ("~seed", "~seed: every run has this option; give it a value, seed=VALUE"),
    ("hydra.run.dri=x", "hydra.run.dri: no such option of Hydra; nearest: hydra.run.dir, hydra.runtime"),
    ("hydra.run.dir=${x}", "hydra.run.dir: Interpolation key 'x' not found; set hydra.run.dir=FOLDER"),
    ("hydra.run.dir=", "hydra.run.dir=: is empty, perhaps from a shell variable that is not set; name a folder, and . for this one"),
    ("hydra.sweep.dir=x", "hydra.sweep.dir=x: does nothing without -m; add -m, or use hydra.run.dir"),
    ("-m hydra.run.dir=x seed=1", "hydra.run.dir=x: does nothing with -m; use hydra.sweep.dir"),
    ("--resolve", "Hydra: The --resolve flag can only be used in conjunction with --cfg or --help..."),
    ("resume=/nonexistent", "resume=/nonexistent: no such folder; name a run's folder or a checkpoint"),
    ("trainer.clip_norm=1 trainer.clip_value=1", "trainer.clip_norm and trainer.clip_value: cannot be combined; give only one"),
    ("seed=1,2", "seed=1,2: several values make a sweep; add -m"),
    ("-m dtype=fp32,amp optimizer.lr=1e-3,nan", "optimizer.lr=nan: must be a number > 0"),
    ("-m loss_scaling=Backoff,LogMax loss_scaling.growth_interval=5", "loss_scaling.growth_interval: no such option; ..."),
    ("-m seed=range(1,1)", "seed=range(1,1): holds no value, so the sweep would have no job; give at least one"),
    ("-m dtype=glob(x*)", "dtype=glob(x*): holds no value, so the sweep would have no job; give at least one"),
    ("-m optimizer.lr=interval(0,1)", "optimizer.lr=interval(0,1): ...; give other values"),
    ("-m seed=range(1,1000) dtype=amp model.width=range(1,1000)", "seed=range(1,1000) model.width=range(1,1000): make more than 100000 jobs; give fewer values"),
]  # fmt: skip
# Known when the objects are built.
LATER = [
    ("model._target_=os.getcwd", "model._target_=os.getcwd: must return an object of class Module, got str"),
    ("optimizer.betas=[0.9]", "optimizer: torch.optim.AdamW refused its options: list index out of range"),
    ("callbacks.loss_spikes.policy=skpi", "callbacks.loss_spikes.policy=skpi: must be one of off, warn, skip, stop"),
    ("dataset.batch_size=5000", "dataset.batch_size=5000: the training set has 1437 samples; use 1437 or fewer"),
]  # fmt: skip


def assert_said(line: str, expected: str) -> None:
    parts = re.split(r"(?<!\\)\.\.\.", expected)
    pattern = "[^\n]*".join(re.escape(part.replace("\\...", "...")) for part in parts)
    assert re.fullmatch(pattern, line), line


def assert_refused(start: Callable[..., object], words: str, expected: str) -> None:
    assert_said(refused(MpframeError, start, words.split()), expected)


def assert_left_behind(folder: Path, status: str) -> None:
    """Nothing at all if the mistake was in the command line; never anything to resume from."""
    assert not list(folder.rglob("checkpoints/*"))
    said = [f'"status": "{status}"' in own.read_text() for own in folder.rglob("summary.json")]
    assert said == [True] * bool(status)
    assert status or list(folder.iterdir()) == []


def test_flags_are_refused_before_hydra_and_words_where_a_job_is_composed() -> None:
    compose = lambda words: next(jobs(words))  # noqa: E731
    for start, rows in ((prepare, FLAGS), (compose, COMPOSED), (compose_named, NAMED)):
        for words, line in rows:
            assert_refused(start, words, line)


@pytest.mark.parametrize(("words", "line"), BEFORE_A_JOB)
def test_it_is_refused_before_a_job(words: str, line: str, started: Any, tmp_path: Path) -> None:
    assert_refused(lambda given: started(*given), words, line)
    assert_left_behind(tmp_path, "")


@pytest.mark.parametrize(("words", "line"), LATER)
def test_a_mistake_in_a_run_is_one_line(words: str, line: str, tmp_path: Path) -> None:
    assert_refused(lambda given: train(tmp_path, *given), words, line)
    assert_left_behind(tmp_path, "failed")


def test_an_output_folder_that_cannot_be_written(tmp_path: Path, started: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    said = "hydra.run.dir=file/run: ...file is a file; choose a folder"
    assert_refused(lambda given: started(*given), "hydra.run.dir=file/run", said)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


LONG = "x" * 300
UNREACHABLE = [
    *((training, f"hydra.run.dir={LONG}"), (training, f"resume={LONG}"), (report, LONG)),
    *((training, f"--config-dir {LONG}"), (evaluate, f"checkpoint={LONG}")),
    (predict, f"checkpoint={LONG} input=a.csv"),
    (export, f"checkpoint={LONG} out=w.safetensors"),
]


@pytest.mark.parametrize(("program", "words"), UNREACHABLE)
def test_a_path_that_cannot_be_reached_is_one_line(
    program: Any, words: str, here: Path, monkeypatch: Patch, capsys: Shown
) -> None:
    monkeypatch.setattr(sys, "argv", ["mpframe", *words.split()])
    with pytest.raises(SystemExit) as ended:
        program.main()
    way = "name a path that you may enter, each name in it at most 255 bytes long"
    said = rf"mpframe: \S*{LONG}\S*: File name too long; {way}\n"
    assert ended.value.code == 1
    assert re.fullmatch(said, capsys.readouterr().err)
    assert not list(here.iterdir())


def test_of_the_errors_of_the_system_those_of_a_path_are_one_line() -> None:
    with pytest.raises(MpframeError, match=r"^d/x: Permission d"), unreachable_in_one_line():
        raise PermissionError(errno.EACCES, "Permission denied", "d/x")
    with pytest.raises(FileNotFoundError), unreachable_in_one_line():
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")
    with pytest.raises(PermissionError), unreachable_in_one_line():
        raise PermissionError(errno.EACCES, "Permission denied")  # Of a socket, say.
