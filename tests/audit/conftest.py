"""Tests of the rules of audit run no comparison: tests/relations has that."""

from __future__ import annotations

import os

os.environ.setdefault("EVERYRANK_COMPARE", "0")
