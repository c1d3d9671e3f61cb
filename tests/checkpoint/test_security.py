"""Attacks on what a run reads and searches of what it leaves: see docs/security.md.

A stored configuration is attacked in test_evaluate.py, CIFAR-10's pickles and image trees in the
tests of those readers.
"""

import ast
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import yaml
from checkout import ROOT
from in_process import StartRun, train

from mpframe import checkpoint
from mpframe.checkpoint.folder import Manifest, sha256_of
from mpframe.cli.commands.doctor import main as doctor
from mpframe.cli.commands.evaluate import evaluate
from mpframe.cli.commands.export import main as export
from mpframe.config.command_line import jobs, prepare
from mpframe.core.errors import CheckpointError, ConfigError, DataError

SMALL = ["dtype=fp32", "model.width=4", "trainer.max_steps=2"]


class Attack:
    """Unpickled, it leaves a file."""

    def __init__(self, call: Callable[..., Any] = os.system, *arguments: Any) -> None:
        self.reduced = call, arguments or ("touch attacked",)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("attacked").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder, *SMALL)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def sealed(run: Path, content: bytes) -> None:
    """Put other bytes into the newest checkpoint, with digests that are right."""
    folder = checkpoint.newest(run)
    (folder / "state.pt").write_bytes(content)
    manifest = Manifest.read(folder)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
        for name in manifest.files
    }
    (folder / "manifest.json").write_text(replace(manifest, files=files).text())


# A checkpoint


