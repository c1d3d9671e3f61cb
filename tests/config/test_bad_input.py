"""Every mistake ends in exit code 1, one line that says the way out, and nothing left behind."""

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from in_process import train
from programs import command

from mpframe.cli.commands.evaluate import main as evaluate_main
from mpframe.cli.commands.export import main as export_main
from mpframe.cli.commands.predict import main as predict_main
from mpframe.cli.commands.report import main as report_main
from mpframe.cli.commands.train import main as train_main
from mpframe.config.command_line import prepare
from mpframe.core.errors import ConfigError, MpframeError
from mpframe.files.text import unreachable_in_one_line

Started = Callable[..., Any]

# Words, and the line that answers them; ... stands for what is left out of it.
FLAGS = [
    ("--epochs=3", "--epochs=3: no such flag; write options as option=value; see --help"),
    ("--config-dir=/nonexistent", "--config-dir=/nonexistent: no such folder; name one with .yaml files"),
    ("--config-name", "--config-name/-cn: expected one argument; see --help"),
    ("--cfg nope", "--cfg/-c: invalid choice: 'nope' (choose from 'job', 'hydra', 'all'); see --help"),
    ("--cfg job --info", "--cfg and --info: cannot be combined; give only one"),
    ("--cfg job -m seed=1,2", "--multirun and --cfg: cannot be combined; give only one"),
    ("--resolve", "--resolve: goes with --cfg or --help; add --cfg=job"),
    ("-p trainer", "--package=trainer: goes with --cfg; add --cfg=job"),
    ("-sc", "--shell-completion: add install=SHELL or uninstall=SHELL, e.g. bash"),
    ("--c fg", "ambiguous option: --c could match ...; see --help"),
    ("--experimental-rer=x.pickle", "--experimental-rerun=x.pickle: reads a pickle, which ..."),
    ("-m hydra.run.dir=x seed=1", "hydra.run.dir=x: does nothing with -m; use hydra.sweep.dir"),
    ("-h extra", "extra: not of the form option=value; missing EQUAL at '<EOF>'"),
    ("=5", "=5: not of the form option=value; the option is missing"),
    ("trainer..epochs=3", "trainer..epochs=3: not of the form option=value; token recognition error at: '.'"),
    ("seed=" + "1" * 10**6, "seed=" + "1" * 35 + "...: has 1000005 characters, and 32768 are allowed; put the value into a file of --config-dir"),
]  # fmt: skip
CHOICES = [
    ("dtype=mixd", "dtype=mixd: choose amp, amp_bf16, fp32, mixed, mixed_bf16; nearest: mixed"),
    ("dtype=", "dtype=: choose amp, amp_bf16, fp32, mixed, mixed_bf16"),
    ("dtype=fp16", "dtype=fp16: choose amp, amp_bf16, fp32, mixed, mixed_bf16; use dtype=mixed or dtype=amp"),
    ("scheduler=cosine", "scheduler=cosine: choose exponential, none, ...; nearest: warmup_cosine"),
    ("loss_scaling=512.0", "loss_scaling=512.0: choose ...; use loss_scaling=static loss_scaling.scale=512.0"),
    ("experiment=gpt_small", "experiment=gpt_small: choose bert_classifier, ...; use experiment=gpt +size=small"),
    ("experiment=ladder_small", "experiment=ladder_small: choose ...; use experiment=ladder_digits"),
    ("hydra/launcher=nope", "hydra/launcher=nope: choose basic; Optuna, joblib and submitit come with pip install mpframe[sweep]"),
    ("+dtype=amp", "+dtype=amp: a choice takes no +; write dtype=amp"),
    ("++experiment=bikes", "++experiment=bikes: a choice takes no +; write experiment=bikes"),
    ("+dtype/products=mxfp8", "+dtype/products=mxfp8: a choice takes no +; write dtype/products=mxfp8"),
    ("model=[mlp,cnn]", "model=[mlp,cnn]: give one choice, as model=NAME"),
    ("experiment=gpt size=small", "size: no such option; use +size=small"),
    ("experiment=gpt +size=tiny", "size=tiny: must be small; leave it out for the full size"),
    ("+size=small", "size=small: nothing chosen here has two sizes; docs/workloads.md lists the experiments that do"),
]  # fmt: skip
OPTIONS = [
    ("trainr.epochs=2", "trainr.epochs: no such option; nearest: trainer.epochs"),
    ("trainer.max_stepz=3", "trainer.max_stepz: no such option; nearest: trainer.max_steps"),
    ("+trainer.max_stepz=3", "trainer.max_stepz: no such option; nearest: trainer.max_steps"),
    ("+sed=3", "sed: no such option; nearest: seed"),
    ("-h sed=1", "sed: no such option; nearest: seed"),
    ("trainer.iter_size=4", "trainer.iter_size: no such option; use trainer.accumulate=N"),
    ("dataset.worker_timeout=5", "dataset.worker_timeout: no such option; use trainer.timeout=SECONDS..."),
    ("model.widht=3", "model.widht: no such option; nearest: model.width; an argument of your own class: +model.widht=..."),
    ("loss_scaling.scale=8", "loss_scaling.scale: no such option; known: loss_scaling._target_, loss_scaling.half, loss_scaling.mode; an argument of your own class: +loss_scaling.scale=..."),
    ("trainer.epochs=two", "trainer.epochs=two: must be a whole number epochs >= 1"),
    ("optimizer.lr=nan", "optimizer.lr=nan: must be a number > 0"),
    ("optimizer.lr=${nope}", "optimizer.lr: Interpolation key 'nope' not found; set optimizer.lr=VALUE"),
    ("optimizer.lr=???", "optimizer.lr: must be given, e.g. optimizer.lr=VALUE"),
    ("~optimizer", "optimizer=null: must be a mapping; choose a file of conf/optimizer"),
    ("~seed", "~seed: every run has this option; give it a value, seed=VALUE"),
    ("run_name=../elsewhere", "run_name=../elsewhere: must stay within runs/; for another place set hydra.run.dir"),
    ("hydra.run.dri=x", "hydra.run.dri: no such option of Hydra; nearest: hydra.run.dir, hydra.runtime"),
    ("hydra.run.dir=${x}", "hydra.run.dir: Interpolation key 'x' not found; set hydra.run.dir=FOLDER"),
    ("hydra.run.dir=", "hydra.run.dir=: is empty, perhaps from a shell variable that is not set; name a folder, and . for this one"),
    ("hydra.mode=nope", "hydra.mode=nope: Invalid value 'nope', expected one of [RUN, MULTIRUN]"),
    ("hydra.sweep.dir=x", "hydra.sweep.dir=x: does nothing without -m; add -m, or use hydra.run.dir"),
]  # fmt: skip
SWEEPS = [
    ("seed=1,2", "seed=1,2: several values make a sweep; add -m"),
    ("-m dtype=fp32,mixd", "dtype=mixd: choose amp, amp_bf16, fp32, mixed, mixed_bf16; nearest: mixed"),
    ("-m dtype=fp32,amp optimizer.lr=1e-3,nan", "optimizer.lr=nan: must be a number > 0"),
    ("-m loss_scaling=Backoff,LogMax loss_scaling.growth_interval=5", "loss_scaling.growth_interval: no such option of loss_scaling=LogMax..."),
    ("-m hydra.sweep.dir=${x} seed=1,2", "hydra.sweep.dir: Interpolation key 'x' not found; set hydra.sweep.dir=FOLDER"),
    ("-m seed=range(1,2,0)", "seed=range(1,2,0): range() arg 3 must not be zero; give other values"),
    ("-m seed=range(1,1)", "seed=range(1,1): holds no value, so the sweep would have no job; give at least one"),
    ("-m dtype=glob(x*)", "dtype=glob(x*): matches no choice; there are amp, amp_bf16, fp32, mixed, mixed_bf16"),
    ("-m seed=glob(*)", "seed=glob(*): matches no choice; there are none: glob() is for groups"),
    ("-m optimizer.lr=interval(0,1)", "optimizer.lr=interval(0,1): needs a sweeper that draws values, as hydra/sweeper=optuna; without one give a list, range() or choice()"),
    ("-m dtype=[] seed=1,2", "dtype=[]: give one choice, as dtype=NAME"),
    ("-m seed=range(1,1000) dtype=amp model.width=range(1,1000)", "seed=range(1,1000) model.width=range(1,1000): make more than 100000 jobs; give fewer values"),
]  # fmt: skip
# Known when the objects are built, or in the first step.
LATER = [
    ("ops.allow+=[sofmax]", "ops.move: 'sofmax' is not an op of PyTorch; nearest: softmax, _softmax, fmax"),
    ("+model.widht=3", "model.widht=3: mpframe.workloads.images.cnn takes no such argument; nearest: width"),
    ("model._target_=os.getcwd", "model._target_=os.getcwd: must return a torch.nn.Module, got str"),
    ("optimizer.betas=[0.9]", "optimizer: torch.optim.AdamW refused its options: list index out of range"),
    ("scheduler.warmup=2", "scheduler.warmup=2: must be a fraction >= 0 and <= 1"),
    ("callbacks.loss_spikes.policy=skpi", "callbacks.loss_spikes.policy=skpi: must be one of off, warn, skip, stop; nearest: skip"),
    ("dtype.products=mxfp9", "dtype.products=mxfp9: choose none, ..., or a recipe of dtype.recipes; nearest: mxfp4, mxfp8"),
    ("ops.modules={head:fp16}", "ops.modules['head']=fp16: choose fp32, half, none or a recipe: fp8_blocks, ..."),
    ("dataset.classes=7", "dataset.classes=7: digits has 10; set dataset.classes=10"),
    ("dataset=fashion_mnist dataset.root=/nonexistent", "dataset.root=/nonexistent..."),
    ("dataset.batch_size=5000", "dataset.batch_size=5000: the training set has 1437 samples; use 1437 or fewer"),
    ("resume=/nonexistent", "resume=/nonexistent: no such folder..."),
    ("model.classes=9", "after step 0: dataset: the loss CrossEntropyLoss raised IndexError (Target 9 is out of bounds), given outputs float32 [64, 9] and targets int64 [64] of 0 to 9; the targets name 10 classes, the outputs have 9: set model.classes=10, or correct the labels (training, epoch 0, batch 0, sample 379)"),
    ("model=gan", "after step 0: dataset: the loss CrossEntropyLoss raised TypeError (cross_entropy_loss(): argument 'input' (position 1) must be Tensor, not tuple), given outputs a tuple of float32 [64, 1], float32 [64, 1] and targets int64 [64] of 0 to 9; let the model return one tensor, or give the dataset a loss for what it returns (training, epoch 0, batch 0)"),
]  # fmt: skip
# What is said, and what may be left in the output folder, by a program of its own.
PROGRAMS = [
    ("+trainer.max_stepz=3", "trainer.max_stepz: no such option; nearest: trainer.max_steps", ""),
    ("-m dtype=fp32,mixd", "dtype=mixd: choose ...", ""),
    ("loss_scaling=static loss_scaling.scale=nan", "loss_scaling.scale=nan: must be a number >= ...", "empty"),
    ("optimizer._target_=torch.optim.SparseAdam trainer.clip_norm=1", "after step 0: optimizer: SparseAdam raised RuntimeError (SparseAdam does not support dense gradients, please consider Adam instead); HYDRA_FULL_ERROR=1 shows the traceback (training, epoch 0, batch 0)", "failed"),
]  # fmt: skip


