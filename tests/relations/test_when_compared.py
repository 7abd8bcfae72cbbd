"""When `everyrank audit` compares a script with one rank by default."""

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
from everyrank.errors import CannotRunError, UsageError
from everyrank.relations import RelationResults, with_comparison, with_resume, with_settings

OPTIONS = AuditOptions()
AUDIT = Audit(("train.py",), 2, 12, 5.0, (), (), ())
FAIL, WARN = (Finding(level, "gradient.carried", "train.py:3", "text") for level in ("FAIL", "WARN"))


@pytest.fixture
def is_compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that tells whether the comparison runs after this audit."""
    monkeypatch.setattr(everyrank.relations, "why_not_compared", lambda *_: "")
    monkeypatch.setattr(
        everyrank.relations, "with_comparison", lambda audit, _: dataclasses.replace(audit, altered=("compared",))
    )

    def runs_comparison(audit: Audit, flag: bool | None = None, options: AuditOptions = OPTIONS) -> bool:
        result = _compared(audit, ["train.py"], options, argparse.Namespace(compare=flag, only_compare=False))
        assert result is not None
        return result.altered == ("compared",)

    return runs_comparison


def test_comparison_runs_by_default_after_quick_audit_without_certain_mistake(is_compared: Any, tmp_path: Path) -> None:
    """A certain mistake has level FAIL. A mistake about ranks does not prevent the comparison."""
    assert is_compared(AUDIT)
    assert is_compared(dataclasses.replace(AUDIT, findings=(WARN,)))
    assert not is_compared(dataclasses.replace(AUDIT, findings=(FAIL,)))
    rank_finding = dataclasses.replace(FAIL, refuted_if_equal_to_one_rank=True)
    assert is_compared(dataclasses.replace(AUDIT, findings=(rank_finding,)))
    assert not is_compared(dataclasses.replace(AUDIT, findings=(rank_finding, FAIL)))
    assert not is_compared(dataclasses.replace(AUDIT, seconds=60.0))
    assert not is_compared(dataclasses.replace(AUDIT, updates=0))
    assert not is_compared(dataclasses.replace(AUDIT, python_args=("-m", "train")))
    assert not is_compared(AUDIT, options=AuditOptions(watch=True))
    assert not is_compared(AUDIT, options=AuditOptions(shim=tmp_path))


def test_compare_flag_overrides_the_default(is_compared: Any) -> None:
    """`--compare` forces the comparison and `--no-compare` prevents it."""
    slow_audit = dataclasses.replace(AUDIT, findings=(FAIL,), seconds=60.0)
    assert is_compared(slow_audit, flag=True)
    assert not is_compared(AUDIT, flag=False)


@pytest.mark.parametrize(("flag", "unchecked"), [(None, ()), (True, ("comparison with one rank: a reason",))])
def test_reason_for_no_comparison_is_reported_only_on_request(
    monkeypatch: pytest.MonkeyPatch, flag: bool | None, unchecked: tuple[str, ...]
) -> None:
    """Without `--compare` no reason is reported."""
    monkeypatch.setattr(everyrank.relations, "why_not_compared", lambda *_: "a reason")
    result = _compared(AUDIT, ["train.py"], OPTIONS, argparse.Namespace(compare=flag, only_compare=False))
    assert result is not None
    assert result.unchecked == unchecked


def test_only_compare_passes_pretend_cuda_and_refuses_what_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script that starts its ranks itself would start all of them on each rank."""
    path, args = tmp_path / "train.py", argparse.Namespace(compare=None, only_compare=True)
    path.write_text("pass\n")
    used: dict[str, Any] = {}

    def compare(*_: object, **options: Any) -> RelationResults:
        used.update(options)
        return RelationResults((), (), 1.0)

    monkeypatch.setattr(compare_module, "compare_script", compare)
    assert _compared(None, [str(path)], AuditOptions(pretend_cuda=True), args) is not None
    assert used["pretend_cuda"] is True
    path.write_text("import torch.multiprocessing as mp\nmp.spawn(print)\n")
    with pytest.raises(UsageError, match="starts its ranks itself"):
        _compared(None, [str(path)], AuditOptions(), args)


@pytest.mark.parametrize(
    ("num_equal", "rules", "expected_rules"),
    [
        (8, (), ["gradient.carried"]),
        (8, ("data.shared-samples",), ["gradient.carried", "data.shared-samples"]),
        (8, ("ranks.gradient",), ["gradient.scale", "gradient.carried"]),
        (0, (), ["gradient.scale", "gradient.carried"]),
    ],
)
def test_comparison_without_difference_refutes_findings_about_ranks(
    monkeypatch: pytest.MonkeyPatch, num_equal: int, rules: tuple[str, ...], expected_rules: list[str]
) -> None:
    """A comparison of no updates refutes nothing.

    A difference that a rule explains is reported as a consequence of that rule.
    """
    rank_finding = Finding("FAIL", "gradient.scale", "train.py:9", "2x too large", refuted_if_equal_to_one_rank=True)
    differences = tuple(Finding("WARN", rule, "train.py:9", "differs") for rule in rules)
    results = RelationResults(differences, (), 1.0, num_equal)
    monkeypatch.setattr(compare_module, "compare_script", lambda *_, **__: results)
    audit = with_comparison(dataclasses.replace(AUDIT, findings=(rank_finding, FAIL)), OPTIONS)
    assert [finding.rule for finding in audit.findings] == expected_rules


@pytest.mark.parametrize(
    ("num_runs", "altered"),
    [
        (0, []),  # the host does not start
        (1, ["the script ran once more, to be resumed (0 s)", "the script ran once more, to compare settings (0 s)"]),
        (
            3,
            [
                "the script ran 3 times more, to be resumed (0 s)",
                "the script ran 3 times more, to compare settings (0 s)",
            ],
        ),
    ],
)
def test_audit_counts_the_runs_of_the_script_that_happened(
    monkeypatch: pytest.MonkeyPatch, num_runs: int, altered: list[str]
) -> None:
    """A script that saves no checkpoint runs only once for the comparison of a resumed training."""

    class Host:
        def __init__(self, *_: object) -> None:
            self.num_runs = 0

        def __enter__(self) -> Any:
            if not num_runs:
                raise CannotRunError("cannot create a temporary folder")
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def run(host: Any, *_: object) -> int:
        host.num_runs += num_runs
        return 0

    monkeypatch.setattr(compare_module, "ScriptHost", Host)
    monkeypatch.setattr(compare_module, "why_not_compared", lambda *_: "")
    for name in ("judge_script", "judge_resume", "judge_settings"):
        monkeypatch.setattr(compare_module, name, run)
    resume: Any = None
    results = [with_resume(AUDIT, OPTIONS, resume), with_settings(AUDIT, OPTIONS, ["--lr", "1"])]
    assert [line for audit in results for line in audit.altered] == altered
    assert all(bool(audit.unchecked) is not bool(num_runs) for audit in results)
    compared = with_comparison(AUDIT, OPTIONS)
    assert compared.altered == (("the script ran again for the comparison with one rank (0 s)",) if num_runs else ())
