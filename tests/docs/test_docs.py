"""The pages of the documentation: commands, options, blocks of Python, links, answers, the site."""

import ast
import inspect
import io
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import in_process
import pytest
import torch
from checkout import ROOT
from fixtures import Patch, Shown, refused
from in_process import train
from pages import PAGES, Page
from safetensors.torch import save_file
from torchvision.models import resnet18

import mpframe
from mpframe import checkpoint, fit
from mpframe.checkpoint.state import weights_of
from mpframe.cli.main import COMMANDS
from mpframe.config.command_line import jobs, prepare
from mpframe.core.errors import ConfigError, DivergedError

DOCS = ROOT / "docs"
README, CONTRIBUTING = Page(ROOT / "README.md"), Page(ROOT / "CONTRIBUTING.md")
COMING_FROM, PYTHON_FIRST = Page(DOCS / "coming_from.md"), Page(DOCS / "python_first.md")
# Programs of others, which no test starts.
OTHERS = {
    *(".", "./dev", "apt-get", "cd", "git", "pip", "pytest", "python3", "srun", "tensorboard"),
    *("bash", "python", "sphinx-build"),
}


@pytest.mark.slow
def test_every_command_is_accepted(here: Path) -> None:
    """Its words are composed and checked, as its program would do."""
    Path("conf").symlink_to(ROOT / "conf")
    every = {str(command): command for path in PAGES for command in Page(path).commands()}
    trainings = []
    for command in filter(lambda own: own.of_ours, every.values()):
        assert command.program in {*COMMANDS, "bench"}, command
        assert command.words[0] != "python" or (ROOT / command.words[1]).exists(), command
        if command.program in ("train", "doctor"):  # The others take words of their own.
            trainings.append(command.arguments)
        for word in command.arguments:
            folder = word.partition("=")[2]
            if folder.startswith("runs/"):  # A folder that exists may be named without quotes.
                Path(folder).mkdir(parents=True, exist_ok=True)
    rows = re.findall(r"^\|(.+)\|(.+)\|(.*)\|$", COMING_FROM.text, re.M)
    cells = sorted({code for _, here, _ in rows for code in re.findall(r"`([^`]+)`", here)})
    assert min(len(trainings), len(cells)) >= 50
    for words in (*trainings, *map(shlex.split, cells)):
        if any(word.startswith(("--", "hydra/")) for word in words):
            assert prepare(words)  # Of Hydra: its grammar alone.
        else:
            assert next(jobs(words)), words


def test_what_a_page_names_is_there_and_its_python_is_python() -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for page in map(Page, PAGES):
        for command in page.commands():
            assert command.of_ours or command.words[0] in OTHERS, (page.path, command)
            files = [word.partition("::")[0] for word in command.words if word[:6] == "tests/"]
            assert all((ROOT / file).exists() for file in files), (page.path, command)
        assert {*re.findall(r"`(test_\w+\.py)`", page.text)} <= tests, page.path
        for name in re.findall(r"`(mpframe(?:\.\w+)+)[`(]", page.text):
            assert resolve_name(name), (page.path, name)
        for code in page.blocks("python"):
            ast.parse(code, str(page.path))
        for link in page.links():
            name, _, anchor = link.partition("#")
            target = page.path.parent / name if name else page.path
            if "://" not in link:
                assert target.exists(), (page.path, link)
                assert not anchor or anchor in Page(target).anchors(), (page.path, link)


def write_files(page: Page, folder: Path) -> None:
    for file, text in page.files().items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


def story(page: Page) -> list[str]:
    """Run a page's commands in the current folder and in this process, and name the programs.

    All but those that say behind a `#` what they need. A training takes two steps, unless it says
    how many. Of a sweep the first job runs.
    """
    ours = [own for own in page.commands() if own.of_ours and not own.note.startswith("needs ")]
    for number, command in enumerate(ours):
        words = command.arguments
        if command.program != "train":
            doctor = pytest.raises(SystemExit) if command.program == "doctor" else nullcontext()
            with doctor as ended:
                import_module(f"mpframe.cli.commands.{command.program}").main(words)
            assert ended is None or ended.value.code in (0, 1)  # 1: there is something to mend.
        elif "--help" not in words:
            words = next(jobs(words))[0] if "-m" in words else words
            with pytest.raises(DivergedError) if "diverged" in command.note else nullcontext():
                start(number, words)
    return [command.program for command in ours]


def start(number: int, words: list[str]) -> None:
    folder = Path("runs") / str(number)
    for word in words:
        option, _, value = word.partition("=")
        if option == "hydra.sweep.dir":
            folder = Path(value) / folder.name
        elif option == "hydra.run.dir":
            folder = Path(value)
    given = [word for word in words if not word.startswith("hydra.")]
    short = [] if any("max_steps=" in word for word in words) else ["trainer.max_steps=2"]
    train(folder, *given, *short)