def assert_said(line: str, expected: str) -> None:
    pattern = "[^\n]*".join(re.escape(part) for part in expected.split("..."))
    assert re.fullmatch(pattern, line), line


def assert_refused(start: Callable[[], object], expected: str) -> None:
    with pytest.raises(MpframeError) as refused:
        start()
    assert_said(str(refused.value), expected)


def test_flags_are_refused_before_hydra() -> None:
    for words, line in FLAGS:
        given = words.split()
        if "..." in words or len(words) > 100:
            with pytest.raises(ConfigError) as refused:
                prepare(given)
            assert str(refused.value) == line
        else:
            assert_refused(lambda given=given: prepare(given), line)  # type: ignore[misc]


def cases(rows: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*row, id=row[0]) for row in rows]


@pytest.mark.parametrize(("words", "line"), cases([*CHOICES, *OPTIONS, *SWEEPS]))
def test_a_mistake_is_refused_before_a_job(words: str, line: str, started: Started) -> None:
    assert_refused(lambda: started(*words.split()), line)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(("words", "line"), cases(LATER))
def test_a_mistake_in_a_run_is_one_line(words: str, line: str, tmp_path: Path) -> None:
    assert_refused(lambda: train(tmp_path, *words.split()), line)
    assert_left_behind(tmp_path, "failed")


