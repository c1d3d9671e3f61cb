"""Write a small project that trains, for you to change.

Usage: mpframe new FOLDER

    mpframe new spirals

Options:
    FOLDER    is made, and must not hold files

The project has a model, data, a configuration, a test, and a README.md with the commands. Change
anything: nothing else refers to these files.
"""

import json
import shutil
from pathlib import Path

from mpframe.cli.program import command
from mpframe.core.errors import ConfigError
from mpframe.files.durable import refuse_unwritable
from mpframe.files.text import say

_TEMPLATE = Path(__file__).parent / "template"


@command
def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("new: takes one folder, e.g. mpframe new spirals")
    folder = Path(arguments[0])
    refuse_unwritable("new", folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"new={folder}: is not empty; name a new folder")
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_TEMPLATE, folder, ignore=unwanted, dirs_exist_ok=True)
    project = folder / "conf" / "project.yaml"
    # JSON's quotes are YAML's: a folder's name may hold one.
    name = json.dumps(folder.resolve().name, ensure_ascii=False)
    project.write_text(project.read_text().replace('"spirals"', name))
    say(f"{folder}: written; begin with {folder / 'README.md'}")
