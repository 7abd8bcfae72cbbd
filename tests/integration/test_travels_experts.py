"""Communication of one update of a mixture of experts under expert, ddp and fsdp, as their headers describe it.

The number of rows that a rank receives depends on the router. The sum over all ranks is known.
"""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from everyrank.world import World
from integration.test_travels_model_parallel import (
    DOUBLE,
    FLOAT,
    FULL_BATCH,
    MEASURED_UPDATE,
    Counts,
    Line,
    add_up,
    count_update,
    split_evenly,
)

# the zoo's decoder with experts
BLOCKS, WIDTH, HIDDEN, VOCABULARY, TOKENS, EXPERTS, TOP_K = 2, 16, 24, 12, 8, 4, 2
ROUTER = EXPERTS * WIDTH
BLOCK = 4 * WIDTH * WIDTH + 2 * WIDTH + ROUTER  # without its experts
EXPERT = 3 * WIDTH * HIDDEN
OUTSIDE = VOCABULARY * WIDTH + WIDTH
DENSE = BLOCKS * BLOCK + OUTSIDE
ROW = WIDTH * FLOAT


def count_experts(world: World, text: str, clip_norm: float | None = None) -> Counts:
    return count_update(world, zoo.workload("experts", clip_norm=clip_norm), text, MEASURED_UPDATE)


def assert_communication(ranks: Any, text: str, count: int, others: list[Line], micro_batches: int = 1) -> None:
    """Assert that `count` ranks have the all-to-alls that theory predicts, and apart from these only `others`."""
    total_bytes = 0
    for rank, counts in enumerate(ranks(count, count_experts, text)):
        [(_, _, num_calls, num_bytes)] = [line for line in counts if line[:2] == ("all_to_all", "expert")]
        # the row counts, the tokens, the outputs of the experts, and the gradients of both
        assert num_calls == 5 * BLOCKS * micro_batches
        row_bytes = num_bytes - BLOCKS * micro_batches * EXPERTS * DOUBLE
        local_samples = split_evenly(FULL_BATCH, count)[rank] if micro_batches == 1 else 0
        # a rank sends at least its tokens, and the gradients of the outputs that it receives
        assert row_bytes >= 2 * BLOCKS * local_samples * TOKENS * TOP_K * ROW
        total_bytes += row_bytes
        assert [line for line in counts if line[0] != "all_to_all"] == add_up(*others)
    assert total_bytes == 4 * BLOCKS * FULL_BATCH * TOKENS * TOP_K * ROW


def test_expert(ranks: Any) -> None:
    """One all-reduce has the count and all gradients except those of the experts."""
    assert_communication(ranks, "expert", 2, [("all_reduce", "expert", 1, (DENSE + 2) * FLOAT)])


def test_clipping(ranks: Any) -> None:
    """Clipping adds an all-reduce of the sum of squares."""
    for counts in ranks(2, count_experts, "expert", 0.5):
        assert [line for line in counts if line[0] != "all_to_all"] == [
            ("all_reduce", "expert", 2, (DENSE + 2) * FLOAT + DOUBLE)
        ]


def test_gradient_accumulation(ranks: Any) -> None:
    """Each micro-batch sends tokens. Gradients are reduced once. Micro-batches of 3, 2 and 2 samples need no dummy."""
    assert_communication(ranks, "expert:accumulate=3", 2, [("all_reduce", "expert", 1, (DENSE + 2) * FLOAT)], 3)


def test_replicas(ranks: Any) -> None:
    """Ranks with the same experts average their gradients. All ranks average the other gradients."""
    expected: list[Line] = [
        ("all_reduce", "replicate x expert", 1, (DENSE + 2) * FLOAT),
        ("all_reduce", "replicate", 1, BLOCKS * EXPERTS // 2 * EXPERT * FLOAT),
    ]
    assert_communication(ranks, "ddp:expert=2", 4, expected)


@pytest.mark.parametrize("count", [2, 4])
def test_shards(ranks: Any, count: int) -> None:
    """Experts are sharded over the ranks with the same experts, other parameters over all ranks."""
    local_experts = BLOCKS * EXPERTS // 2 * EXPERT
    all_ranks = "shard x expert" if count > 2 else "expert"
    expected: list[Line] = [
        ("all_gather", all_ranks, 2 * BLOCKS, BLOCK // count * FLOAT),
        ("all_gather", all_ranks, 1, OUTSIDE // count * FLOAT),
        ("reduce_scatter", all_ranks, BLOCKS, BLOCK * FLOAT),
        ("reduce_scatter", all_ranks, 1, OUTSIDE * FLOAT),
        ("all_reduce", all_ranks, 1, 2 * DOUBLE),
    ]
    if count > 2:
        expected += [
            ("all_gather", "shard", 2 * BLOCKS, local_experts // BLOCKS // 2 * FLOAT),
            ("reduce_scatter", "shard", BLOCKS, local_experts // BLOCKS * FLOAT),
        ]
    assert_communication(ranks, "fsdp:expert=2", count, expected)
