"""Each public name has an example in its docstring, and running the example gives the shown output."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import everyrank
from everyrank import testing

PUBLIC = {name: getattr(everyrank, name) for name in everyrank.__all__} | {
    name: getattr(testing, name) for name in testing.__all__
}
NAMES_THAT_START_RANKS = ("assert_same_gradients", "assert_same_training", "bench", "run", "verify")
FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def run_example(name: str) -> doctest.TestResults:
    """Run the example in the docstring of a public name."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(PUBLIC[name]) or "")
    return doctest.DocTestRunner(optionflags=FLAGS).run(doctest.DocTest(examples, {}, name, None, None, None))


def assert_example_passes(name: str) -> None:
    result = run_example(name)
    assert result.attempted > 1
    assert result.failed == 0


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary directory, and write the file there that the example of `read_records` reads."""
    monkeypatch.chdir(tmp_path)
    run_example("write_records")


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - set(NAMES_THAT_START_RANKS)))
def test_example_gives_the_shown_output(name: str, records: None) -> None:
    assert_example_passes(name)


@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES_THAT_START_RANKS)
def test_example_that_starts_ranks_gives_the_shown_output(name: str) -> None:
    assert_example_passes(name)


def test_example_with_wrong_output_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        """
        >>> 1 + 1
        3
        """

    monkeypatch.setitem(PUBLIC, "wrong", wrong)
    assert run_example("wrong").failed == 1