SLOW = ("choosing_precision", "debugging", "gpus", "several", "streams", "tensorboard")


@pytest.mark.parametrize(
    "name", ["first_run", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_the_commands_of_a_guide_run(name: str, here: Path, monkeypatch: Patch) -> None:
    page = Page(DOCS / f"{name}.md")
    monkeypatch.syspath_prepend(here)
    write_files(page, here)
    if name == "streams":
        runpy.run_path("make_shards.py")
    assert story(page)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_commands_of_tuning_run(tiny_data: Path) -> None:
    shutil.copytree(tiny_data / "image_folder", "data/pictures")
    torch.save(resnet18().state_dict(), "resnet18.pth")
    train(Path("runs/mine"), "trainer.max_steps=1")
    own = weights_of(checkpoint.load(Path("runs/mine")), "trained", Path())
    save_file({f"net.{name}": tensor for name, tensor in own.items()}, "own.safetensors")
    programs = story(Page(DOCS / "fine_tuning.md"))
    assert programs == ["train", "evaluate", "predict", *["train"] * 4]
    (table,) = Path("runs/tuned").glob("predictions_folder_step_*.csv")
    assert "0/0000.jpg" in table.read_text()


def block(page: Page, mark: str) -> str:
    """The block behind a mark in a page."""
    (found,) = re.findall(rf"<!-- {mark} -->\n```\w*\n(.*?)```", page.text, re.S)
    return str(found)


def test_blocks_of_python_run_one_after_the_other_and_the_loops_train(capsys: Shown) -> None:
    exec(block(README, "run: own loop"), {})
    printed = capsys.readouterr().out.splitlines()
    assert ["skipped False" in line for line in printed] == [True] * 20
    first, last = (float(line.split()[1]) for line in (printed[0], printed[-1]))
    assert 0.0 < last < 10.0
    assert first != last

    names: dict[str, Any] = {}
    assert len(COMING_FROM.blocks("python")) == 2
    for code in COMING_FROM.blocks("python"):
        exec(code, names)
    torch.manual_seed(0)  # Where the first outputs are large their gradients overflow at 2^16.
    model = torch.nn.Linear(4, 3)
    names = {"torch": torch, "model": model, "matrices": [model.weight], "others": [model.bias]}
    exec(block(Page(DOCS / "several.md"), "run: several"), names)
    with names["precision"].cast():
        loss = model(torch.ones(2, 4)).float().square().mean()
    (loss * names["scaler"].scale).backward()
    assert not names["optimizer"].step(names["scaler"], max_norm=1.0).skipped


def test_the_layout_and_every_answer_are_still_there_and_the_readme_is_short() -> None:
    lines = block(CONTRIBUTING, "layout").splitlines()
    for line in lines:
        folder = ROOT / "mpframe" if line.startswith("  ") else ROOT
        assert (folder / line.split()[0]).exists(), line
    packages = {path.parent.name for path in (ROOT / "mpframe").glob("*/__init__.py")}
    assert packages <= {line.split()[0].rstrip("/") for line in lines}
    assert len(README.text.splitlines()) <= 120

    # Each row has a file, what in the file answers a question, and a piece of its text.
    rows = re.findall(r"^\| .+\? \|.*$", CONTRIBUTING.text, re.M)
    assert len(rows) >= 20
    for row in rows:
        ((file, name, text),) = re.findall(r"\? \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", row)
        _, _, behind = (ROOT / file).read_text().partition(name.rpartition(".")[2])
        assert text in behind, row


START = r"(?:^|(?<=[.!?:] ))"  # of a paragraph or a sentence
# What nobody says aloud, and the most places per 10,000 words: well-read libraries have few.
PATTERNS: list[tuple[str, float]] = [
    (r";", 40),
    (r"\b(?:that|those) of\b", 2),
    (r"\balone\b", 1),
    (r", too\b", 1),
    (START + r"What\b[^?]*?(?:[.!:]|$)", 2),
    (START + r"(?:Let|Of)\b", 1),
    (r"\bbut for\b", 1),
    (r"\blikewise\b", 1),
    (r"\bof (?:yours|users)\b|\bof (?:its|their|your) own\b", 2),
]
CODE = re.compile(r"^ *```.*?^ *```|^ *\|.*?$", re.M | re.S)  # blocks and tables
ITEM = r" *(?:[-*] |\d+\. |\w+(?:, \w+)*: )"  # of a list
BREAK = re.compile(rf"\n\s*\n|\n(?={ITEM})")


def paragraphs(path: Path) -> Iterator[str]:
    """Each paragraph of a page's prose, or of a module's docstrings and comments."""
    source = path.read_text()
    for block in prose_of_code(source) if path.suffix == ".py" else [source]:
        for text in BREAK.split(CODE.sub("\n", block)):
            if re.match(ITEM, text) or not text.startswith("    "):
                yield " ".join(re.sub(r"`+[^`]*`+|https?://\S+|\]\([^)]*\)", "x", text).split())


def prose_of_code(source: str) -> Iterator[str]:
    """Comments on consecutive lines are one block."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield inspect.cleandoc(text)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = enumerate(token for token in tokens if token.type == tokenize.COMMENT)
    for _, block in groupby(comments, lambda own: own[1].start[0] - own[0]):
        yield "\n".join(token.string.lstrip("#: ") for _, token in block)


def test_docs_and_docstrings_are_written_as_somebody_says_them() -> None:
    docs = [README.path, CONTRIBUTING.path, *DOCS.rglob("*.md")]
    code = [path for folder in ("mpframe", "scripts") for path in (ROOT / folder).rglob("*.py")]
    for paths in (docs, code):
        texts = [(path, text) for path in paths for text in paragraphs(path)]
        words = sum(len(text.split()) for _, text in texts)
        for pattern, limit in PATTERNS:
            places = [
                (path, text[max(found.start() - 40, 0) : found.end() + 40])
                for path, text in texts
                for found in re.finditer(pattern, text)
            ]
            assert len(places) * 10_000 <= limit * words, (pattern, places)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Of dead links, unknown anchors, pages that no list names, docstrings that cannot be read."""
    lists = "\n".join(Page(DOCS / "index.md").blocks("{toctree}"))
    there = [str(p.relative_to(DOCS).with_suffix("")) for p in DOCS.rglob("*.md")]
    assert sorted(["index", *re.findall(r"^[\w/]+$", lists, re.M)]) == sorted([*there, "api"])
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="builds the site; pip install -e .[docs] brings it")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]
    command += ["-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    reference = (tmp_path / "site" / "api.html").read_text()
    for name in mpframe.__all__:
        assert f".{name}</" in reference or f'descname"><span class="pre">{name}<' in reference
    assert not (DOCS / "_build").exists()


@pytest.mark.slow
def test_yaml_and_python_come_to_the_same(here: Path, monkeypatch: Patch) -> None:
    monkeypatch.syspath_prepend(here)
    files, names = PYTHON_FIRST.files(), dict[str, Any]()
    write_files(PYTHON_FIRST, here)
    for command in PYTHON_FIRST.commands():
        assert in_process.command(*command.arguments) == 0, command
    for code in PYTHON_FIRST.blocks("python"):
        exec("" if code in files.values() else code, names)
        assert len(code.splitlines()) <= 33
    runs = sorted(path.name for path in Path("runs/yaml").iterdir())
    assert len(runs) == PYTHON_FIRST.text.count("</td><td>")
    for run in runs:
        folders = [Path("runs", side, run) for side in ("yaml", "python")]
        ours, theirs = (checkpoint.load(folder) for folder in folders)
        weights, expected = (weights_of(state, "trained", Path(run)) for state in (theirs, ours))
        assert weights.keys() == expected.keys(), run
        assert all(torch.equal(weights[name], expected[name]) for name in expected), run
        for part in ("progress", "scaler", "precision"):
            assert theirs["trainer"][part] == ours["trainer"][part], run
    assert not list(Path("runs").rglob("*.set_aside"))  # by a run that begins anew
    logged, curves = (in_process.scalars(Path("runs", s, "first")) for s in ("yaml", "python"))
    assert all(points == logged[tag] for tag, points in curves.items() if "loss" in tag)
    journals = [Path("runs", side, "watched/journal.txt") for side in ("yaml", "python")]
    assert journals[0].read_text() == journals[1].read_text() != ""
    pictures = in_process.events(Path("runs/python/pinned")).Tags()["images"]
    assert "numerics/weights/layers_by_exponent" in pictures
    mine = Path("runs/python/mine")
    for given, said in (
        ({}, f"folder={mine}: holds the checkpoints of a run; continue it with resume=auto or "),
        (
            {"resume": "runs/python/first"},
            f"resume=runs/python/first: folder={mine} holds the ",
        ),
    ):
        text = refused(ConfigError, fit, names["trainer"], names["train"], folder=mine, **given)
        assert text.startswith(said)


def test_the_notebook_runs_and_keeps_no_output(capsys: Shown) -> None:
    notebook = json.loads((DOCS / "first_notebook.ipynb").read_text())
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in cells)
    assert (notebook["nbformat"], "id" in notebook["cells"][0]) == (4, True)
    for cell in cells:
        exec("".join(cell["source"]), names)
    shown = capsys.readouterr().out
    assert names["test"].metrics["accuracy"] > 0.9, shown
    assert "linear in ops.allow" in shown
