"""`everyrank audit --fix` with real audits: what is mended is gone, and edits that do not help are left out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import everyrank.repair.fix as repair_fix
from auditing import SCRIPTS
from everyrank.audit import AuditOptions, Finding, audit_script
from everyrank.repair import patch_script
from everyrank.repair.edited_script import EditedScript
from processes import Cli

pytestmark = pytest.mark.integration


def _mistaken(folder: Path, *changes: tuple[str, str]) -> Path:
    text = (SCRIPTS / "classifier.py").read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    script = folder / "train.py"
    script.write_text(text)
    return script


def test_two_mistakes_are_mended_and_a_third_is_left(cli: Cli, tmp_path: Path) -> None:
    _mistaken(
        tmp_path,
        ("            optimizer.zero_grad()\n", ""),
        ("        if rank == 0:\n            print", "        if True:\n            print"),
        ("lr=0.1,", "lr=0.1 * (1 + rank),"),
    )
    done = cli(tmp_path, "audit", "--fix", "--json", "audit.json", "--patch", "fix.diff", "train.py")
    assert done.status == 1, done.err
    found = json.loads((tmp_path / "audit.json").read_text())
    assert {each["rule"] for each in found["patch"]["mended"]} >= {"gradient.carried", "save.race"}
    assert "replicas.rate" in {each["rule"] for each in found["patch"]["left"]}
    assert "optimizer.zero_grad()" in done.out
    subprocess.run(["patch", "-p0", "-i", "fix.diff"], cwd=tmp_path, check=True, capture_output=True)
    again = audit_script([str(tmp_path / "train.py")], AuditOptions(), lambda _: None)
    assert again is not None
    assert {finding.rule for finding in again.findings if finding.level in ("FAIL", "WARN")} <= {
        "replicas.rate",
        "replicas.drift",
    }


def test_an_edit_that_does_not_help_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two edits, the first changes nothing that matters; an edit that brings another mistake is no patch either."""

    def only_a_comment(script: EditedScript, finding: Finding) -> None:
        script.source.insert_before(script.statement_at(int(finding.place.rpartition(":")[2])), "# step", "a comment")

    def without_the_sampler(script: EditedScript, finding: Finding) -> None:
        del finding
        text = "sampler=sampler"
        line = next(n for n, each in enumerate(script.source.text.splitlines(), 1) if text in each)
        script.source.replace(script.call_at(line, "DataLoader"), "DataLoader(train, 7, shuffle=True)", "worse")
        step = next(call for call in script.calls_of("step") if "optimizer" in script.source.code(call))
        script.source.insert_after(script.source.statement(step), "optimizer.zero_grad()", "cleared")

    monkeypatch.setattr(repair_fix, "remedies_for", lambda finding: [only_a_comment, without_the_sampler])
    script = _mistaken(tmp_path, ("            optimizer.zero_grad()\n", ""))
    audit = audit_script([str(script)], AuditOptions(), lambda _: None)
    assert audit is not None
    patch = patch_script(audit, AuditOptions())
    assert patch.text == patch.original
    assert patch.mended == ()
    (reason,) = [reason for finding, reason in patch.left if finding.rule == "gradient.carried"]
    assert "every rank reads all samples" in reason  # of the second edit
    assert patch.audits == 3  # all at once, then one by one
    assert script.read_text() == patch.original


def test_a_mean_of_means_is_mended(tmp_path: Path) -> None:
    """The sum of the batches' means, which is then averaged over batches and ranks."""
    script = _mistaken(tmp_path, ("[loss * len(labels), hits, len(labels)]", "[loss, hits / len(labels), 1]"))
    audit = audit_script([str(script)], AuditOptions(), lambda _: None)
    assert audit is not None
    finding = next(each for each in audit.findings if each.rule == "eval.mean-of-means")
    assert "% too" in finding.text
    patch = patch_script(audit, AuditOptions())
    assert "eval.mean-of-means" in {each.rule for each, _ in patch.mended}
