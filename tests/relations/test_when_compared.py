"""When `everyrank audit` compares a script with one rank without being asked."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import everyrank.relations
from everyrank.audit import Audit, AuditOptions, Finding
from everyrank.commands.audit import _compared

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
    assert not compare(dataclasses.replace(AUDIT, seconds=60.0))
    assert not compare(dataclasses.replace(AUDIT, updates=0))
    assert not compare(dataclasses.replace(AUDIT, words=("-m", "train")))
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
