"""Comparison of batches between ranks: equal random tensors, and batches that are skipped."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everyrank.audit.finding import Findings
from everyrank.relations.samples import judge_equal_tensors, judge_skipped_batches, samples_of_batch


def recording(*ranks: list[list[torch.Tensor]]) -> Any:
    """Return a recording of ranks that read these batches in one epoch of loader 0."""
    facts = {"training_loaders": [0], "loader_places": {0: "train.py:12"}}
    return SimpleNamespace(
        ranks=[SimpleNamespace(facts=facts, batches=[([0, 0], batch, 0) for batch in batches]) for batches in ranks]
    )


def batches(seed: int, mask_seed: int | None, rows: int = 4) -> list[list[torch.Tensor]]:
    """Return four batches of random samples, each with a tensor of masks.

    The masks are random with the seed `mask_seed`, or constant if it is None.
    """
    samples, masks = (torch.Generator().manual_seed(generator_seed or 0) for generator_seed in (seed, mask_seed))
    constant_mask = torch.arange(6.0).expand(rows, 6)
    return [
        [
            torch.randn(rows, 6, generator=samples),
            torch.rand(rows, 6, generator=masks) if mask_seed is not None else constant_mask,
        ]
        for _ in range(4)
    ]


EQUAL_TENSORS_CASES = {
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


@pytest.mark.parametrize(
    ("first_rank", "second_rank", "rules"), EQUAL_TENSORS_CASES.values(), ids=list(EQUAL_TENSORS_CASES)
)
def test_random_tensor_that_is_equal_on_all_ranks_is_reported(
    first_rank: Any, second_rank: Any, rules: list[str]
) -> None:
    """Different samples with equal random masks mean that all ranks have the same seed."""
    findings = Findings()
    judge_equal_tensors(recording(first_rank, second_rank), findings)
    assert [finding.rule for finding in findings] == rules


def test_images_without_objects_have_no_rows_to_compare() -> None:
    """The boxes of an image without objects are a tensor without rows."""
    findings = Findings()
    ranks = [[[torch.zeros(0, 4), *tensors] for tensors in batches(seed, 7)] for seed in (1, 2)]
    judge_equal_tensors(recording(*ranks), findings)
    assert [finding.rule for finding in findings] == ["random.equal-draws"]


def test_samples_in_bfloat16_are_identified() -> None:
    """numpy has no such type."""
    batch = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]], dtype=torch.bfloat16)
    first, second, third = samples_of_batch([torch.arange(3), batch])
    assert first == third != second
    assert samples_of_batch(batch.float()) == [zlib.crc32(row.numpy().tobytes()) for row in batch.float()]


def two_epochs(
    num_batches: int, skipped: int = 0, read_ahead: int = 0, ended: int = 2, trained: int | None = None
) -> Any:
    """Return the recording of two epochs of loader 0.

    Each batch has the number of backward calls before it was read.
    """
    trained = num_batches - skipped if trained is None else trained
    read_batches = [
        [0, epoch, epoch * trained + max(0, index - skipped - read_ahead), "train.py:12", 0]
        for epoch in range(2)
        for index in range(num_batches)
    ]
    return SimpleNamespace(
        facts={"read": read_batches, "read_to_end": [[0, epoch] for epoch in range(ended)], "backwards": 2 * trained}
    )


SKIPPED_BATCHES_CASES = {
    "two of eight": (two_epochs(8, skipped=2), "the first 2 batches"),
    "none": (two_epochs(8), None),
    "one read ahead": (two_epochs(8, read_ahead=1), None),
    "one of eight, and one read ahead": (two_epochs(8, skipped=1, read_ahead=1), "the first 1 batches"),
    "one read ahead, and passes that are left early": (two_epochs(8, read_ahead=1, ended=0, trained=7), None),
}


@pytest.mark.parametrize(("rank", "expected_text"), SKIPPED_BATCHES_CASES.values(), ids=list(SKIPPED_BATCHES_CASES))
def test_skipped_batches_are_reported(rank: Any, expected_text: str | None) -> None:
    """A batch that is prefetched is not a skipped batch."""
    findings = Findings()
    judge_skipped_batches(rank, findings)
    assert [finding.rule for finding in findings] == (["data.untrained"] if expected_text else [])
    assert expected_text is None or expected_text in findings[0].text
