"""A user's project outside the repository, with mpframe from its wheel alone."""

import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from checkout import ROOT

from mpframe import checkpoint
from mpframe.tracking.summary import Summary

pytest.importorskip("hatchling", reason="builds the wheel; pip install -e .[test] brings it")

PAGE = (ROOT / "docs" / "own_parts.md").read_text()
FILES = dict(re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
COMMAND = re.search(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-index"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def run(environment: Path, folder: Path, *words: str) -> str:
    """The output of a program of an environment, which must succeed, in a folder."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HYDRA"))}
    command = [str(environment / "bin" / words[0]), *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with mpframe from its wheel, and the packages of this one beside it."""
    folder = tmp_path_factory.mktemp("installed")
    pip("wheel", str(ROOT), "--no-build-isolation", "--wheel-dir", str(folder))
    (wheel,) = folder.glob("mpframe-*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    pip("--python", str(python), "install", str(wheel))
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    # Folders that a .pth names come behind the environment's own packages, and the .pth files in
    # them are not read: this checkout, installed to be edited, is not seen.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages_of_the_tests.pth").write_text("\n".join(others) + "\n")
    return folder / "env"


def test_the_project_trains_by_one_command(environment: Path, tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    where = "import importlib.util; print(importlib.util.find_spec('mpframe').origin)"
    origin = Path(run(environment, tmp_path, "python", "-c", where).strip())
    assert origin.is_relative_to(environment)
    assert COMMAND is not None
    run(environment, tmp_path, *shlex.split(COMMAND[1]))
    (folder,) = (tmp_path / "runs" / "mine").iterdir()

    summary = Summary.read(folder)
    assert (summary.status, summary.epochs, summary.samples) == ("finished", 4, 4 * 512)  # Dataset.
    assert (summary.loss_scaling, summary.final_scale) == ("Thirds", 6561.0)
    # The metric unpacks what no objective but the page's gives: logits and lengths.
    assert summary.monitor == "long_accuracy"
    assert summary.val_metric is not None
    assert 0.6 < summary.val_metric <= 1.0
    weights = checkpoint.load(folder)["trainer"]["weights"]
    assert weights["embedding.weight"].shape == (50, 32)
    steps, losses, scales = zip(
        *(map(float, line.split()) for line in (folder / "journal.txt").read_text().splitlines()),
        strict=True,
    )
    assert steps == tuple(range(1, 65))
    assert losses[-1] == summary.train_loss
    assert set(scales) == {6561.0}


def test_every_part_stands_in_the_configuration_and_on_the_page() -> None:
    modules = {Path(name).stem for name in FILES if name.endswith(".py")}
    targets = re.findall(
        r"_target_: (my_\w+)\.\w+", "".join(t for n, t in FILES.items() if n.endswith("yaml"))
    )
    assert sorted(targets) == sorted(modules)
    assert len(modules) == 6


# --- mpframe new, and docs/own_project.md

DRIVER = """
import os, shlex, sys, time
from importlib import import_module

from mpframe.cli.main import COMMANDS, main

for module in COMMANDS.values():
    import_module(module)
done = set()  # What the page and the README both say runs once.
for block in {blocks!r}:
    if block.startswith("import"):
        exec(block, {{}})
        continue
    for line in block.replace("\\\\\\n", " ").splitlines():
        if line in done:
            continue
        done.add(line)
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


def blocks_of(text: str) -> list[str]:
    """The blocks of a page that run, but for the one that makes the project."""
    found = re.findall(r"^```(?:bash|python)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for block in found if not block.startswith("mpframe new")]


def test_each_line_of_the_page_and_of_a_new_project_runs(environment: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own_project.md").read_text()
    (begin,) = re.findall(r"^```bash\n(mpframe new .*?)^```$", page, re.DOTALL | re.MULTILINE)
    make, enter, first = begin.splitlines()
    run(environment, tmp_path, *shlex.split(make))
    project = tmp_path / enter.removeprefix("cd ")
    readme = (project / "README.md").read_text()
    assert first in readme
    blocks = [*blocks_of(readme), *blocks_of(page)]
    assert len(blocks) == 9
    said = run(environment, project, "python", "-c", DRIVER.format(blocks=blocks))
    assert "1 passed" in said
    assert Summary.read(project / "runs" / "first").monitor == "accuracy"
    assert Summary.read(project / "runs" / "notebook").dtype == "amp"
    assert (project / "runs" / "formats" / "report.html").exists()
    assert (project / "model.safetensors").exists()
    assert len((project / "predictions.csv").read_text().splitlines()) == 1 + 300  # The test part.


def test_the_page_shows_the_files_as_they_are() -> None:
    page = (ROOT / "docs" / "own_project.md").read_text()
    template = ROOT / "mpframe" / "cli" / "commands" / "template"
    for name in ("conf/project.yaml", "conf/model/net.yaml"):
        assert f"```yaml\n{(template / name).read_text()}```" in page
    (tree,) = (block for block in page.split("```") if "conf/project.yaml  " in block)
    shown = re.findall(r"[\w./]+", tree)
    for path in template.rglob("*"):
        name = str(path.relative_to(template))
        assert path.is_dir() or "__pycache__" in name or any(name.startswith(s) for s in shown)


def test_the_types_are_in_the_wheel(environment: Path) -> None:
    (package,) = environment.glob("lib/python*/site-packages/mpframe")
    assert (package / "py.typed").exists()
