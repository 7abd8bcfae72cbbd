"""`everyrank audit --fix` with real audits: edits that help are in the patch, all others are left out."""

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


def write_broken_script(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the correct classifier with these changes to train.py, and return its path."""
    script_text = (SCRIPTS / "classifier.py").read_text()
    for before, after in changes:
        assert before in script_text
        script_text = script_text.replace(before, after, 1)
    script = folder / "train.py"
    script.write_text(script_text)
    return script


def test_two_mistakes_are_fixed_and_one_without_edit_remains(cli: Cli, tmp_path: Path) -> None:
    """No edit exists for a learning rate that depends on the rank."""
    write_broken_script(
        tmp_path,
        ("            optimizer.zero_grad()\n", ""),
        ("        if rank == 0:\n            print", "        if True:\n            print"),
        ("lr=0.1,", "lr=0.1 * (1 + rank),"),
    )
    result = cli(tmp_path, "audit", "--fix", "--json", "audit.json", "--patch", "fix.diff", "train.py")
    assert result.status == 1, result.err
    audit_json = json.loads((tmp_path / "audit.json").read_text())
    assert {mistake["rule"] for mistake in audit_json["patch"]["mended"]} >= {"gradient.carried", "save.race"}
    assert "replicas.rate" in {mistake["rule"] for mistake in audit_json["patch"]["left"]}
    assert "optimizer.zero_grad()" in result.out
    subprocess.run(["patch", "-p0", "-i", "fix.diff"], cwd=tmp_path, check=True, capture_output=True)
    audit_after_patch = audit_script([str(tmp_path / "train.py")], AuditOptions(), lambda _: None)
    assert audit_after_patch is not None
    assert {finding.rule for finding in audit_after_patch.findings if finding.level in ("FAIL", "WARN")} <= {
        "replicas.rate",
        "replicas.drift",
    }


def test_edit_that_does_not_help_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first edit only adds a comment. The second edit fixes the mistake and adds a new one."""

    def add_comment(script: EditedScript, finding: Finding) -> None:
        script.source.insert_before(
            script.statement_at(int(finding.location.rpartition(":")[2])), "# step", "a comment"
        )

    def remove_sampler(script: EditedScript, finding: Finding) -> None:
        del finding
        sampler_argument = "sampler=sampler"
        line_number = next(
            number
            for number, source_line in enumerate(script.source.text.splitlines(), 1)
            if sampler_argument in source_line
        )
        script.source.replace(script.call_at(line_number, "DataLoader"), "DataLoader(train, 7, shuffle=True)", "worse")
        optimizer_step = next(call for call in script.calls_of("step") if "optimizer" in script.source.code(call))
        script.source.insert_after(script.source.statement(optimizer_step), "optimizer.zero_grad()", "cleared")

    monkeypatch.setattr(repair_fix, "remedies_for", lambda finding: [add_comment, remove_sampler])
    script = write_broken_script(tmp_path, ("            optimizer.zero_grad()\n", ""))
    audit = audit_script([str(script)], AuditOptions(), lambda _: None)
    assert audit is not None
    patch = patch_script(audit, AuditOptions())
    assert patch.text == patch.original
    assert patch.mended == ()
    (reason,) = [reason for finding, reason in patch.left if finding.rule == "gradient.carried"]
    assert "every rank reads all samples" in reason  # the second edit causes this
    assert patch.audits == 3  # one audit with all edits, then one per edit
    assert script.read_text() == patch.original


def test_mean_of_means_is_fixed(tmp_path: Path) -> None:
    """The script averages the means of its batches, and then averages over the ranks."""
    script = write_broken_script(tmp_path, ("[loss * len(labels), hits, len(labels)]", "[loss, hits / len(labels), 1]"))
    audit = audit_script([str(script)], AuditOptions(), lambda _: None)
    assert audit is not None
    finding = next(finding for finding in audit.findings if finding.rule == "eval.mean-of-means")
    assert "% too" in finding.text
    patch = patch_script(audit, AuditOptions())
    assert "eval.mean-of-means" in {fixed.rule for fixed, _ in patch.mended}
