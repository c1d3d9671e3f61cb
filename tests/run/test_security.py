"""Secrets of the environment are told nowhere, names lead nowhere, and no code unpickles.

Bad checkpoints are in test_damaged_checkpoints.py, other attacks in the tests of what reads.
"""

import json
import re
import zipfile
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from fixtures import Patch, Shown
from in_process import command

from mpframe import checkpoint
from mpframe.cli.commands.doctor import main as doctor
from mpframe.config import redaction

RUNS_CODE = re.compile(
    r"Unpickler|\b(pickle\.loads?|shutil\.unpack_archive|os\.system|np\.load|torch\.hub\.\w+)\(|"
    r"\byaml\.(load|unsafe_load|full_load)\(|\.extract(all)?\(|(?<![\w.])(eval|exec)\(|"
    r"^\s*(from|import) (tarfile|shelve|dill|joblib|cloudpickle)\b|"
    r"tensorboard\.program|http\.server|socketserver",
    re.M,
)


def test_no_reader_unpickles_or_unpacks_none_serves_and_no_page_tells_to() -> None:
    """Save for CIFAR-10's published files, by an unpickler that calls nothing else."""
    for path in (ROOT / "mpframe").rglob("*.py"):
        text = path.read_text()
        assert {found[0] for found in RUNS_CODE.finditer(text)} <= (
            {"Unpickler"} if path.name == "cifar.py" else set()
        ), path
        for call in text.split("torch.load(")[1:]:
            assert "weights_only=True" in call[:120], path
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "mpframe").rglob("*.py"),
    ]:
        assert not re.search(r"--bind_all|--host[ =]|0\.0\.0\.0", path.read_text()), path


SECRET = "hunter2-correct-horse"
NASTY = 'it\'s a "quoted", {braced}: *long*\none ' + "word after word " * 9
OWN = """
import logging, torch

def net(token, fails=False, handed_on=""):
    logging.getLogger("own").warning("connecting with %s", token)
    if fails:
        raise ValueError(f"{token} was refused")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
SHORT = ["trainer.max_steps=2", "callbacks.progress_bar=null", "model._target_=own.net"]


@pytest.fixture(autouse=True)
def folder(here: Path, monkeypatch: Patch) -> Path:
    """The current folder, with a model that is handed a secret."""
    (here / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(here)
    own = {"MY_TOKEN": SECRET, "PLAIN_NAME": SECRET[::-1], "LONG_PASSWORD": NASTY}
    for name, value in {**own, "HYDRA_FULL_ERROR": ""}.items():
        monkeypatch.setenv(name, value)
    return here


def holding(folder: Path, *secrets: str) -> list[Path]:
    """The files that hold one of them, the entries of archives included."""
    found = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                content += b"".join(archive.read(entry) for entry in archive.infolist())
        found += [path for secret in secrets if secret.encode() in content]
    return found


REFERENCES = ["model.token=${oc.env:PLAIN_NAME}", "model.handed_on=${model.token}"]
REFERENCES += ["run_name=${oc.env:MY_TOKEN}", "model.fails=true"]
TAKEN = [("seed: ${oc.env:PLAIN_NAME}", ["hydra.run.dir=run"])]
TAKEN += [("device: ${oc.env:PLAIN_NAME}", ["--cfg=job", "--resolve"])]
TAKEN += [("hydra: {run: {dir: 'x/${oc.env:PLAIN_NAME}'}}", ["model=mlp", "init_from=nowhere"])]
FILLED_IN = [f"model.token={SECRET}", f"run_name={SECRET}", "seed=1"]  # as a shell does it


@pytest.mark.parametrize(
    ("words", "code"),
    [([*REFERENCES, "hydra.run.dir=run"], 1), ([*FILLED_IN, "-m", "hydra.sweep.dir=run"], 0)],
)
def test_no_secret_reaches_any_byte_of_a_folder_or_the_console(
    words: list[str], code: int, folder: Path, capsys: Shown
) -> None:
    assert command(*SHORT, *words) == code
    files = {path.name: path for path in (folder / "run").rglob("*")}
    wanted = {"summary.json", "train.log", "config_resolved.yaml", "overrides.yaml"}
    assert files.keys() >= (wanted if code else {*wanted, "state.pt", "multirun.yaml", "sweep.md"})
    if code:
        reason = json.loads(files["summary.json"].read_text())["reason"]
        assert reason == "model: own.net refused its options: *** was refused"
    assert holding(folder / "run", SECRET, SECRET[::-1]) == []
    assert SECRET not in "".join(capsys.readouterr())
    assert "connecting with ***" in files["train.log"].read_text()


def test_a_run_with_a_secret_on_its_command_line_resumes(folder: Path, capsys: Shown) -> None:
    note = NASTY.replace("'", "\\'")
    words = ["model.token=1", f"model.handed_on='{note}'", "resume=auto", "scheduler=none"]
    for steps in (2, 4):
        assert command(*words, "hydra.run.dir=run", *SHORT[1:], f"trainer.max_steps={steps}") == 0
    said = "".join(capsys.readouterr())
    assert NASTY not in said
    assert repr(NASTY)[1:-1] not in said
    assert "resumed from" in (folder / "run" / "train.log").read_text()
    overrides = yaml.safe_load((folder / "run" / ".hydra" / "overrides.yaml").read_text())
    assert any(word.endswith("model.handed_on='***'") for word in overrides)
    stored = yaml.safe_load((checkpoint.newest(folder / "run") / "config.yaml").read_text())
    assert stored["model"]["handed_on"] == "***"
    assert holding(folder / "run", "braced", "word after word") == []


@pytest.mark.parametrize(("line", "words"), TAKEN)
def test_what_a_file_takes_from_the_environment_is_told_nowhere(
    line: str, words: list[str], folder: Path, capsys: Shown, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(redaction, "_referred", set())  # As a new program: nothing is known yet.
    (folder / "experiment").mkdir()
    (folder / "experiment" / "own.yaml").write_text(f"# @package _global_\n{line}\n")
    command("--config-dir=.", "experiment=own", *SHORT[:2], *words)
    said = capsys.readouterr()
    assert SECRET[::-1] not in said.out + said.err
    assert holding(folder, SECRET[::-1]) == []
    assert "***" in said.out + said.err or "${oc.env:PLAIN_NAME}" in said.out


@pytest.mark.parametrize("place", ["hydra.run.dir=x/", "run_name="])
def test_no_folder_is_named_after_a_secret(place: str, folder: Path, capsys: Shown) -> None:
    assert command(place + "${oc.env:MY_TOKEN}") == 1
    said = "holds a secret of the environment, and everybody sees a folder's name; choose another"
    line = capsys.readouterr().err
    assert re.fullmatch(rf"mpframe: hydra\.run\.dir=.*\*\*\*.*: {said}\n", line)
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["own.py"]


@pytest.mark.parametrize(("option", "code"), [("run_name", 0), ("model.token", 1), ("seed", 1)])
def test_a_command_tells_no_secret(option: str, code: int, capsys: Shown) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor(["model=mlp", "dtype=fp32", f"{option}={SECRET}"])
    told = "".join(capsys.readouterr())
    assert (ended.value.code, SECRET in told) == (code, False)
    said = {"run_name": "run_name=***:", "seed": "mpframe: seed=***: must be"}
    assert said.get(option, "mpframe: model.token") in told
