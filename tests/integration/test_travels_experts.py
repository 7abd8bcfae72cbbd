"""What the headers of expert, ddp and fsdp say of mixtures of experts, against every count of one update.

How many rows a rank gets depends on what the tokens choose; all ranks together get as many as all of them send.
"""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from everyrank.world import World
from integration.test_travels_model_parallel import DOUBLE, FLOAT, SIXTH, Counts, Line, counted, ledger, parts

# the zoo's decoder with experts
BLOCKS, WIDTH, HIDDEN, VOCABULARY, TOKENS, EXPERTS, TOP_K = 2, 16, 24, 12, 8, 4, 2
ROUTER = EXPERTS * WIDTH
BLOCK = 4 * WIDTH * WIDTH + 2 * WIDTH + ROUTER  # without its experts
EXPERT = 3 * WIDTH * HIDDEN
OUTSIDE = VOCABULARY * WIDTH + WIDTH
DENSE = BLOCKS * BLOCK + OUTSIDE
ROW = WIDTH * FLOAT


def of_experts(world: World, text: str, clip_norm: float | None = None) -> Counts:
    return counted(world, zoo.workload("experts", clip_norm=clip_norm), text, 6)


def assert_travels(ranks: Any, text: str, count: int, others: list[Line], micro_batches: int = 1) -> None:
    """All-to-alls of `count` ranks by theory; and nothing but `others` beside them."""
    found = ranks(count, of_experts, text)
    sent = 0
    for rank, counts in enumerate(found):
        [(_, _, times, size)] = [line for line in counts if line[:2] == ("all_to_all", "expert")]
        assert times == 5 * BLOCKS * micro_batches  # how many go where; to the experts and back; the gradients of both
        rows = size - BLOCKS * micro_batches * EXPERTS * DOUBLE
        own = parts(SIXTH, count)[rank] if micro_batches == 1 else 0
        assert rows >= 2 * BLOCKS * own * TOKENS * TOP_K * ROW  # its own go out, and the gradients of what came back
        sent += rows
        assert [line for line in counts if line[0] != "all_to_all"] == ledger(*others)
    assert sent == 4 * BLOCKS * SIXTH * TOKENS * TOP_K * ROW


def test_expert(ranks: Any) -> None:
    """Gradients of all but the experts in one all-reduce with the count."""
    assert_travels(ranks, "expert", 2, [("all_reduce", "expert", 1, (DENSE + 2) * FLOAT)])


def test_clipping(ranks: Any) -> None:
    """One more all-reduce, of the sum of squares."""
    for counts in ranks(2, of_experts, "expert", 0.5):
        assert [line for line in counts if line[0] != "all_to_all"] == [
            ("all_reduce", "expert", 2, (DENSE + 2) * FLOAT + DOUBLE)
        ]


def test_accumulate(ranks: Any) -> None:
    """Tokens in each micro-batch, gradients once. Of 7 samples in micro-batches of 3, 2 and 2 no rank borrows one."""
    assert_travels(ranks, "expert:accumulate=3", 2, [("all_reduce", "expert", 1, (DENSE + 2) * FLOAT)], 3)


def test_replicas(ranks: Any) -> None:
    """Ranks that hold the same experts average those; all ranks average all else."""
    expected: list[Line] = [
        ("all_reduce", "replicate x expert", 1, (DENSE + 2) * FLOAT),
        ("all_reduce", "replicate", 1, BLOCKS * EXPERTS // 2 * EXPERT * FLOAT),
    ]
    assert_travels(ranks, "ddp:expert=2", 4, expected)


@pytest.mark.parametrize("count", [2, 4])
def test_shards(ranks: Any, count: int) -> None:
    """Experts are gathered from the ranks that hold the same ones, all else from all ranks."""
    own = BLOCKS * EXPERTS // 2 * EXPERT
    everyone = "shard x expert" if count > 2 else "expert"
    expected: list[Line] = [
        ("all_gather", everyone, 2 * BLOCKS, BLOCK // count * FLOAT),
        ("all_gather", everyone, 1, OUTSIDE // count * FLOAT),
        ("reduce_scatter", everyone, BLOCKS, BLOCK * FLOAT),
        ("reduce_scatter", everyone, 1, OUTSIDE * FLOAT),
        ("all_reduce", everyone, 1, 2 * DOUBLE),
    ]
    if count > 2:
        expected += [
            ("all_gather", "shard", 2 * BLOCKS, own // BLOCKS // 2 * FLOAT),
            ("reduce_scatter", "shard", BLOCKS, own // BLOCKS * FLOAT),
        ]
    assert_travels(ranks, "fsdp:expert=2", count, expected)
