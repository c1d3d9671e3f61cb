"""Every mistake ends in exit code 1, one line that says the way out, and nothing left behind."""

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from checkout import ROOT

from mpframe.cli.commands.evaluate import main as evaluate_main
from mpframe.cli.commands.export import main as export_main
from mpframe.cli.commands.predict import main as predict_main
from mpframe.cli.commands.report import main as report_main
from mpframe.cli.commands.train import main as train_main
from mpframe.files.text import unreachable_in_one_line

CONF = ROOT / "conf"


@dataclass
class Case:
    """A command line, what its one line must hold, and what may be left in the output folder."""

    arguments: str
    says: str
    leaves: str = ""


CASES = [
    # a choice that does not exist
    Case("dtype=mixd", r"^mpframe: dtype=mixd: choose amp, amp_bf16, fp32, mixed, mixed_bf16; nearest: mixed"),
    Case("loss_scaling=Backof", r"loss_scaling=Backof: choose .*; nearest: Backoff"),
    Case("model=resnet19", r"model=resnet19: choose .*nearest: resnet18"),
    Case("experiment=nope", r"experiment=nope: choose "),
    Case("-m dtype=fp32,mixd", r"dtype=mixd: choose "),
    # a key that does not exist
    Case("trainr.epochs=2", r"trainr\.epochs: no such option; nearest: trainer\.epochs"),
    Case("trainer.max_stepz=3", r"trainer\.max_stepz: no such option; nearest: trainer\.max_steps"),
    Case("+trainer.max_stepz=3", r"trainer\.max_stepz: no such option; nearest: trainer\.max_steps"),
    Case("++trainer.max_stepz=3", r"trainer\.max_stepz: no such option; nearest: trainer\.max_steps"),
    Case("+sed=3", r"sed: no such option; nearest: seed"),
    Case("loss_scaling=static loss_scaling.growth_interval=5", r"loss_scaling\.growth_interval: no such option"),
    Case("model.widht=3", r"model\.widht: no such option; nearest: model\.width"),
    Case("+model.widht=3", r"model\.widht=3: .* takes no such argument; nearest: width", "failed"),
    # a value of the wrong type or out of its range
    Case("dataset.batch_size=0", r"dataset\.batch_size=0: must be a whole number samples >= 1"),
    Case("dataset.batch_size=many", r"dataset\.batch_size=many: must be a whole number"),
    Case("optimizer.lr=nan", r"optimizer\.lr=nan: must be a number > 0"),
    Case("optimizer.lr=-1", r"optimizer\.lr=-1: must be a number > 0"),
    Case("trainer.epochs=1.5", r"trainer\.epochs=1\.5: must be a whole number epochs >= 1"),
    Case("trainer.compile=perhaps", r"trainer\.compile=perhaps: must be true or false"),
    Case("dtype.half=float8", r"dtype\.half=float8: must be one of float16, bfloat16"),
    Case("loss_scaling=Backoff loss_scaling.growth_factor=0.5", r"loss_scaling\.growth_factor=0\.5: must be a number > 1 and <= 3\.4", "empty"),
    Case("loss_scaling=Backoff loss_scaling.min_scale=8 loss_scaling.max_scale=4", r"loss_scaling\.min_scale=8", "empty"),
    Case("seed=-1", r"seed=-1: must be a whole number >= 0"),
    Case("seed=1,2", r"seed=1,2: several values make a sweep; add -m"),
    Case("trainer.epochs", r"trainer\.epochs: not of the form option=value"),
    Case("optimizer.lr=${nope}", r"optimizer\.lr: .*nope"),
    Case("optimizer.lr=???", r"optimizer\.lr: must be given"),
    # ops
    Case("ops.allow+=[sofmax]", r"ops\.move: 'sofmax' is not an op of PyTorch; nearest: softmax", "failed"),
    Case("ops.allow=[conv2d,exp]", r"ops\.allow and ops\.deny both hold 'exp'", "failed"),
    Case("dtype.compute=native dtype.products=mxfp8", r"^mpframe: dtype\.compute=native: dtype\.products=mxfp8 has no native forward product on cpu: CPU does not support swizzle; choose dtype\.compute=auto, which emulates it$", "failed"),
    Case("ops.modules={nope:fp32}", r"ops\.modules\['nope'\] matches no module; the model has ", "failed"),
    # targets
    Case("model._target_=nowhere.Net", r"model\._target_=nowhere\.Net: ", "failed"),
    Case("optimizer=sgd +optimizer.betas=[0.9,0.99]", r"optimizer\.betas=\[0\.9, 0\.99\]: torch\.optim\.SGD takes no such argument", "failed"),
    # the machine and the data
    Case("device=gpu", r"device=gpu: choose auto, cpu, cuda, cuda:N or mps", "failed"),
    Case("dataset=fashion_mnist dataset.root=/nonexistent", r"dataset\.root=/nonexistent", "failed"),
    Case("dataset.batch_size=5000", r"dataset\.batch_size=5000: the training set has 1437 samples; use 1437 or fewer", "failed"),
    Case("dataset.workers=1000000", r"dataset\.workers=1000000: this machine's memory holds \d+ for training and as many for validation; use \d+, its cores, or fewer", "failed"),
    Case("resume=/nonexistent", r"resume=/nonexistent: no such folder", "failed"),
    Case("init_from=/nonexistent", r"/nonexistent: no readable checkpoint", "failed"),
]  # fmt: skip