def saved(state: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def repacked(content: bytes, compression: int, rename: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for entry in old.infolist():
            new.writestr(f"{rename}{entry.filename}", old.read(entry), compression)
    return buffer.getvalue()


STATE = {"trainer": {"weights": {"a": torch.zeros(2)}}}
NESTED: list[Any] = []
NESTED.append(NESTED)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "code": (saved({"trainer": Attack()}), "holds code, which is never run"),
    "eval": (saved({"a": Attack(eval, "open('attacked', 'w')")}), "holds code"),
    "code in an old file": (
        saved({"trainer": Attack()}, _use_new_zipfile_serialization=False),
        "not a saved state",
    ),
    "a bare pickle": (pickle.dumps(Attack()), "not a saved state"),
    "a bomb": (
        repacked(saved({"a": torch.zeros(2**22)}), zipfile.ZIP_DEFLATED),
        "its entries are not stored as torch stores them",
    ),
    "a name that leaves": (repacked(saved(STATE), zipfile.ZIP_STORED, "../../"), "not stored as"),
    "an absolute name": (repacked(saved(STATE), zipfile.ZIP_STORED, "/etc/"), "not stored as"),
    "a hollow tensor": (
        saved({"trainer": {"weights": {"a": torch.zeros(1).expand(10**12)}}}),
        "a tensor of 1000000000000 values in a file of",
    ),
    "no run": (
        saved({"trainer": {"weights": {"a": 3}}}),
        "holds no weights of a run|unknown to the model",
    ),
    "endless": (saved({"trainer": NESTED}), "refused, nested so that it expands to millions"),
    "a list": (saved([1, 2]), "holds a list, not a run's state"),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "evaluate": lambda run: evaluate(run, []),
    "init_from": lambda run: train(run.parent / "next", *SMALL, f"init_from={run}"),
    "resume": lambda run: train(run.parent / "next", *SMALL, f"resume={run}"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused_in_one_line(name: str, reader: str, run: Path) -> None:
    content, text = HOSTILE[name]
    sealed(run, content)
    with pytest.raises(CheckpointError, match=text) as refused:
        READERS[reader](run)
    assert "\n" not in str(refused.value)


def test_the_page_tells_the_size_of_the_table() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert f"{len(HOSTILE)} hostile state files are read in {len(READERS)} ways and exp" in page


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_not_exported(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed(run, HOSTILE[name][0])
    with pytest.raises(SystemExit):
        export([f"checkpoint={run}", "out=x.safetensors"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpframe: ")
    assert not Path("x.safetensors").exists()


def test_the_attacks_would_work_on_a_reader_that_unpickles(tmp_path: Path) -> None:
    """The control: what is refused above does leave its file elsewhere."""
    torch.load(io.BytesIO(HOSTILE["code"][0]), weights_only=False)
    assert Path("attacked").exists()
    Path("attacked").unlink()
    pickle.loads(HOSTILE["a bare pickle"][0])
    assert Path("attacked").exists()
    Path("attacked").unlink()


# A data file


def test_a_pickle_as_data_is_refused(start_run: StartRun, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"labels": [0], "data": Attack()}, protocol=2))
    with pytest.raises(DataError, match="refused, not a file of CIFAR-10's Python version"):
        start_run(tmp_path / "run", "dataset=cifar10", f"dataset.root={tmp_path}/data")


def test_no_reader_of_the_package_unpickles_or_unpacks() -> None:
    """Nothing is ever extracted, so no archive can leave its folder.

    Nothing is unpickled but CIFAR-10's published files, by an unpickler that calls nothing else.
    """
    for path in sorted((ROOT / "mpframe").rglob("*.py")):
        text = path.read_text()
        assert "Unpickler" not in text or path.name == "cifar.py", path
        for node in ast.walk(ast.parse(text)):
            names = _imported(node)
            assert not names & {"tarfile", "shelve", "dill", "joblib", "cloudpickle"}, path
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert not re.fullmatch(
                r"pickle\.loads?|.*\.extract(all)?|shutil\.unpack_archive|eval|exec|os\.system|"
                r"yaml\.(load|unsafe_load|full_load)|np\.load|torch\.hub\..*",
                called,
            ), f"{path}: {called}"
            if called == "torch.load":
                arguments = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert arguments["weights_only"] == "True", path


def _imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def test_tensorboard_is_never_bound_to_the_network() -> None:
    """mpframe starts no server, and no page tells to open one to others."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").glob("*.py")]
    for path in [*pages, *(ROOT / "mpframe").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]:
        text = path.read_text()
        assert not re.search(r"--bind_all|--host[ =]|0\.0\.0\.0", text), path
        if path.suffix == ".py":
            assert not re.search(r"tensorboard\.program|http\.server|socketserver", text), path


# A name


@pytest.mark.parametrize("name", ["../escape", "a/../../escape", "/etc/escape", "..", "a\\..\\b"])
def test_a_run_name_stays_within_runs(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        list(jobs([f"run_name='{name}'"]))
    text = str(refused.value)
    assert text.startswith("run_name=")
    assert text.endswith("must stay within runs/; for another place set hydra.run.dir")
    assert list(tmp_path.iterdir()) == []


def test_a_name_may_have_folders() -> None:
    assert prepare(["run_name=a/b..c"]) == ["run_name=a/b..c"]


# A secret of the environment

SECRET = "hunter2-correct-horse"
OWN = """
import logging, torch

def net(token, fails=False, handed_on=""):
    logging.getLogger("own").warning("connecting with %s", token)
    if fails:
        raise ValueError(f"{token} was refused")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""


def train_with_secret(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(OWN)
    environment = {
        "PYTHONPATH": str(folder),
        "MY_TOKEN": SECRET,
        "PLAIN_NAME": SECRET[::-1],
        "LONG_PASSWORD": NASTY,
    }
    place = [] if "-m" in words else ["hydra.run.dir=run"]
    own = ["callbacks.progress_bar=null", *place, "model._target_=own.net"]
    return programs.run(["trainer.max_steps=2", *own, *words], folder, environment)


REFERENCES = [
    "model.token=${oc.env:PLAIN_NAME}",
    "model.handed_on=${model.token}",
    "run_name=${oc.env:MY_TOKEN}",
]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([*REFERENCES], 0),
        ([*REFERENCES, "model.fails=true"], 1),
        ([f"model.token={SECRET}", f"run_name={SECRET}"], 0),  # as a shell would have filled it in
    ],
    ids=["a run", "a run that fails", "filled in by a shell"],
)
def test_no_secret_reaches_any_byte_of_a_runs_folder(
    words: list[str], code: int, tmp_path: Path
) -> None:
    done = train_with_secret(tmp_path, *words)
    assert done.returncode == code, done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"summary.json", "train.log", "config_resolved.yaml", "overrides.yaml"} <= names
    if code == 0:
        assert "state.pt" in names
        assert any("tfevents" in name for name in names)
    for secret in (SECRET, SECRET[::-1]):
        assert [path for path in files if holds(path, secret)] == []
    assert "connecting with ***" in (tmp_path / "run" / "train.log").read_text()
    if code == 1:
        reason = json.loads((tmp_path / "run" / "summary.json").read_text())["reason"]
        assert reason == "model: own.net refused its options: *** was refused"


NASTY = 'it\'s a "quoted", {braced}: *long*\none ' + "word after word " * 9


def test_a_run_with_a_secret_on_its_command_line_resumes(tmp_path: Path) -> None:
    """As a shell fills it in; and nothing tells it, also where the run is refused."""
    note = NASTY.replace("'", "\\'")
    words = ["model.token=1", f"model.handed_on='{note}'", "resume=auto", "scheduler=none"]
    for steps, more, code in ((2, [], 0), (4, [], 0), (6, ["optimizer=sgd"], 1)):
        done = train_with_secret(tmp_path, *words, *more, f"trainer.max_steps={steps}")
        assert done.returncode == code, done.stderr
        for said in (done.stdout, done.stderr):
            assert NASTY not in said
            assert repr(NASTY)[1:-1] not in said
    assert "resumed from" in (tmp_path / "run" / "train.log").read_text()
    overrides = yaml.safe_load((tmp_path / "run" / ".hydra" / "overrides.yaml").read_text())
    assert any(word.endswith("model.handed_on='***'") for word in overrides)
    stored = yaml.safe_load((checkpoint.newest(tmp_path / "run") / "config.yaml").read_text())
    assert stored["model"]["handed_on"] == "***"
    pieces = ("braced", "word after word")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in files for piece in pieces if holds(path, piece)] == []


def test_a_sweep_tells_no_secret(tmp_path: Path) -> None:
    words = [f"model.token={SECRET}", "-m", "hydra.sweep.dir=run", "seed=1"]
    done = train_with_secret(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"multirun.yaml", "sweep.md"} <= {path.name for path in files}
    assert [path for path in files if holds(path, SECRET)] == []
    assert SECRET not in done.stdout + done.stderr


def test_a_refusal_tells_no_secret(tmp_path: Path) -> None:
    done = train_with_secret(tmp_path, f"seed={SECRET}")
    assert done.returncode == 1
    assert SECRET not in done.stderr + done.stdout
    assert done.stderr.startswith("mpframe: seed=***: must be")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("seed: ${oc.env:PLAIN_NAME}", ["hydra.run.dir=run"]),
        ("device: ${oc.env:PLAIN_NAME}", ["hydra.run.dir=run"]),
        ("device: ${oc.env:PLAIN_NAME}", ["--cfg=job", "--resolve"]),
        ("seed: ${oc.env:PLAIN_NAME}", ["--cfg=job", "--resolve", "-p", "seed"]),
        ("hydra: {run: {dir: 'x/${oc.env:PLAIN_NAME}'}}", ["model=mlp"]),
        ("hydra: {run: {dir: 'x/${oc.env:PLAIN_NAME}'}}", ["model=mlp", "init_from=nowhere"]),
    ],
)
def test_what_a_file_takes_from_the_environment_is_told_nowhere(
    line: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(f"# @package _global_\n{line}\n")
    short = [
        "--config-dir=.",
        "experiment=own",
        "trainer.max_steps=1",
        "callbacks.progress_bar=null",
    ]
    done = programs.run([*short, *words], tmp_path, {"PLAIN_NAME": SECRET, "HYDRA_FULL_ERROR": ""})
    assert SECRET not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if holds(path, SECRET)] == []
    assert "***" in done.stdout + done.stderr or "${oc.env:PLAIN_NAME}" in done.stdout


