"""What stands on a page of the documentation: commands, files, Python, headings, links."""

import re
import shlex
from pathlib import Path

from checkout import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "tests").rglob("README.md"))
_FENCE = re.compile(r"^ *```([\w{}]*)\n(.*?)^ *```$", re.M | re.S)
_NAMED = re.compile(r"^`([\w./]+\.\w+)`\n\n```\w*\n(.*?)^```$", re.M | re.S)
_INDENTED = re.compile(r"^    ((?:python scripts/|mpframe )(?:[^\\\n]|\\\n)*)", re.M)
_HEADING = re.compile(r"^#+ (.+)$", re.M)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Command:
    """A command of a page: the program and its arguments, and the comment behind it."""

    def __init__(self, line: str, note: str) -> None:
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):  # Variables that are set for it.
            del words[0]
        if words[:1] == ["torchrun"]:  # Its flags, then a script of ours: what each rank runs.
            first = next(n for n, word in enumerate(words) if word.startswith("scripts/"))
            words[:first] = ["python"]
        self.words, self.note, self.arguments = words, note, words[2:]
        # `train` of `python scripts/train.py` and of `mpframe train`; else the first word.
        self.of_ours = bool(re.match("mpframe |python scripts/", " ".join(words)))
        self.program = Path(words[1]).stem if self.of_ours else words[0]

    def __str__(self) -> str:
        return shlex.join(self.words)


class Page:
    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text()

    def blocks(self, *languages: str) -> list[str]:
        return [code for language, code in _FENCE.findall(self.text) if language in languages]

    def files(self) -> dict[str, str]:
        """The blocks that follow a file's name in a line of its own: the files by name."""
        return dict(_NAMED.findall(self.text))

    def commands(self) -> list[Command]:
        """The commands of the shell's blocks, and those of ours in indented ones."""
        shell = [*self.blocks("bash", "sh"), *_INDENTED.findall(self.text)]
        lines = "\n".join(shell).replace("\\\n", " ").splitlines()
        return [
            Command(part, line.partition(" # ")[2].strip())
            for line in lines
            for part in line.split("&&")
            if part.strip() and not part.strip().startswith("#")
        ]

    def anchors(self) -> set[str]:
        """The anchors of its headings, as they are made of their words."""
        headings = _HEADING.findall(_FENCE.sub("", self.text))
        return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}

    def links(self) -> list[str]:
        return _LINK.findall(_FENCE.sub("", self.text))
