"""The parts of the integration tests: those that the Makefile takes are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

from integration.conftest import PARTS


def test_the_parts_of_the_integration_tests(repository: Path) -> None:
    text = (repository / "Makefile").read_text()
    found = re.findall(r"^(?:INTEGRATIONS|AT_LENGTH) := (.*)$", text, re.MULTILINE)
    assert sorted(" ".join(found).split()) == sorted(PARTS)
