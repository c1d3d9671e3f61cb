"""A case marked `differs("reason")` asserts what happens here; README.md must give the reason."""

from pathlib import Path

import pytest

PAGE = (Path(__file__).parent / "README.md").read_text()


@pytest.fixture(autouse=True)
def _every_difference_has_its_reason_in_the_readme(request: pytest.FixtureRequest) -> None:
    for mark in request.node.iter_markers("differs"):
        assert f"| `{request.path.stem}` | {mark.args[0]} |" in PAGE