@pytest.mark.parametrize(
    "word", ["hydra.run.dir=x/${oc.env:MY_TOKEN}", "run_name=${oc.env:MY_TOKEN}"]
)
def test_no_folder_is_named_after_a_secret(word: str, tmp_path: Path) -> None:
    done = programs.run([word], tmp_path, {"MY_TOKEN": SECRET, "HYDRA_FULL_ERROR": ""})
    said = "holds a secret of the environment, and everybody sees a folder's name; choose another"
    assert re.fullmatch(rf"mpframe: hydra\.run\.dir=.*\*\*\*.*: {said}\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([f"run_name={SECRET}"], 0, "run_name=***:"),
        ([f"model.token={SECRET}"], 1, "mpframe: model.token"),
        ([f"seed={SECRET}"], 1, "mpframe: seed=***: must be"),
    ],
)
def test_a_command_tells_no_secret(
    words: list[str], code: int, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("MY_TOKEN", SECRET)
    with pytest.raises(SystemExit) as ended:
        doctor(["model=mlp", "dtype=fp32", *words])
    told = "".join(capsys.readouterr())
    assert ended.value.code == code
    assert SECRET not in told
    assert said in told


def holds(path: Path, secret: str) -> bool:
    """True where the bytes of a file, or of the entries of an archive, hold the secret."""
    content = path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            content += b"".join(archive.read(entry) for entry in archive.infolist())
    return secret.encode() in content
