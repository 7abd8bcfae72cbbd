"""Findings of an audit where people review code: annotations of GitHub, and SARIF. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from everyrank._version import __version__
from everyrank.audit import Audit, Finding

__all__ = ["github_annotations", "sarif_log"]

_GITHUB = {"FAIL": "error", "WARN": "warning", "PERF": "notice", "NOTE": "notice"}
_SARIF = {"FAIL": "error", "WARN": "warning", "PERF": "note", "NOTE": "note"}


def github_annotations(audit: Audit) -> list[str]:
    """Return lines that GitHub Actions shows next to the code: `::error file=train.py,line=12,title=...::...`.

    Paths are relative to the working folder. Text of the script cannot start another command.
    """
    lines: list[str] = []
    for finding in audit.findings:
        path, line = _location(finding.location)
        location = f"file={_property(path)},line={line}," if path else ""
        text = f"{finding.text}\nfix: {finding.fix}" if finding.fix else finding.text
        others = [_relative(line) for line in finding.shown_lines]
        text += f"\nlook at {', '.join(others)}" if others else ""
        title = _property(f"{finding.level} {finding.rule}")
        lines.append(f"::{_GITHUB[finding.level]} {location}title={title}::{_data(text)}")
    return lines


def sarif_log(audit: Audit) -> dict[str, Any]:
    """Return the findings as SARIF 2.1.0, which code scanning and editors read.

    https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
    """
    rules = list(dict.fromkeys(finding.rule for finding in audit.findings))
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "everyrank audit",
                        "version": __version__,
                        "rules": [{"id": rule} for rule in rules],
                    }
                },
                "results": [_result(finding, rules.index(finding.rule)) for finding in audit.findings],
            }
        ],
    }


def _result(finding: Finding, index: int) -> dict[str, Any]:
    text = f"{finding.text}. Fix: {finding.fix}" if finding.fix else finding.text
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _SARIF[finding.level],
        "message": {"text": text},
    }
    if _location(finding.location)[0]:
        result["locations"] = [{"physicalLocation": _physical_location(finding.location)}]
    related = [_physical_location(line) for line in finding.lines if line != finding.location]
    if related:
        result["relatedLocations"] = [{"physicalLocation": each} for each in related]
    return result


def _physical_location(location: str) -> dict[str, Any]:
    path, line = _location(location)
    uri = Path(path).as_uri() if Path(path).is_absolute() else quote(os.fsencode(Path(path).as_posix()))
    return {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}


def _relative(location: str) -> str:
    path, line = _location(location)
    return f"{path}:{line}" if path else location


def _location(location: str) -> tuple[str, int]:
    """Return (path relative to the working folder, line); ("", 0) if there is no line."""
    path, _, line = location.rpartition(":")
    if not path or not line.isdecimal():
        return "", 0
    relative = os.path.relpath(path)
    return (path if relative.startswith("..") else relative), int(line)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
