"""A user's project outside the repository: in this process, and with mpframe from its wheel."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from fixtures import Patch, Shown
from in_process import train
from omegaconf import OmegaConf
from pages import Page

from mpframe import checkpoint
from mpframe.cli.commands import new
from mpframe.tracking.summary import Summary

PAGE, PROJECT = (Page(ROOT / "docs" / f"own_{name}.md") for name in ("parts", "project"))
FILES, COMMAND = PAGE.files(), PAGE.commands()[0]
TEMPLATE = ROOT / "mpframe" / "cli" / "commands" / "template"


@pytest.fixture
def folder(here: Path, monkeypatch: Patch) -> Path:
    """The current folder, whose modules are found."""
    monkeypatch.syspath_prepend(here)
    for name in ("my_data", "my_model"):  # Each project has its own.
        monkeypatch.delitem(sys.modules, name, raising=False)
    return here


def write_parts(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_every_part_stands_in_the_configuration_and_takes_part(folder: Path) -> None:
    modules = sorted(Path(name).stem for name in FILES if name.endswith(".py"))
    configurations = "".join(text for name, text in FILES.items() if name.endswith("yaml"))
    targets = re.findall(r"_target_: (my_\w+)\.\w+", configurations)
    assert (sorted(targets), len(modules)) == (modules, 6)
    write_parts(folder)
    words = [word for word in COMMAND.arguments if not word.startswith("hydra.")]
    summary = train(folder / "run", *words, "trainer.max_steps=8")
    assert (summary.loss_scaling, summary.final_scale) == ("Thirds", 6561.0)
    # The metric unpacks what no objective but the page's gives: logits and lengths.
    assert summary.monitor == "long_accuracy"
    weights = checkpoint.load(folder / "run")["trainer"]["weights"]
    assert weights["embedding.weight"].shape == (50, 32)
    journal = (folder / "run" / "journal.txt").read_text()
    lines = [[*map(float, line.split())] for line in journal.splitlines()]
    assert [line[0] for line in lines] == list(range(1, 9))
    assert lines[-1][1:] == [summary.train_loss, 6561.0]


def test_a_new_project_trains(folder: Path, capsys: Shown) -> None:
    new.main(["week 1"])
    assert capsys.readouterr().out == "week 1: written; begin with week 1/README.md\n"
    written = {str(path.relative_to("week 1")) for path in Path("week 1").rglob("*")}
    assert {"conf/project.yaml", "my_model.py", "test_project.py"} <= written
    assert OmegaConf.load("week 1/conf/project.yaml").run_name == "week 1"
    sys.path.insert(0, str(folder / "week 1"))
    words = ["--config-dir=week 1/conf", "--config-name=project", "trainer.max_steps=2"]
    assert train(folder / "run", *words).monitor == "accuracy"


def run(installed: Path, folder: Path, *words: str) -> str:
    """The output of a program, which must succeed; what is installed is found first."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HYDRA"))}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=own | {"PYTHONPATH": str(installed)},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mpframe from its wheel."""
    pytest.importorskip("hatchling", reason="builds the wheel; pip install -e .[test] brings it")
    folder = tmp_path_factory.mktemp("installed")
    alone = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--target", "."]
    run(folder, folder, "-m", "pip", "install", *alone, str(ROOT))
    where = "import importlib.util; print(importlib.util.find_spec('mpframe').origin)"
    origin = Path(run(folder, folder.parent, "-c", where).strip())
    assert origin.is_relative_to(folder)
    assert (origin.parent / "py.typed").exists()
    return folder


DRIVER = """
import os, shlex, sys, time
from importlib import import_module

from mpframe.cli.main import COMMANDS, main

for name in COMMANDS:
    import_module("mpframe.cli.commands." + name)
for line in {lines!r}:
    if line.startswith("import"):
        exec(line, {{}})
        continue
    program, *words = shlex.split(line, comments=True)
    print("$", line, flush=True)
    if program == "pytest":
        import pytest
        assert pytest.main(["-q", "-p", "no:cacheprovider", *words]) == 0
    elif program == "mpframe":
        time.sleep(1.0)  # A run without a folder of its own is named by the second.
        try:
            main(words)
        except SystemExit as ended:
            assert not ended.code, line
    else:
        assert program == "tensorboard", line  # A server, which does not end.
"""


@pytest.mark.slow
def test_each_line_of_the_page_and_of_a_new_project_runs(installed: Path, tmp_path: Path) -> None:
    (begin,) = (block for block in PROJECT.blocks("bash") if block.startswith("mpframe new "))
    make, enter, first = begin.splitlines()
    run(installed, tmp_path, str(installed / "bin" / "mpframe"), *shlex.split(make)[1:])
    project = tmp_path / enter.removeprefix("cd ")
    readme = Page(project / "README.md")
    assert first in readme.text
    blocks = [block for page in (readme, PROJECT) for block in page.blocks("bash", "python")]
    blocks.remove(begin)
    assert len(blocks) == 9
    lines: list[str] = []
    for block in blocks:
        python = block.startswith("import")
        lines += [block] if python else block.replace("\\\n", " ").splitlines()
    # What the page and the README both say runs once.
    driver = DRIVER.format(lines=list(dict.fromkeys(lines)))
    said = run(installed, project, "-c", driver)
    assert "1 passed" in said
    assert Summary.read(project / "runs" / "first").monitor == "accuracy"
    assert Summary.read(project / "runs" / "notebook").dtype == "amp"
    assert (project / "runs" / "formats" / "report.html").exists()
    assert (project / "model.safetensors").exists()
    assert len((project / "predictions.csv").read_text().splitlines()) == 1 + 300  # The test part.
