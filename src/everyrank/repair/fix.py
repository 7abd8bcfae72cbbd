"""Tries the remedies of findings, audits the edited script, and keeps edits that help without new findings."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from everyrank.audit import Audit, AuditOptions, Finding, ScriptFailedError, audit_script
from everyrank.errors import CannotRunError, EveryrankError
from everyrank.port import NotPortedError
from everyrank.port.frame import imported_names, imports_in, leading_imports
from everyrank.port.helpers import HELPERS
from everyrank.port.run import read_script, with_siblings
from everyrank.port.source import end_of
from everyrank.repair.edited_script import CannotRepairError, EditedScript, line_of
from everyrank.repair.remedies import Remedy, remedies_for

__all__ = ["Patch", "edited_by", "is_editable", "patch_script"]


@dataclasses.dataclass(frozen=True)
class Patch:
    """The edits that fix findings, and these findings.

    original  the text of the script
    text      the edited text; equal to `original` if no edit helped
    mended    the fixed findings, with the reasons of their edits as (line, sentence)
    left      the findings without a patch, and why there is none
    audits    how often the edited script was audited
    """

    original: str
    text: str
    mended: tuple[tuple[Finding, tuple[tuple[int, str], ...]], ...]
    left: tuple[tuple[Finding, str], ...]
    audits: int

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of --json."""
        return {
            "mended": [
                {"rule": finding.rule, "place": finding.location, "edits": [list(reason) for reason in reasons]}
                for finding, reasons in self.mended
            ],
            "left": [
                {"rule": finding.rule, "place": finding.location, "reason": reason} for finding, reason in self.left
            ],
            "audits": self.audits,
        }


def patch_script(audit: Audit, options: AuditOptions, say: Callable[[str], None] = lambda _: None) -> Patch:
    """Edit the script of an audit to fix its findings; another audit checks each edit.

    Raises `CannotRunError` for a module (-m), `UsageError` for a script that cannot be read.
    """
    script = Path(audit.python_args[0])
    if audit.python_args[0].startswith("-"):
        raise CannotRunError("a module (-m) is not patched: give the path of a script")
    text = read_script(script)
    left: list[tuple[Finding, str]] = []
    open_findings: list[tuple[Finding, list[Remedy]]] = []
    for finding in audit.findings:
        remedies = remedies_for(finding)
        if not remedies:
            if finding.level in ("FAIL", "WARN"):
                left.append((finding, "no edit is known for this kind of mistake"))
        elif finding.level == "NOTE":
            continue
        elif not line_of(finding.location, script):
            left.append((finding, "it is not in this script, and other files are not edited"))
        else:
            open_findings.append((finding, remedies))
    trials = _Trials(audit, options, text, say)
    kept = trials.all_at_once(open_findings)
    if kept is None:
        kept = []
        for finding, remedies in open_findings:
            reason = trials.one_by_one(finding, remedies, kept)
            if reason:
                left.append((finding, reason))
    edited, reasons = edited_by(text, kept)
    mended = [(finding, reasons[index]) for index, (finding, _) in enumerate(kept)]
    if kept:  # findings caused by a fixed one are also gone
        also_gone = [finding for finding, _ in left if finding.rule not in trials.rules_left]
        mended += [(finding, ()) for finding in also_gone]
        left = [each for each in left if each[0] not in also_gone]
    return Patch(text, edited, tuple(mended), tuple(left), trials.audits)


def is_editable(finding: Finding, script: Path) -> bool:
    """Whether an edit is known for a mistake in a line of this script."""
    return finding.level in ("FAIL", "WARN") and bool(remedies_for(finding)) and line_of(finding.location, script) > 0


