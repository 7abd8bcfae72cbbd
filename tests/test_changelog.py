"""CHANGELOG.md: the section "Unreleased", then the version of the package with a date, and one line per change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import everyrank


@pytest.fixture
def changelog(repository: Path) -> str:
    """The text of CHANGELOG.md."""
    path = repository / "CHANGELOG.md"
    if not path.exists():
        pytest.skip("a source distribution has no changelog")
    return path.read_text(encoding="utf-8")


def test_newest_released_version_is_that_of_the_package(changelog: str) -> None:
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(everyrank.__version__)} - \d{{4}}-\d\d-\d\d", headings[1])


def test_each_change_is_one_short_line(changelog: str) -> None:
    released = changelog.partition("\n## 0")[2]
    changes = [line for line in released.splitlines() if line.startswith("- ")]
    assert len(changes) > 50
    assert [line for line in released.splitlines() if line.startswith("  ")] == []
    assert [line for line in changes if len(line) > 150] == []
