"""The parts of the integration tests: those that the Makefile takes are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

from integration.conftest import PARTS


def test_the_parts_of_the_integration_tests(repository: Path) -> None:
    text = (repository / "Makefile").read_text()
    found = re.findall(r"^(?:INTEGRATIONS|AT_LENGTH) := (.*)$", text, re.MULTILINE)
    assert sorted(" ".join(found).split()) == sorted(PARTS)
    about = " ".join(line for line in text.splitlines() if line.startswith("#"))
    assert [part for part in PARTS if not re.search(rf"\b{part}\b", about)] == []
