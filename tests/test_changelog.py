"""CHANGELOG.md: an empty or growing section above, then the version of the package with a date, and a line a change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import everyrank


@pytest.fixture
def changelog(repository: Path) -> str:
    path = repository / "CHANGELOG.md"
    if not path.exists():
        pytest.skip("a source distribution has no changelog")
    return path.read_text(encoding="utf-8")


def test_the_newest_version_is_that_of_the_package(changelog: str) -> None:
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(everyrank.__version__)} - \d{{4}}-\d\d-\d\d", headings[1])


def test_a_change_is_a_line(changelog: str) -> None:
    released = changelog.partition("\n## 0")[2]
    changes = [line for line in released.splitlines() if line.startswith("- ")]
    assert len(changes) > 50
    assert [line for line in released.splitlines() if line.startswith("  ")] == []
    assert [line for line in changes if len(line) > 150] == []