@pytest.mark.parametrize(("words", "line", "leaves"), PROGRAMS)
def test_a_program_says_its_line(words: str, line: str, leaves: str, tmp_path: Path) -> None:
    done = command(tmp_path, *words.split())
    assert done.returncode == 1
    assert_said(done.stderr.removesuffix("\n"), f"mpframe: {line}")
    assert_left_behind(tmp_path, leaves)


def test_the_documents_tell_how_many_there_are() -> None:
    text = " ".join((ROOT / "docs" / "security.md").read_text().split())
    rows = [*FLAGS, *CHOICES, *OPTIONS, *SWEEPS, *LATER, *PROGRAMS]
    assert f"{len(rows)} bad command lines" in text


def assert_left_behind(folder: Path, status: str) -> None:
    """Nothing at all if the mistake was in the command line; never anything to resume from."""
    assert not list(folder.rglob("checkpoints/*"))
    if status == "empty":  # Hydra makes the folder before the scaler can be made.
        assert not [path for path in folder.rglob("*") if path.is_file()]
    elif not status:
        assert list(folder.iterdir()) == []
    else:
        (summary,) = folder.rglob("summary.json")
        assert f'"status": "{status}"' in summary.read_text()


def test_an_output_folder_that_cannot_be_written(tmp_path: Path, started: Started) -> None:
    (tmp_path / "file").write_text("in the way")
    said = r"^hydra\.run\.dir=file/run: .*file is a file; choose a folder$"
    with pytest.raises(ConfigError, match=said):
        started("hydra.run.dir=file/run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# Trouble in the data

DATA = """
import os, signal, time, torch
from torch.utils.data import Dataset
from mpframe.data.task import classification

class Trap(Dataset):
    def __init__(self, what):
        self.what = what
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 37:
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "raises":
                raise OSError("no such picture")
        inputs = torch.full((8,), float(index))
        inputs[2] = float("nan") if index == 37 and self.what == "nothing" else 0.0
        return inputs, index % 3

def task(what, split):
    good = Trap("")
    return classification(*((Trap(what), good) if split == "train" else (good, Trap(what))))

def net():
    return torch.nn.Linear(8, 3)
"""

# Seed 0 puts sample 37 into the last of four batches.
TROUBLES = [
    ("what=nothing dataset.split=val", "after step 4: dataset: validation sample 37 holds NaN or inf in its inputs (epoch 0, batch 2); every value must be finite: fix or remove the sample"),
    ("what=raises", "after step 3: dataset: sample 37 cannot be read: OSError (no such picture) at own_data.py:16; fix the dataset or its data"),
]  # fmt: skip
TRAP = ["dataset._target_=own_data.task", "model._target_=own_data.net", "dataset.batch_size=16"]


@pytest.mark.parametrize(("options", "line"), TROUBLES)
def test_trouble_in_the_data_is_named(
    options: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data.py").write_text(DATA)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    split = [] if "split" in options else ["dataset.split=train"]
    words = [*TRAP, *split, *f"dataset.{options}".split()]
    assert_refused(lambda: train(tmp_path / "run", *words), line)
    assert_left_behind(tmp_path / "run", "failed")


def test_a_killed_worker_is_named_and_no_process_is_left(tmp_path: Path) -> None:
    (tmp_path / "own_data.py").write_text(DATA)
    words = ["dataset.what=killed", "dataset.split=train", "dataset.workers=2"]
    done = command(tmp_path, *TRAP, *words)
    assert done.returncode == 1
    # How far the run is depends on what the worker had read ahead.
    said = (
        r"mpframe: after step [0-3]: dataset\.workers=2: worker 1 was killed by SIGKILL at "
        r"training sample 37 \(epoch 0, batch 3\); the system kills what uses too much memory: "
        r"try fewer dataset\.workers\n"
    )
    assert re.fullmatch(said, done.stderr), done.stderr
    assert_left_behind(tmp_path, "failed")
    limit = time.monotonic() + 10  # A worker notices within seconds that its program has ended.
    while any(_leads_to(path, tmp_path) for path in Path("/proc").glob("[0-9]*/cwd")):
        assert time.monotonic() < limit
        time.sleep(0.05)


def _leads_to(link: Path, folder: Path) -> bool:
    try:
        return link.readlink() == folder
    except OSError:  # The process has ended.
        return False


# Paths that cannot be reached

LONG, FORBIDDEN = "x" * 300, "d/x"
UNREACHABLE = [
    (train_main, "hydra.run.dir={}", LONG), (train_main, "resume={}", FORBIDDEN),
    (train_main, "--config-dir {}", LONG), (train_main, "--config-dir={}", FORBIDDEN),
    (evaluate_main, "checkpoint={}", FORBIDDEN), (predict_main, "checkpoint={} input=a.csv", LONG),
    (export_main, "checkpoint={} out=w.safetensors", FORBIDDEN), (report_main, "{}", LONG),
]  # fmt: skip


@pytest.mark.parametrize(("main", "words", "path"), UNREACHABLE)
def test_a_path_that_cannot_be_reached_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    main: Callable[[], None],
    words: str,
    path: str,
) -> None:
    """A folder that one may not enter is faked: root enters all."""
    stat = os.stat

    def forbidden(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("d/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.chdir(tmp_path)
    given = words.format(path).split(" ")
    monkeypatch.setattr(sys, "argv", ["mpframe", *given])
    if path == FORBIDDEN:
        monkeypatch.setattr(os, "stat", forbidden)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    named = words.format(path) if "--" in words else given[0]
    why = "Permission denied" if path == FORBIDDEN else "File name too long"
    assert capsys.readouterr().err == (
        f"mpframe: {named}: {why}; name a path that you may enter, each name in it at most 255 "
        "bytes long\n"
    )
    failed = words.startswith("resume=")  # What is wrong is known to the run alone.
    assert [path.name for path in tmp_path.iterdir()] == ["runs"] * failed


def test_other_errors_of_the_system_keep_their_traceback() -> None:
    with pytest.raises(FileNotFoundError), unreachable_in_one_line():
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")
    with pytest.raises(PermissionError), unreachable_in_one_line():
        raise PermissionError(errno.EACCES, "Permission denied")  # Of a socket, say.
