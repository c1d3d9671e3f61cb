"""The site: Sphinx builds it without a warning, and it documents what mpframe offers."""

import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

import mpframe

for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package, reason="builds the site; pip install -e .[docs] brings it")

DOCS = ROOT / "docs"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    # Dead links, unknown anchors, pages that no list names, docstrings that cannot be read.
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    reference = (tmp_path / "site" / "api.html").read_text()
    for name in mpframe.__all__:
        assert f".{name}</" in reference or f'descname"><span class="pre">{name}<' in reference
    assert not (DOCS / "_build").exists()
