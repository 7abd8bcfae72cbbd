"""Findings of an audit as GitHub annotations and as SARIF."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everyrank.audit import Audit, Finding
from everyrank.cli import _parser
from everyrank.commands.audit import _show
from everyrank.report import github_annotations, sarif_log


def audit_of(*findings: Finding) -> Audit:
    return Audit(("train.py",), 2, 12, 1.0, findings, (), ())


def test_github_annotations_have_a_line_and_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to the working directory. Newlines, colons and commas are escaped."""
    monkeypatch.chdir(tmp_path)
    location = f"{tmp_path}/a,b/train.py:12"
    audit = audit_of(
        Finding("FAIL", "gradient.scale", location, "2 times\n::set-output name=x::y", "divide by 100%"),
        Finding("NOTE", "data.padded", "", "one sample twice"),
    )
    first, second = github_annotations(audit)
    assert first == (
        "::error file=a%2Cb/train.py,line=12,title=FAIL gradient.scale::"
        "2 times%0A::set-output name=x::y%0Afix: divide by 100%25"
    )
    assert second == "::notice title=NOTE data.padded::one sample twice"


def test_next_command_repeats_the_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding on 4 ranks need not be one on 2 ranks."""
    monkeypatch.setattr("everyrank.commands.audit._has_edits", lambda _: True)
    argv = ["audit", "--processes", "4", "train.py", "--out", "a b"]
    args = _parser().parse_args(argv)
    args.argv = argv
    _show(audit_of(), args)
    assert capsys.readouterr().out.endswith("next: everyrank audit --fix --processes 4 train.py --out 'a b'\n")


def test_sarif_has_a_rule_for_each_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels are those of SARIF, a finding without a line has no location, and a path is a valid URI."""
    monkeypatch.chdir(tmp_path)
    audit = audit_of(
        Finding("WARN", "ranks.gradient", f"{tmp_path}/my project/train.py:3", "differs"),
        Finding("PERF", "sync.item", "", "slow", "fewer"),
        Finding("WARN", "ranks.gradient", "/elsewhere/lib.py:4", "differs"),
    )
    (run,) = json.loads(json.dumps(sarif_log(audit)))["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["ranks.gradient", "sync.item"]
    assert [result["level"] for result in run["results"]] == ["warning", "note", "warning"]
    assert [result["ruleIndex"] for result in run["results"]] == [0, 1, 0]
    location = run["results"][0]["locations"][0]["physicalLocation"]
    assert location == {"artifactLocation": {"uri": "my%20project/train.py"}, "region": {"startLine": 3}}
    assert "locations" not in run["results"][1]
    assert (
        run["results"][2]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "file:///elsewhere/lib.py"
    )
