"""Findings of an audit as annotations of GitHub and as SARIF."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everyrank.audit import Audit, Finding
from everyrank.report import github_annotations, sarif_log


def audit_of(*findings: Finding) -> Audit:
    return Audit(("train.py",), 2, 12, 1.0, findings, (), ())


def test_annotations_stand_at_the_line_and_cannot_begin_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is relative to the working folder; a new line, a colon and a comma are escaped."""
    monkeypatch.chdir(tmp_path)
    place = f"{tmp_path}/a,b/train.py:12"
    found = audit_of(
        Finding("FAIL", "gradient.scale", place, "2 times\n::set-output name=x::y", "divide by 100%"),
        Finding("NOTE", "data.padded", "", "one sample twice"),
    )
    first, second = github_annotations(found)
    assert first == (
        "::error file=a%2Cb/train.py,line=12,title=FAIL gradient.scale::"
        "2 times%0A::set-output name=x::y%0Afix: divide by 100%25"
    )
    assert second == "::notice title=NOTE data.padded::one sample twice"


def test_sarif_has_a_rule_for_each_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels are those of SARIF, and a finding without a line has no location."""
    monkeypatch.chdir(tmp_path)
    found = audit_of(
        Finding("WARN", "ranks.gradient", f"{tmp_path}/train.py:3", "differs"),
        Finding("PERF", "sync.item", "", "slow", "fewer"),
        Finding("WARN", "ranks.gradient", "/elsewhere/lib.py:4", "differs"),
    )
    (run,) = json.loads(json.dumps(sarif_log(found)))["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["ranks.gradient", "sync.item"]
    assert [result["level"] for result in run["results"]] == ["warning", "note", "warning"]
    assert [result["ruleIndex"] for result in run["results"]] == [0, 1, 0]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "train.py"}, "region": {"startLine": 3}}
    assert "locations" not in run["results"][1]
    assert (
        run["results"][2]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "file:///elsewhere/lib.py"
    )
