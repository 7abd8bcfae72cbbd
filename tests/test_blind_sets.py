"""The blind sets of benchmarks/silent_bugs: each patch adds its bug to the correct script, at the line it names."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PATCH = "--- a.py\n+++ wrong/a.py\n@@ -2,2 +2,3 @@\n two\n-three\n+3\n+3.5\n@@ -5 +6,0 @@\n-five\n"


@pytest.fixture(scope="module")
def corpus() -> Any:
    """The module benchmarks/silent_bugs.py."""
    spec = importlib.util.spec_from_file_location("silent_bugs", BENCHMARKS / "silent_bugs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_hunk_of_a_patch_is_applied(corpus: Any) -> None:
    assert corpus.apply_patch("one\ntwo\nthree\nfour\nfive\n", PATCH) == "one\ntwo\n3\n3.5\nfour\n"


@pytest.mark.parametrize(
    "text", ["one\nTWO\nthree\nfour\nfive\n", "one\ntwo\nTHREE\nfour\nfive\n", "one\ntwo\nthree\n"]
)
def test_patch_that_does_not_match_the_text_raises(corpus: Any, text: str) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        corpus.apply_patch(text, PATCH)


@pytest.mark.parametrize(("set_number", "num_bugs"), [(1, 15), (2, 15), (3, 24), (4, 24), (6, 24)])
def test_every_bug_is_at_the_line_of_its_description(
    corpus: Any, tmp_path: Path, set_number: int, num_bugs: int
) -> None:
    folder = corpus.copy_with_mistakes(corpus.BLIND_SETS[set_number], tmp_path)
    descriptions = sorted((folder / "wrong").glob("*.json"))
    assert len(descriptions) == num_bugs
    for description in descriptions:
        correct, wrong = ((folder / f"{description.stem}{end}.py").read_text() for end in ("_right", ""))
        line = json.loads(description.read_text())["line"]
        assert corpus.MISTAKE_MARK in wrong.splitlines()[line - 1], description.stem
        assert corpus.MISTAKE_MARK not in correct