def exactly(arguments: str, line: str, leaves: str = "") -> Case:
    """A case whose whole line is known."""
    return Case(arguments, rf"^mpframe: {re.escape(line)}$", leaves)


EXACT = [
    # choices and flags
    ("dtype=", "dtype=: choose amp, amp_bf16, fp32, mixed, mixed_bf16"),
    ("dtype=mixed,amp", "dtype=mixed,amp: several values make a sweep; add -m"),
    ("trainer=fast", "trainer=fast: choose default; nearest: default"),
    ("scheduler=cosine", "scheduler=cosine: choose exponential, none, onecycle, own, piecewise_constant, poly, transformer, warmup_cosine; nearest: warmup_cosine"),
    ("-m dtype=fp32,amp optimizer.lr=1e-3,nan", "optimizer.lr=nan: must be a number > 0"),
    ("--epochs=3", "--epochs=3: no such flag; write options as option=value; see --help"),
    ("--config-dir=/nonexistent", "--config-dir=/nonexistent: no such folder; name one with .yaml files"),
    ("epochs", "epochs: not of the form option=value; missing EQUAL at '<EOF>'"),
    ("=5", "=5: not of the form option=value; the option is missing"),
    ("trainer..epochs=3", "trainer..epochs=3: not of the form option=value; token recognition error at: '.'"),
    ("~optimizer", "optimizer=null: must be a mapping; choose a file of conf/optimizer"),
    # flags that are half said, or said twice
    ("-h extra", "extra: not of the form option=value; missing EQUAL at '<EOF>'"),
    ("-h sed=1", "sed: no such option; nearest: seed"),
    ("--config-name", "--config-name/-cn: expected one argument; see --help"),
    ("--cfg nope", "--cfg/-c: invalid choice: 'nope' (choose from 'job', 'hydra', 'all'); see --help"),
    ("--cfg job --info", "--cfg and --info: cannot be combined; give only one"),
    ("--cfg job -m seed=1,2", "--multirun and --cfg: cannot be combined; give only one"),
    ("--resolve", "--resolve: goes with --cfg or --help; add --cfg=job"),
    ("-p trainer", "--package=trainer: goes with --cfg; add --cfg=job"),
    ("-sc", "--shell-completion: add install=SHELL or uninstall=SHELL, e.g. bash"),
    (f"--config-dir={CONF} trainer.max_stepz=3", "trainer.max_stepz: no such option; nearest: trainer.max_steps"),
    ("hydra/launcher=nope", "hydra/launcher=nope: choose basic; Optuna, joblib and submitit come with pip install mpframe[sweep]"),
    ("hydra.run.dir=${x}", "hydra.run.dir: Interpolation key 'x' not found; set hydra.run.dir=FOLDER"),
    ("-m hydra.sweep.dir=${x} seed=1,2", "hydra.sweep.dir: Interpolation key 'x' not found; set hydra.sweep.dir=FOLDER"),
    ("hydra.mode=nope", "hydra.mode=nope: Invalid value 'nope', expected one of [RUN, MULTIRUN]"),
    # sweeps over nothing
    ("-m seed=range(1,2,0)", "seed=range(1,2,0): range() arg 3 must not be zero; give other values"),
    ("seed=range(1,2,0)", "seed=range(1,2,0): several values make a sweep; add -m"),
    ("-m dtype=glob(x*)", "dtype=glob(x*): matches no choice; there are amp, amp_bf16, fp32, mixed, mixed_bf16"),
    ("-m seed=glob(*)", "seed=glob(*): matches no choice; there are none: glob() is for groups"),
    ("-m optimizer.lr=interval(0,1)", "optimizer.lr=interval(0,1): needs a sweeper that draws values, as hydra/sweeper=optuna; without one give a list, range() or choice()"),
    # an experiment's size
    ("experiment=gpt_small", "experiment=gpt_small: choose bert_classifier, bert_spans, bikes, cifar10_adamw, cifar10_resnet18, cifar10_small, detection_ssd, detection_torchvision, digits_gan, digits_mlp, fashion_mnist_cnn, fine_tuning, fine_tuning_backbone, fine_tuning_digits, gpt, image_folder_resnet18, ladder, ladder_digits, photographs_unet, rossmann, shapes_unet, speech_lstm; use experiment=gpt +size=small"),
    ("experiment=gpt size=small", "size: no such option; use +size=small"),
    ("experiment=gpt +size=tiny", "size=tiny: must be small; leave it out for the full size"),
    ("experiment=bikes +size=small", "size=small: nothing chosen here has two sizes; docs/workloads.md lists the experiments that do"),
    # how long and how often
    ("trainer.epochs=0", "trainer.epochs=0: must be a whole number epochs >= 1"),
    ("trainer.epochs=null", "trainer.epochs=null: must be a whole number epochs >= 1"),
    ("trainer.max_steps=-1", "trainer.max_steps=-1: must be a whole number or null steps >= 0"),
    ("trainer.max_steps=1e3", "trainer.max_steps=1000.0: must be a whole number or null steps >= 0"),
    ("trainer.accumulate=0", "trainer.accumulate=0: must be a whole number batches >= 1"),
    ("trainer.eval_every=0", "trainer.eval_every=0: must be a whole number or null steps >= 1"),
    ("trainer.checkpoint_every=2.5", "trainer.checkpoint_every=2.5: must be a whole number or null steps >= 1, or as in 10min"),
    ("trainer.keep_last=-1", "trainer.keep_last=-1: must be a whole number checkpoints >= 0"),
    ("trainer.log_every=0", "trainer.log_every=0: must be a whole number steps >= 1"),
    ("trainer.max_consecutive_skips=0", "trainer.max_consecutive_skips=0: must be a whole number steps >= 1"),
    # what a step does
    ("trainer.clip_norm=0", "trainer.clip_norm=0: must be a number or null > 0"),
    ("trainer.clip_norm=inf", "trainer.clip_norm=inf: must be a number or null > 0"),
    ("trainer.ema_decay=1", "trainer.ema_decay=1: must be a number or null per step > 0 and < 1"),
    ("callbacks.loss_spikes.policy=skpi", "callbacks.loss_spikes.policy=skpi: must be one of off, warn, skip, stop; nearest: skip", "failed"),
    ("callbacks.progress_bar.shown=of", "callbacks.progress_bar.shown=of: must be one of auto, on, off", "failed"),
    ("callbacks.loss_spikes.factor=1", "callbacks.loss_spikes.factor=1: must be a number > 1", "failed"),
    ("dtype.master_weights=2", "dtype.master_weights=2: must be one of on, off, split"),
    ("dtype.mode=fp16", "dtype.mode=fp16: must be one of fp32, mixed, amp; use dtype=mixed or dtype=amp"),
    ("ops.allow=softmax", "ops.allow=softmax: must be a list"),
    # data
    ("dataset.workers=-1", "dataset.workers=-1: must be a whole number processes >= 0"),
    ("trainer.timeout=0", "trainer.timeout=0: must be a number seconds > 0"),
    ("trainer.timeout=soon", "trainer.timeout=soon: must be a number seconds > 0"),
    ("dataset.batch_size=[64]", "dataset.batch_size=[64]: must be a whole number samples >= 1"),
    ("dataset.batch_size=64.0", "dataset.batch_size=64.0: must be a whole number samples >= 1"),
    # optimizer and scaling
    ("optimizer.lr=0", "optimizer.lr=0: must be a number > 0"),
    ("optimizer.lr=null", "optimizer.lr=null: must be a number > 0"),
    ("loss_scaling.scale=8", "loss_scaling.scale: no such option; known: loss_scaling._target_, loss_scaling.half, loss_scaling.mode; an argument of your own class: +loss_scaling.scale=..."),
    ("loss_scaling=static loss_scaling.scale=nan", "loss_scaling.scale=nan: must be a number >= 1.175494351e-38 and <= 3.402823466e+38; leave it out for the default", "empty"),
    ("loss_scaling=Backoff loss_scaling.backoff_factor=1", "loss_scaling.backoff_factor=1: must be a number > 0 and < 1; leave it out for the default", "empty"),
    ("loss_scaling=Backoff loss_scaling.hysteresis=0", "loss_scaling.hysteresis=0: must be a whole number >= 1 and <= 2147483647; leave it out for the default", "empty"),
    ("loss_scaling=Backoff loss_scaling.init_scale=prob", "loss_scaling.init_scale=prob: must be probe or a number >= 1 and <= 16777216; set it, or move min_scale and max_scale", "empty"),
    ("loss_scaling=LogMax loss_scaling.overflow_probability=0.5", "loss_scaling.overflow_probability=0.5: must be a number > 0 and < 0.5; leave it out for the default", "empty"),
    # the run itself
    ("seed=1.5", "seed=1.5: must be a whole number >= 0 and <= 9223372036854775807"),
    ("seed=99999999999999999999", "seed=99999999999999999999: must be a whole number >= 0 and <= 9223372036854775807"),
    ("run_name=../elsewhere", "run_name=../elsewhere: must stay within runs/; for another place set hydra.run.dir"),
    ("hydra.run.dri=x", "hydra.run.dri: no such option of Hydra; nearest: hydra.run.dir, hydra.runtime"),
    ("init_from_except=[head.*]", "init_from_except=['head.*']: only works with init_from; give both"),
    ("model._target_=1", "model._target_=1: must be the dotted name of a class or function"),
    # what only the built objects know
    ("model._target_=os.getcwd", "model._target_=os.getcwd: must return a torch.nn.Module, got str", "failed"),
    ("optimizer.betas=[0.9]", "optimizer: torch.optim.AdamW refused its options: list index out of range", "failed"),
    ("scheduler.warmup=2", "scheduler.warmup=2: must be a fraction >= 0 and <= 1", "failed"),
    ("dtype.products=mxfp9", "dtype.products=mxfp9: choose none, fp8_blocks, fp8_delayed, fp8_rows, fp8_tensorwise, mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8, nvfp4, tf32, or a recipe of dtype.recipes; nearest: mxfp4, mxfp8", "failed"),
    ("ops.modules={head:fp16}", "ops.modules['head']=fp16: choose fp32, half, none or a recipe: fp8_blocks, fp8_delayed, fp8_rows, fp8_tensorwise, mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8, nvfp4, tf32", "failed"),
    ("dataset.classes=7", "dataset.classes=7: digits has 10; set dataset.classes=10", "failed"),
    ("model.classes=9", "after step 0: dataset: the loss CrossEntropyLoss raised IndexError (Target 9 is out of bounds), given outputs float32 [64, 9] and targets int64 [64] of 0 to 9; the targets name 10 classes, the outputs have 9: set model.classes=10, or correct the labels (training, epoch 0, batch 0, sample 379)", "failed"),
    ("model=gan", "after step 0: dataset: the loss CrossEntropyLoss raised TypeError (cross_entropy_loss(): argument 'input' (position 1) must be Tensor, not tuple), given outputs a tuple of float32 [64, 1], float32 [64, 1] and targets int64 [64] of 0 to 9; let the model return one tensor, or give the dataset a loss for what it returns (training, epoch 0, batch 0)", "failed"),
    ("optimizer._target_=torch.optim.SparseAdam trainer.clip_norm=1", "after step 0: optimizer: SparseAdam raised RuntimeError (SparseAdam does not support dense gradients, please consider Adam instead); HYDRA_FULL_ERROR=1 shows the traceback (training, epoch 0, batch 0)", "failed"),
]  # fmt: skip


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(folder), "HYDRA_FULL_ERROR": ""}
    return programs.run(arguments, folder, own)


