"""Scripts of these tests run in processes that are forked."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _forked(forked_scripts: None) -> None:
    """For all tests of this folder."""
