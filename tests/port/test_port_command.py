"""Options of everyrank port, the header of a port that is not equal, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.commands.port import with_header
from everyrank.port import Attempt, PortResult, ScriptFiles
from everyrank.port.check import PortComparison
from everyrank.port.helpers import helper_text
from everyrank.port.source import Edit
from everyrank.report.port import port_page
from processes import refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\n", "# why\nimport torch\n"),
        ("#!/usr/bin/env python\nimport torch\n", "#!/usr/bin/env python\n# why\nimport torch\n"),
        ("#!/bin/python\n# -*- coding: utf-8 -*-\nx = 1\n", "#!/bin/python\n# -*- coding: utf-8 -*-\n# why\nx = 1\n"),
        ("# a comment\nx = 1\n", "# why\n# a comment\nx = 1\n"),
    ],
)
def test_the_first_line_of_a_program_stays(text: str, expected: str) -> None:
    assert with_header(text, "# why\n") == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--check", "other.py"], "other.py"),
        (["--check", "train.py", "--force"], "--force"),
        (["--check-processes", "1"], "--check-processes"),
        (["-o", "train.py"], "--in-place"),
        (["--to", "workload", "-o", "elsewhere/train_workload.py"], "-o elsewhere/train_workload.py"),
        (["--to", "workload", "--in-place"], "--in-place"),
        (["--to", "workload", "--sampler", "torch"], "--sampler"),
    ],
)
def test_refused_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    assert named in refused(capsys, "port", *options, "train.py")


def test_the_page_escapes_and_shows_both_sides() -> None:
    comparison = PortComparison(2, 8, {"losses": 0.0}, "", [("<b>1</b>", "2")], ["train_ddp.py:3 prints on each rank"])
    attempt = Attempt(
        None, "a = 1\nb = '<i>'\n", [Edit((2, 0), (2, 0), "b", "the reason")], [(1, "a note")], [comparison]
    )
    page = port_page(
        PortResult(ScriptFiles(Path("train.py"), "a = 1\nc = '<u>'\n"), attempt, [attempt], True),
        [],
        ["train.py"],
        "train_ddp.py",
    )
    for text in ("&lt;b&gt;1", "&lt;u&gt;", "&lt;i&gt;", "the reason", "a note", "prints on each rank"):
        assert text in page, text
    assert "<u>" not in page


def test_logging_and_the_sampler_of_torch_are_in_the_helpers() -> None:
    names = {"setup", "split"}
    plain = helper_text(names, has_batch_norm=False, finds_unused=False, sums=False, has_numpy=False)
    other = helper_text(
        names, has_batch_norm=False, finds_unused=False, sums=False, has_numpy=False, has_logging=True, sampler="torch"
    )
    assert "logging.disable()" not in plain
    assert "RankBatches" in plain
    assert "logging.disable()" in other
    assert "DistributedSampler" in other
    assert "RankBatches" not in other
    for text in (plain, other):
        compile(text, "helpers", "exec")
