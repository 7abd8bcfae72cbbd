"""When `everyrank audit` compares a script with one rank without being asked."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import everyrank.relations
import everyrank.relations.compare as compare_module
from everyrank.audit import Audit, AuditOptions, Finding
from everyrank.commands.audit import _compared
from everyrank.relations import RelationResults, with_comparison

OPTIONS = AuditOptions()
AUDIT = Audit(("train.py",), 2, 12, 5.0, (), (), ())
FAIL, WARN = (Finding(level, "gradient.carried", "train.py:3", "text") for level in ("FAIL", "WARN"))


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`compare(audit)`: whether the comparison was run."""
    monkeypatch.setattr(everyrank.relations, "why_not_compared", lambda *_: "")
    monkeypatch.setattr(
        everyrank.relations, "with_comparison", lambda audit, _: dataclasses.replace(audit, altered=("compared",))
    )

    def compared(audit: Audit, flag: bool | None = None, options: AuditOptions = OPTIONS) -> bool:
        result = _compared(audit, ["train.py"], options, argparse.Namespace(compare=flag, only_compare=False))
        assert result is not None
        return result.altered == ("compared",)

    return compared


def test_by_default_if_the_rules_were_quick_and_found_no_certain_mistake(compare: Any, tmp_path: Path) -> None:
    assert compare(AUDIT)
    assert compare(dataclasses.replace(AUDIT, findings=(WARN,)))
    assert not compare(dataclasses.replace(AUDIT, findings=(FAIL,)))
    about_ranks = dataclasses.replace(FAIL, about_ranks=True)
    assert compare(dataclasses.replace(AUDIT, findings=(about_ranks,)))
    assert not compare(dataclasses.replace(AUDIT, findings=(about_ranks, FAIL)))
    assert not compare(dataclasses.replace(AUDIT, seconds=60.0))
    assert not compare(dataclasses.replace(AUDIT, updates=0))
    assert not compare(dataclasses.replace(AUDIT, python_args=("-m", "train")))
    assert not compare(AUDIT, options=AuditOptions(watch=True))
    assert not compare(AUDIT, options=AuditOptions(shim=tmp_path))


def test_as_asked(compare: Any) -> None:
    slow = dataclasses.replace(AUDIT, findings=(FAIL,), seconds=60.0)
    assert compare(slow, flag=True)
    assert not compare(AUDIT, flag=False)


@pytest.mark.parametrize(("flag", "unchecked"), [(None, ()), (True, ("comparison with one rank: a reason",))])
def test_why_not_is_only_an_answer_to_a_question(
    monkeypatch: pytest.MonkeyPatch, flag: bool | None, unchecked: tuple[str, ...]
) -> None:
    monkeypatch.setattr(everyrank.relations, "why_not_compared", lambda *_: "a reason")
    result = _compared(AUDIT, ["train.py"], OPTIONS, argparse.Namespace(compare=flag, only_compare=False))
    assert result is not None
    assert result.unchecked == unchecked


@pytest.mark.parametrize(
    ("num_equal", "rules", "kept"),
    [
        (8, (), ["gradient.carried"]),
        (8, ("data.shared-samples",), ["gradient.carried", "data.shared-samples"]),
        (8, ("ranks.gradient",), ["gradient.scale", "gradient.carried"]),
        (0, (), ["gradient.scale", "gradient.carried"]),
    ],
)
def test_a_comparison_without_a_difference_refutes_findings_about_ranks(
    monkeypatch: pytest.MonkeyPatch, num_equal: int, rules: tuple[str, ...], kept: list[str]
) -> None:
    """Not one that could not be made. A difference that a rule explains is its consequence."""
    about_ranks = Finding("FAIL", "gradient.scale", "train.py:9", "2x too large", about_ranks=True)
    found = tuple(Finding("WARN", rule, "train.py:9", "differs") for rule in rules)
    results = RelationResults(found, (), 1.0, num_equal)
    monkeypatch.setattr(compare_module, "compare_script", lambda *_, **__: results)
    audit = with_comparison(dataclasses.replace(AUDIT, findings=(about_ranks, FAIL)), OPTIONS)
    assert [finding.rule for finding in audit.findings] == kept