@pytest.mark.parametrize(
    "case", [*CASES, *(exactly(*case) for case in EXACT)], ids=lambda case: case.arguments
)
def test_a_mistake_is_one_line(case: Case, tmp_path: Path) -> None:
    done = run(case.arguments.split(), tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 1
    assert len(lines) == 1, done.stderr
    assert re.search(case.says, lines[0]), lines[0]
    assert "Traceback" not in done.stderr
    assert_left_behind(tmp_path, case.leaves)


def test_the_documents_tell_how_many_there_are() -> None:
    text = " ".join((ROOT / "docs" / "security.md").read_text().split())
    assert f"{len(CASES) + len(EXACT)} bad command lines" in text


def assert_left_behind(folder: Path, status: str) -> None:
    """Nothing at all if the mistake was in the command line; never anything to resume from."""
    assert not list(folder.rglob("checkpoints/*"))
    if status == "empty":  # Hydra makes the folder before the scaler can be made.
        assert not [path for path in folder.rglob("*") if path.is_file()]
        return
    if not status:
        assert list(folder.iterdir()) == []
        return
    (summary,) = folder.rglob("summary.json")
    assert f'"status": "{status}"' in summary.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_is_not_replaced_by_a_cpu(tmp_path: Path) -> None:
    """In a Python of its own: nothing that it imports says anything on stderr."""
    done = subprocess.run(
        [sys.executable, programs.SCRIPT, "device=cuda"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": ""},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "mpframe: device=cuda: this machine has 0 CUDA devices; use device=cpu"
    )


def test_an_output_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = run(["hydra.run.dir=file/run"], tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(
        r"mpframe: hydra\.run\.dir=file/run: .*file is a file; choose a folder", done.stderr.strip()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_used_folder_is_not_trained_over(tmp_path: Path) -> None:
    arguments = ["hydra.run.dir=run", "trainer.max_steps=2", "dtype=fp32"]
    assert run(arguments, tmp_path).returncode == 0
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    done = run(arguments, tmp_path)
    assert done.returncode == 1
    assert "holds the checkpoints of a run; continue it with resume=auto" in done.stderr
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == kept


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
        inputs = torch.full((8,), float(index))
        if index == 37:
            inputs[2] = {"nothing": float("nan"), "endless": float("-inf")}.get(self.what, 0.0)
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "hangs":
                time.sleep(300)
            if self.what == "raises":
                raise OSError("no such picture")
        return inputs, index % 3

def task(what, split):
    good = Trap("")
    return classification(*((Trap(what), good) if split == "train" else (good, Trap(what))))

def net():
    return torch.nn.Linear(8, 3)
"""

# Seed 0 puts sample 37 into the last of four batches. How far the run is when it meets a killed
# worker depends on what that one had read ahead.
TROUBLES = [
    ("what=nothing", r"after step 3: dataset: training sample 37 holds NaN or inf in its inputs \(epoch 0, batch 3\); every value must be finite: fix or remove the sample"),
    ("what=endless dataset.split=val", r"after step 4: dataset: validation sample 37 holds NaN or inf in its inputs \(epoch 0, batch 2\); every value must be finite: fix or remove the sample"),
    ("what=raises dataset.workers=2", r"after step 3: dataset: sample 37 cannot be read: OSError \(no such picture\) at own.py:20; fix the dataset or its data"),
    ("what=killed dataset.workers=2", r"after step [0-3]: dataset.workers=2: worker 1 was killed by SIGKILL at training sample 37 \(epoch 0, batch 3\); the system kills what uses too much memory: try fewer dataset.workers"),
    ("what=hangs dataset.workers=1 trainer.timeout=1", r"after step 3: trainer.timeout=1: no batch within 1 s; worker 0 is at training sample 37 \(epoch 0, batch 3\); raise trainer.timeout, or fix what hangs"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "line"), TROUBLES, ids=lambda text: text[:30])
def test_trouble_in_the_data_is_named_and_leaves_no_process(
    options: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(DATA)
    words = ["dataset._target_=own.task", "model._target_=own.net", "dataset.batch_size=16"]
    split = [] if "split" in options else ["dataset.split=train"]
    done = run([*words, *split, *f"dataset.{options}".split()], tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(f"mpframe: {line}\n", done.stderr), done.stderr
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


LONG = "x" * 300
TRAINING = ["hydra.run.dir={}", "resume={}", "init_from={}", "--config-dir {}",
            "--config-dir={}"]  # fmt: skip
COMMANDS = [(train_main, words) for words in TRAINING] + [
    (evaluate_main, "checkpoint={}"), (predict_main, "checkpoint={} input=a.csv"),
    (export_main, "checkpoint={} out=w.safetensors"), (report_main, "{}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "words"), COMMANDS, ids=[f"{c.__module__[21:]} {w}" for c, w in COMMANDS]
)
@pytest.mark.parametrize(
    ("path", "said"), [(LONG, "File name too long"), ("d/x", "Permission denied")],
    ids=["too long", "forbidden"],
)  # fmt: skip
def test_a_path_that_cannot_be_reached_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Callable[[], None],
    words: str,
    path: str,
    said: str,
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
    if path == "d/x":
        monkeypatch.setattr(os, "stat", forbidden)
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 1
    named = words.format(path) if "--" in words else given[0]
    assert capsys.readouterr().err == (
        f"mpframe: {named}: {said}; name a path that you may enter, each name in it at most 255 bytes "
        "long\n"
    )
    failed = words.startswith(("resume=", "init_from="))  # What is wrong is known to the run alone.
    assert [path.name for path in tmp_path.iterdir()] == ["runs"] * failed


def test_other_errors_of_the_system_keep_their_traceback() -> None:
    with pytest.raises(FileNotFoundError), unreachable_in_one_line():
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")
    with pytest.raises(PermissionError), unreachable_in_one_line():
        raise PermissionError(errno.EACCES, "Permission denied")  # Of a socket, say.
