"""The pages of the documentation: commands, options, blocks of Python, links.

Every command is composed and checked, as its program would do. Those of the guides are run as
well, in their order and in one folder, except those that say behind a `#` what they need.
"""

import ast
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from fixtures import Patch
from in_process import train
from pages import PAGES, Command, Page
from safetensors.torch import save_file
from torchvision.models import resnet18

from mpframe import checkpoint
from mpframe.checkpoint.state import weights_of
from mpframe.cli.main import COMMANDS
from mpframe.config.command_line import jobs, prepare
from mpframe.core.errors import DivergedError

GUIDES = ["choosing_precision", "debugging", "first_run", "gpus", "several"]
COMING_FROM = Page(ROOT / "docs" / "coming_from.md")
# Programs of others, which no test starts.
OTHERS = {
    *(".", "./dev", "apt-get", "cd", "git", "pip", "pytest", "python3", "srun", "tensorboard"),
    *("bash", "python", "sphinx-build"),
}
# Words that decide which others there are.
SHAPING = {"experiment", "model", "dataset", "+size", "resume"}
SHAPING |= {"model._target_", "dataset._target_"}


def accept(command: Command, plain: dict[tuple[str, ...], list[list[str]]]) -> None:
    """Refuse a command as its program would; `plain` gets the words of a training to compose."""
    assert command.program in {*COMMANDS, "bench"}, command
    if command.words[0] == "python":
        assert (ROOT / command.words[1]).exists(), command
    given = command.arguments
    if command.program not in ("train", "doctor"):  # The others take words of their own.
        return
    if any(word.startswith(("--", "hydra/")) for word in given):
        assert prepare(given)  # Of Hydra: its grammar alone.
    elif "-m" in given:
        assert next(jobs(given)).config, command
    else:
        shaping = tuple(word for word in given if word.partition("=")[0] in SHAPING)
        plain[shaping].append([word for word in given if word not in shaping])


def is_run(command: Command) -> bool:
    """Whether a guide's test runs it."""
    return command.of_ours and not command.note.startswith("needs ")


PARTS = 4  # of the commands, which several workers compose
RUN = "first_run"  # in ./dev, which need not compose its commands
OURS = {
    str(command): command
    for path in PAGES
    for command in Page(path).commands()
    if command.of_ours and not (path.stem == RUN and is_run(command))
}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_command_is_accepted(part: int, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf").symlink_to(ROOT / "conf")
    assert len(OURS) >= 50
    plain: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for command in [*OURS.values()][part::PARTS]:
        for word in command.arguments:
            folder = word.partition("=")[2]
            if folder.startswith("runs/"):  # A folder that exists may be named without quotes.
                Path(folder).mkdir(parents=True, exist_ok=True)
        accept(command, plain)
    rows = re.findall(r"^\|(.+)\|(.+)\|(.*)\|$", COMING_FROM.text, re.M)
    cells = sorted({code for _, here, _ in rows for code in re.findall(r"`([^`]+)`", here)})
    assert len(cells) >= 50
    plain[()] += map(shlex.split, cells[part::PARTS])
    for shaping, words in plain.items():
        for line in together(words):
            assert next(jobs([*shaping, *line])).config, line


def test_no_command_is_unknown() -> None:
    for path in PAGES:
        for command in Page(path).commands():
            assert command.of_ours or command.words[0] in OTHERS, (path, command)
            for word in command.words:
                if word.startswith("tests/"):
                    assert (ROOT / word.partition("::")[0]).exists(), (path, command)


def test_every_test_that_a_page_names_is_there() -> None:
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for path in PAGES:
        named = set(re.findall(r"`(test_\w+\.py)`", Page(path).text))
        assert named <= there, (path, named - there)


def story(page: Path) -> list[str]:
    """Run a page's commands in the current folder and in this process, and name the programs.

    A training takes two steps, unless it says how many; of a sweep the first job runs.
    """
    commands = list(filter(is_run, Page(page).commands()))
    for number, command in enumerate(commands):
        words = command.arguments
        if command.program != "train":
            doctor = pytest.raises(SystemExit) if command.program == "doctor" else nullcontext()
            with doctor as ended:
                import_module(COMMANDS[command.program]).main(words)
            assert ended is None or ended.value.code in (0, 1)  # 1: there is something to mend.
        elif "--help" not in words:
            words = next(jobs(words)).typed if "-m" in words else words
            with pytest.raises(DivergedError) if "diverged" in command.note else nullcontext():
                start(number, words)
    return [command.program for command in commands]


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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != RUN)) for n in GUIDES]
)
def test_the_commands_of_a_guide_run(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    page = Page(ROOT / "docs" / f"{name}.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file, text in page.files().items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert story(page.path)


@pytest.mark.slow
def test_the_commands_of_tuning_run(tmp_path: Path, monkeypatch: Patch, tiny_data: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_data / "image_folder", "data/pictures")
    torch.save(resnet18().state_dict(), "resnet18.pth")
    train(Path("runs/mine"), "trainer.max_steps=1")
    own = weights_of(checkpoint.load(Path("runs/mine")), "trained", Path())
    save_file({f"net.{name}": tensor for name, tensor in own.items()}, "own.safetensors")
    programs = story(ROOT / "docs" / "fine_tuning.md")
    assert programs == ["train", "evaluate", "predict", *["train"] * 4]
    (table,) = Path("runs/tuned").glob("predictions_folder_step_*.csv")
    assert "0/0000.jpg" in table.read_text()


def test_every_block_of_python_is_python() -> None:
    for path in PAGES:
        for code in Page(path).blocks("python"):
            ast.parse(code, str(path))


def test_the_blocks_of_the_page_for_others_run_one_after_the_other() -> None:
    names: dict[str, Any] = {}
    assert len(COMING_FROM.blocks("python")) == 2
    for code in COMING_FROM.blocks("python"):
        exec(compile(code, "coming_from.md", "exec"), names)


def together(rows: Iterable[list[str]]) -> list[list[str]]:
    """Rows that set different things in one command line, as composing takes its time."""
    lines: list[list[str]] = []
    for row in rows:
        line = next((line for line in lines if not any(map(clash, product(line, row)))), None)
        if line is None:
            lines.append(line := [])
        line.extend(word for word in row if word not in line)
    return lines


def clash(words: tuple[str, str]) -> bool:
    """Whether two words set the same option, or one chooses the group that the other changes."""
    if words[0] == words[1]:
        return False
    keys = sorted(re.split(r"[+-]?=", word)[0].lstrip("+") + "." for word in words)
    return keys[1].startswith(keys[0])


def test_every_link_leads_somewhere() -> None:
    for path, link in ((page, link) for page in PAGES for link in Page(page).links()):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if "://" not in link:
            assert target.exists(), (path, link)
            assert not anchor or anchor in Page(target).anchors(), (path, link)


def test_every_page_is_on_the_site() -> None:
    docs = ROOT / "docs"
    lists = "\n".join(Page(docs / "index.md").blocks("{toctree}"))
    there = [str(p.relative_to(docs).with_suffix("")) for p in docs.rglob("*.md")]
    assert sorted(["index", *re.findall(r"^[\w/]+$", lists, re.M)]) == sorted([*there, "api"])
