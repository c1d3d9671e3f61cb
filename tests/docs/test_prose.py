"""Docs and docstrings are written as somebody says them; prose.py has the patterns."""

from pathlib import Path

from prose import PATTERNS, count, paragraphs, parts


def test_the_rates_are_within_their_limits() -> None:
    for part in ("docs", "code"):
        words, found = count(parts()[part])
        rates = {name: places * 10_000 / words for name, places in found.items()}
        beyond = {name: rate for name, rate in rates.items() if rate > PATTERNS[name][1]}
        assert not beyond, "python tests/docs/prose.py FILE ... shows each place"


def test_text_is_read_and_code_is_not(tmp_path: Path) -> None:
    module, page = tmp_path / "module.py", tmp_path / "page.md"
    docstring = '"""Title; more.\n\n    code = 1; more = 2\n\nEnd."""\n'
    module.write_text(docstring + '\nx = "a; b"  # One; two.\n# Three.\n')
    assert [text for _, text in paragraphs(module)] == ["Title; more.", "End.", "One; two. Three."]
    assert count([module])[1]["semicolon"] == 2
    page.write_text("What is it? What works. Also `a; b`.\n\n```bash\na; b\n```\n\n| a; b |\n")
    words, found = count([page])
    assert (words, found["semicolon"], found["What ..."]) == (7, 0, 1)
