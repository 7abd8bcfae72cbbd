"""What the samples of batches tell, on recordings made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everyrank.audit.finding import Findings
from everyrank.relations.samples import judge_equal_columns, judge_skipped_batches


def recording(*ranks: list[list[torch.Tensor]]) -> Any:
    """Batches of one pass over loader 0."""
    facts = {"trained": [0], "loader_places": {0: "train.py:12"}}
    return SimpleNamespace(
        ranks=[SimpleNamespace(facts=facts, batches=[([0, 0], batch, 0) for batch in batches]) for batches in ranks]
    )


def batches(seed: int, drawn: int | None, rows: int = 4) -> list[list[torch.Tensor]]:
    """Four batches of samples, with a mask of each sample that is drawn with another seed; None: always the same."""
    samples, masks = (torch.Generator().manual_seed(number or 0) for number in (seed, drawn))
    fixed = torch.arange(6.0).expand(rows, 6)
    return [
        [torch.randn(rows, 6, generator=samples), torch.rand(rows, 6, generator=masks) if drawn is not None else fixed]
        for _ in range(4)
    ]


CASES = {
    "drawn alike": (batches(1, 7), batches(2, 7), ["random.equal-draws"]),
    "drawn by rank": (batches(1, 7), batches(2, 8), []),
    "the same samples": (batches(1, 7), batches(1, 7), []),
    "the same for all samples": (batches(1, None), batches(2, None), []),
    "too few batches": (batches(1, 7)[:2], batches(2, 7)[:2], []),
    "classes in a fixed order": (
        [[x, torch.arange(4)] for x, _ in batches(1, 7)],
        [[x, torch.arange(4)] for x, _ in batches(2, 7)],
        [],
    ),
}


@pytest.mark.parametrize(("first", "second", "rules"), CASES.values(), ids=list(CASES))
def test_parts_of_batches_that_ranks_draw_alike(first: Any, second: Any, rules: list[str]) -> None:
    findings = Findings()
    judge_equal_columns(recording(first, second), findings)
    assert [finding.rule for finding in findings] == rules


def passes(batches: int, skipped: int = 0, read_ahead: int = 0, ended: int = 2, trained: int | None = None) -> Any:
    """The recording of two passes over loader 0: each batch with the number of backwards before it was read."""
    trained = batches - skipped if trained is None else trained
    read = [
        [0, number, number * trained + max(0, index - skipped - read_ahead), "train.py:12", 0]
        for number in range(2)
        for index in range(batches)
    ]
    return SimpleNamespace(
        facts={"read": read, "read_to_end": [[0, number] for number in range(ended)], "backwards": 2 * trained}
    )


SKIPS = {
    "two of eight": (passes(8, skipped=2), "the first 2 batches"),
    "none": (passes(8), None),
    "one read ahead": (passes(8, read_ahead=1), None),
    "one of eight, and one read ahead": (passes(8, skipped=1, read_ahead=1), "the first 1 batches"),
    "one read ahead, and passes that are left early": (passes(8, read_ahead=1, ended=0, trained=7), None),
}


@pytest.mark.parametrize(("rank", "text"), SKIPS.values(), ids=list(SKIPS))
def test_batches_that_are_read_but_not_trained_on(rank: Any, text: str | None) -> None:
    findings = Findings()
    judge_skipped_batches(rank, findings)
    assert [finding.rule for finding in findings] == (["data.untrained"] if text else [])
    assert text is None or text in findings[0].text
