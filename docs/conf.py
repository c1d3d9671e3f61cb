"""The site: sphinx-build docs build/site (pip install "mpframe[docs]"). Every warning is an error."""

import re
from typing import Any

from mpframe import __version__

project = "mpframe"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "mpframe"
default_role = "literal"  # `name` in a docstring is code.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


def escape_bars(
    app: Any, what: str, name: str, subject: Any, options: Any, lines: list[str]
) -> None:
    """|x| is a magnitude in a docstring; reStructuredText would take it for a substitution."""
    lines[:] = [re.sub(r"\|(?![^`]*`[^`]*$)", r"\\|", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", escape_bars, priority=900)
