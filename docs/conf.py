"""How Sphinx makes the site: `sphinx-build -W docs build/site`; see CONTRIBUTING.md."""

from typing import Any

from mpframe import __version__

project = "mpframe"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
myst_heading_anchors = 3
highlight_language = "text"  # Of a block that names none.
html_theme = "furo"
html_title = "mpframe"
html_show_copyright = False
default_role = "literal"  # `name` in a docstring is code.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


def plain(app: Any, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """Keep in a docstring what reStructuredText would take for its own marks.

    |x| is a magnitude, and in a module an indented block is a table or an equation.
    """
    kept: list[str] = []
    for line in lines:
        indented = line.startswith("    ")
        if what == "module" and indented and not (kept and kept[-1].startswith(("    ", "::"))):
            kept += ["::", ""]
        kept.append(line if what == "module" and indented else line.replace("|", r"\|"))
    lines[:] = kept


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain, priority=900)  # After napoleon.
