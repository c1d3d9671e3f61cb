"""The pages of the documentation: commands, options, blocks of Python, links.

The commands of a guide are run, in their order and in one folder, but for those that say behind a
`#` what they need. Those of all other pages are composed and checked, as their program would do
before its work begins.
"""

import ast
import re
import shlex
from collections.abc import Iterable
from contextlib import nullcontext
from importlib import import_module
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from in_process import train
from pages import PAGES, Command, Page

from mpframe.cli.main import COMMANDS
from mpframe.config.command_line import jobs, prepare
from mpframe.core.errors import DivergedError

GUIDES = ["choosing_precision", "debugging", "first_run", "gpus", "several"]
COMING_FROM = Page(ROOT / "docs" / "coming_from.md")
# Programs of others, which no test starts.
OTHERS = {
    *(".", "./dev", "apt-get", "cd", "git", "pip", "pytest", "python3", "srun", "tensorboard"),
    *("python", "sphinx-build"),
}
# Takes the arguments of training; the others take words of their own.
LIKE_TRAINING = {"train", "doctor"}

pages = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def accept(command: Command) -> None:
    """Refuse a command as its program would, before its work begins."""
    assert command.program in {*COMMANDS, "bench"}, command
    if command.words[0] == "python":
        assert (ROOT / command.words[1]).exists(), command
    if command.program not in LIKE_TRAINING:
        return
    given = command.arguments
    if any(word.startswith(("--", "hydra/")) for word in given):
        assert prepare(given)  # Of Hydra: its grammar alone.
    else:
        assert next(jobs(given)).config


def is_run(command: Command) -> bool:
    """Whether a guide's test runs it."""
    return command.of_ours and not command.note.startswith("needs ")


OURS = {
    str(command): command
    for path in PAGES
    for command in Page(path).commands()
    if command.of_ours and not (path.stem in GUIDES and is_run(command))
}


def test_there_are_commands() -> None:
    assert len(OURS) >= 50


@pytest.mark.parametrize("command", list(OURS.values()), ids=str)
def test_every_command_is_accepted(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf").symlink_to(ROOT / "conf")
    for word in command.arguments:
        folder = word.partition("=")[2]
        if folder.startswith("runs/"):  # A folder that exists may be named without quotes.
            Path(folder).mkdir(parents=True, exist_ok=True)
    accept(command)


@pages
def test_no_command_is_unknown(path: Path) -> None:
    for command in Page(path).commands():
        assert command.of_ours or command.words[0] in OTHERS, command
        for word in command.words:
            if word.startswith("tests/"):
                assert (ROOT / word.partition("::")[0]).exists(), command


class Story:
    """Runs the commands of a page in the current folder and in this process.

    A training takes two steps, unless it says how many; of a sweep the first job runs.
    """

    def __init__(self) -> None:
        self.numbers = count(1)

    def run(self, command: Command) -> None:
        if command.program != "train":
            self.examine(command)
        elif "-m" in command.arguments:
            self.train(next(jobs(command.arguments)).typed)
        elif "--help" not in command.arguments:
            with pytest.raises(DivergedError) if "diverged" in command.note else nullcontext():
                self.train(command.arguments)

    def train(self, words: list[str]) -> None:
        folder = Path("runs") / str(next(self.numbers))
        for word in words:
            option, _, value = word.partition("=")
            if option == "hydra.sweep.dir":
                folder = Path(value) / folder.name
            elif option == "hydra.run.dir":
                folder = Path(value)
        given = [word for word in words if not word.startswith("hydra.")]
        short = [] if any("max_steps=" in word for word in words) else ["trainer.max_steps=2"]
        train(folder, *given, *short)

    def examine(self, command: Command) -> None:
        main = import_module(COMMANDS[command.program]).main
        if command.program != "doctor":
            main(command.arguments)
            return
        with pytest.raises(SystemExit) as ended:
            main(command.arguments)
        assert ended.value.code in (0, 1)  # 1: there is something to mend.


@pytest.mark.parametrize("name", GUIDES)
def test_the_commands_of_a_guide_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(ROOT / "docs" / f"{name}.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file, text in page.files().items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    story = Story()
    commands = list(filter(is_run, page.commands()))
    assert commands
    for command in commands:
        story.run(command)


@pages
def test_every_block_of_python_is_python(path: Path) -> None:
    for code in Page(path).blocks("python"):
        ast.parse(code)


def test_the_blocks_of_the_page_for_others_run_one_after_the_other() -> None:
    names: dict[str, Any] = {}
    blocks = COMING_FROM.blocks("python")
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, "coming_from.md", "exec"), names)


def test_what_others_are_told_to_write_is_accepted() -> None:
    rows = re.findall(r"^\|(.+)\|(.+)\|(.*)\|$", COMING_FROM.text, re.M)
    cells = sorted({code for _, here, _ in rows for code in re.findall(r"`([^`]+)`", here)})
    assert len(cells) >= 50
    for words in together(shlex.split(cell) for cell in cells):
        assert next(jobs(words)).config, words


def together(rows: Iterable[list[str]]) -> list[list[str]]:
    """Rows that set different things in one command line: composing takes its time."""
    lines: list[list[str]] = []
    for row in rows:
        line = next((line for line in lines if not any(map(clash, product(line, row)))), None)
        if line is None:
            lines.append(line := [])
        line.extend(row)
    return lines


def clash(words: tuple[str, str]) -> bool:
    """Whether two words set the same option, or one chooses the group that the other changes."""
    keys = sorted(re.split(r"[+-]?=", word)[0].lstrip("+") + "." for word in words)
    return keys[1].startswith(keys[0])


@pages
def test_every_link_leads_somewhere(path: Path) -> None:
    for link in Page(path).links():
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        if anchor:
            assert anchor in Page(target).anchors(), link


def test_every_page_is_on_the_site() -> None:
    lists = Page(ROOT / "docs" / "index.md").blocks("{toctree}")
    listed = re.findall(r"^[\w/]+$", "\n".join(lists), re.M)
    docs = ROOT / "docs"
    there = {str(p.relative_to(docs).with_suffix("")) for p in docs.rglob("*.md")} | {"api"}
    assert sorted([*listed, "index"]) == sorted(there)