class _Trials:
    """Audits of the edited script.

    rules_left  rules of the findings in the last better audit
    """

    def __init__(self, audit: Audit, options: AuditOptions, text: str, say: Callable[[str], None]) -> None:
        self.before, self.options, self.text, self.say = audit, options, text, say
        self.audits, self.rules_left = 0, set[str]()

    def all_at_once(self, open_findings: Sequence[tuple[Finding, list[Remedy]]]) -> list[tuple[Finding, Remedy]] | None:
        """Try the first remedy of every finding in one audit. Returns these, or None if they do not fix all."""
        chosen: list[tuple[Finding, Remedy]] = []
        for finding, remedies in open_findings:
            remedy = next((candidate for candidate in remedies if self._fits([*chosen, (finding, candidate)])), None)
            if remedy is None:
                return None
            chosen.append((finding, remedy))
        if not chosen:
            return []
        return chosen if not self._audit_again(chosen) else None

    def one_by_one(self, finding: Finding, remedies: Sequence[Remedy], kept: list[tuple[Finding, Remedy]]) -> str:
        """Append the first remedy that helps to `kept`. Returns "", or why none helps."""
        reason = ""
        for remedy in remedies:
            chosen = [*kept, (finding, remedy)]
            try:
                edited_by(self.text, chosen)
            except (CannotRepairError, NotPortedError) as error:
                reason = reason or str(error)
                continue
            reason_of_remedy = self._audit_again(chosen)
            if not reason_of_remedy:
                kept.append(chosen[-1])
                return ""
            reason = reason_of_remedy
        return reason

    def _fits(self, chosen: Sequence[tuple[Finding, Remedy]]) -> bool:
        try:
            edited_by(self.text, chosen)
        except (CannotRepairError, NotPortedError):
            return False
        return True

    def _audit_again(self, chosen: Sequence[tuple[Finding, Remedy]]) -> str:
        """Audit the edited script. Returns "" if the findings are gone without new ones, else the reason."""
        text, _ = edited_by(self.text, chosen)
        script = Path(self.before.python_args[0])
        self.audits += 1
        self.say(f"auditing patch {self.audits}")
        with with_siblings(script, {script.name: text}) as path:
            try:
                after = audit_script([str(path), *self.before.python_args[1:]], self.options, lambda _: None)
            except ScriptFailedError as error:
                return f"with the edit the script fails: {error}"
            except EveryrankError as error:
                return f"the edited script could not be audited: {error}"
        if after is None:
            return "another rank has the result"
        difference = _difference(self.before, after, [finding for finding, _ in chosen])
        if not difference:
            self.rules_left = {finding.rule for finding in after.findings}
        return difference


def _difference(before: Audit, after: Audit, findings: Sequence[Finding]) -> str:
    """Return why an edited script is not better; "" if these findings are gone and no other problem appeared."""
    count_before = Counter(finding.rule for finding in before.findings)
    count_after = Counter(finding.rule for finding in after.findings)
    count_mended = Counter(finding.rule for finding in findings)
    for finding in after.findings:
        if finding.rule in count_mended:
            if count_after[finding.rule] > count_before[finding.rule] - count_mended[finding.rule]:
                return "an edit was tried, but the audit finds the same again"
        elif finding.level in ("FAIL", "WARN") and count_after[finding.rule] > count_before[finding.rule]:
            return f"with the edit the audit finds: {finding.text}"
    new_unchecked = [reason for reason in after.unchecked if reason not in before.unchecked and "gradients" in reason]
    if new_unchecked:
        return f"with the edit the audit cannot check it: {new_unchecked[0]}"
    if after.updates < min(before.updates, 2):
        return f"with the edit the script makes only {after.updates} updates"
    return ""


def edited_by(text: str, chosen: Sequence[tuple[Finding, Remedy]]) -> tuple[str, list[tuple[tuple[int, str], ...]]]:
    """Return the edited script, and for each remedy the reasons of its edits.

    Raises `CannotRepairError` or `NotPortedError` if one does not fit.
    """
    script = EditedScript(text)
    reasons: list[tuple[tuple[int, str], ...]] = []
    for finding, remedy in chosen:
        count = len(script.source.edits)
        remedy(script, finding)
        reasons.append(tuple((edit.start[0], edit.reason) for edit in script.source.edits[count:] if edit.reason))
    _add_imports(script)
    return script.source.edited(), reasons


def _add_imports(script: EditedScript) -> None:
    """Put imports and helper functions after the imports of the script."""
    helpers = "\n\n".join(HELPERS[name].strip("\n") for name in sorted(script.helpers))
    if helpers:
        helpers = helpers.replace("dist.", f"{script.dist}.")
    if not script.imports and not helpers:
        return
    last_import = leading_imports(script.source.tree.body)
    needed = list(script.imports)
    if helpers and "torch" not in imported_names(imports_in(script.source.tree.body)):
        needed.append("import torch")
    block = "\n".join(needed)
    if helpers:
        line = end_of(last_import)[0]
        next_line = script.source.lines[line : line + 1]
        block += f"\n\n\n{helpers}" + ("\n\n" if next_line and next_line[0].strip() else "")
    script.source.insert_after(last_import, block.strip("\n") if not helpers else block.lstrip("\n"), "")
