"""The Makefile runs all parts of the integration tests."""

from __future__ import annotations

import re
from pathlib import Path

from integration.conftest import PARTS


def test_makefile_names_every_part_of_the_integration_tests(repository: Path) -> None:
    text = (repository / "Makefile").read_text()
    part_lists = re.findall(r"^(?:INTEGRATIONS|AT_LENGTH) := (.*)$", text, re.MULTILINE)
    assert sorted(" ".join(part_lists).split()) == sorted(PARTS)
