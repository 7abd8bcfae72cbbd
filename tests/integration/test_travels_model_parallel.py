"""What the headers of tensor, context, pipeline and the hybrids say of what travels, against every count of one update.

The numbers on the right are computed here from the shape of the model, the batch and the layout, as the header of the
strategy has it. Nothing is left out: an operation that no header mentions fails its test.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zoo
from everyrank import parse_layout
from everyrank.benchmark.comm_counter import CommCounter
from everyrank.data import all_updates
from everyrank.loop import open_data, run_updates
from everyrank.parallel.parallelize import ParallelModel
from everyrank.strategies import prepare
from everyrank.world import World

FLOAT, DOUBLE = 4, 8

# the zoo's decoder
BLOCKS, WIDTH, HIDDEN, VOCABULARY, TOKENS = 4, 16, 24, 12, 8
MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN  # of one block: attention and feed
BLOCK = MATRICES + 2 * WIDTH  # with two norms
TIED = VOCABULARY * WIDTH  # embedding and head
OUTSIDE = TIED + WIDTH  # of the blocks: with the last norm
NUM_OUTSIDE = 2
ALL = BLOCKS * BLOCK + OUTSIDE
SAMPLE = TOKENS * WIDTH  # elements of one sample between two blocks

PER_EPOCH, LENGTH = 4, 23  # updates; samples: an epoch has batches of 7, 7, 7 and 2
SIXTH = 7  # samples of the sixth update
MICRO = (2, 2, 2, 1)  # its samples in four micro-batches

Line = tuple[str, str, int, int]  # operation, group, how often, bytes of one
Counts = list[tuple[str, str, int, int]]  # operation, group, count, bytes of all


def ledger(*lines: Line) -> Counts:
    """What the lines come to, by operation and group."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for operation, group, times, size in lines:
        if times:
            counts[operation, group] += times
            sizes[operation, group] += times * size
    return [(*key, count, sizes[key]) for key, count in sorted(counts.items())]


def counted(world: World, workload: Any, text: str, update: int) -> Counts:
    """Every collective and message of one update (from 1), in the ranks."""
    layout = parse_layout(text)
    train_data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    shares = run_updates(prepared, train_data, all_updates(update, PER_EPOCH))
    for _ in range(update - 1):
        next(shares)
    with CommCounter(prepared.mesh.group_axes()) as traffic:
        next(shares)
    return [(c.op, c.group, c.count, c.bytes) for c in traffic.collectives()]


def of_decoder(
    world: World, text: str, optimizer: str = "sgd", clip_norm: float | None = None, update: int = 6
) -> Counts:
    return counted(world, zoo.workload("decoder", optimizer, clip_norm=clip_norm), text, update)


def with_and_without_clipping(world: World, text: str) -> tuple[Counts, Counts]:
    """The second with another optimizer, too: neither is to send anything by itself."""
    return of_decoder(world, text), of_decoder(world, text, "adamw", 0.5)


def assert_travels(ranks: Any, text: str, expected: list[list[Line]], squares: str | None) -> None:
    """Each rank sends what `expected` says; with clip_norm, the squares of the gradients over `squares`, too."""
    plain, clipped = zip(*ranks(len(expected), with_and_without_clipping, text), strict=True)
    assert list(plain) == [ledger(*lines) for lines in expected]
    more: list[Line] = [("all_reduce", squares, 1, DOUBLE)] if squares else []
    assert list(clipped) == [ledger(*lines, *more) for lines in expected]


def parts(total: int, ranks: int) -> list[int]:
    """Samples of each of the ranks that read."""
    return [total // ranks + (index < total % ranks) for index in range(ranks)]


def tensor_lines(samples: int, blocks: int = BLOCKS, is_last: bool = True) -> list[Line]:
    """What splitting matrices sends for one micro-batch; of a stage: with these blocks, with the head or without."""
    forward = 1 + 2 * blocks  # the embedding, and of each block what adds to the stream
    backward = 2 * blocks + is_last  # of each block what takes from it; the head
    return [
        ("all_reduce", "tensor", forward + backward, samples * SAMPLE * FLOAT),
        ("all_reduce", "tensor", 3 * is_last, samples * TOKENS * FLOAT),  # the loss over a split vocabulary
    ]


def sequence_lines(samples: int, degree: int) -> list[Line]:
    """The same where the activations between the split matrices are split, too; and an update's norms."""
    splits = 1 + 2 * BLOCKS
    return [
        ("reduce_scatter", "tensor", 2 * splits, samples * SAMPLE * FLOAT),
        ("all_gather", "tensor", 2 * splits, samples * SAMPLE // degree * FLOAT),
        ("all_reduce", "tensor", 3, samples * TOKENS * FLOAT),
        ("all_reduce", "tensor", 2 * BLOCKS + 1, WIDTH * FLOAT),
    ]


def ring_lines(samples: int, count: int) -> list[Line]:
    """Keys and values, N-1 times forward and N-1 times backward, and N times their gradients."""
    passes = BLOCKS * ((count - 1) + (count - 1) + count)
    size = samples * 2 * SAMPLE // count * FLOAT
    return [("send", "context", passes, size), ("recv", "context", passes, size)]


def shard_lines(block: int, outside: int, degree: int, group: str) -> list[Line]:
    """Gathers of blocks twice and of the rest once, scatters of all gradients."""
    return [
        ("all_gather", group, 2 * BLOCKS, block // degree * FLOAT),
        ("all_gather", group, 1, outside // degree * FLOAT),
        ("reduce_scatter", group, BLOCKS, block * FLOAT),
        ("reduce_scatter", group, 1, outside * FLOAT),
    ]


def pipe_lines(rank: int, micro: list[int], stages: int = 2) -> list[Line]:
    """A message forward out of each stage but the last, and one backward out of each but the first, with 2 ranks."""
    own = range(rank, stages, 2)
    sent = sum((stage < stages - 1) + (stage > 0) for stage in own)
    return [(way, "pipeline", sent, samples * SAMPLE * FLOAT) for way in ("send", "recv") for samples in micro]


def count_line(group: str) -> Line:
    """Loss and count of terms."""
    return ("all_reduce", group, 1, 2 * DOUBLE)


def flags_line(group: str) -> Line:
    """Loss, count, and a flag for each parameter outside of the blocks."""
    return ("all_reduce", group, 1, (2 + NUM_OUTSIDE) * DOUBLE)


def test_tensor(ranks: Any) -> None:
    """Two all-reduces a block each way, one each for embedding and head, three small ones for the loss."""
    assert_travels(ranks, "tensor", [tensor_lines(SIXTH)] * 2, "tensor")


@pytest.mark.parametrize("count", [2, 4])
def test_tensor_by_sequence(ranks: Any, count: int) -> None:
    """A reduce-scatter and an all-gather in place of each all-reduce; the norms' gradients once an update."""
    assert_travels(ranks, "tensor:sequence=true", [sequence_lines(SIXTH, count)] * count, "tensor")


def test_tensor_accumulate(ranks: Any) -> None:
    """All of that for each micro-batch."""
    expected = [line for samples in parts(SIXTH, 3) for line in tensor_lines(samples)]
    assert ranks(2, of_decoder, "tensor:accumulate=3") == [ledger(*expected)] * 2


def test_tensor_looks_once(ranks: Any) -> None:
    """In the first update, one number for each parameter that is not split: is its gradient the same everywhere?"""
    expected = ledger(*tensor_lines(7), ("all_gather", "tensor", 1, (2 * BLOCKS + 1) * DOUBLE))
    assert ranks(2, of_first_update) == [expected] * 2


def of_first_update(world: World) -> Counts:
    """What travels in it, without the check before the first update before it."""
    with mock.patch.object(ParallelModel, "before_first_update"):
        return of_decoder(world, "tensor", update=1)


class Other(nn.Module):
    """What the decoder has not: colwise without gather, colwise_gather, replicate_sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.up = nn.Linear(6, 8)
        self.norm = nn.RMSNorm(2, eps=1e-5)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, values: Tensor) -> Tensor:
        values = torch.tanh(self.stem(values))
        heads = self.norm(torch.tanh(self.up(values)).unflatten(-1, (-1, 2)))
        return self.head(torch.tanh(self.down(heads.flatten(-2))))


OTHER_PLAN = {"up": "colwise", "norm": "replicate_sum", "down": "rowwise", "head": "colwise_gather"}


def of_other(world: World, text: str) -> Counts:
    workload = zoo.workload("frozen", model=Other, tensor_plan=OTHER_PLAN, blocks=None, clip_norm=None)
    return counted(world, workload, text, 6)


def test_tensor_other_words(ranks: Any) -> None:
    """A colwise layer's input is added up, a gathered output gathered, a replicate_sum's gradient added up once."""
    for accumulate in (1, 3):
        expected: list[Line] = [("all_reduce", "tensor", 1, 2 * FLOAT)]  # the norm's weight
        for samples in parts(SIXTH, accumulate):
            expected += [
                ("all_reduce", "tensor", 1, samples * 6 * FLOAT),  # forward, of down
                ("all_gather", "tensor", 1, samples * 2 // 2 * FLOAT),  # forward, of head
                ("all_reduce", "tensor", 1, samples * 6 * FLOAT),  # backward, of head
                ("all_reduce", "tensor", 1, samples * 6 * FLOAT),  # backward, of up
            ]
        assert ranks(2, of_other, f"tensor:accumulate={accumulate}") == [ledger(*expected)] * 2


@pytest.mark.parametrize("count", [2, 4])
def test_context(ranks: Any, count: int) -> None:
    """Keys and values round the ring; gradients and the count in one all-reduce, which clipping needs no other for."""
    expected = [*ring_lines(SIXTH, count), ("all_reduce", "context", 1, (ALL + 2) * FLOAT)]
    assert_travels(ranks, "context", [expected] * count, None)


def test_context_accumulate(ranks: Any) -> None:
    """The ring for each micro-batch, gradients once."""
    expected = [line for samples in parts(SIXTH, 3) for line in ring_lines(samples, 2)]
    expected += [("all_reduce", "context", 1, (ALL + 2) * FLOAT)]
    assert ranks(2, of_decoder, "context:accumulate=3") == [ledger(*expected)] * 2


def test_context_ulysses(ranks: Any) -> None:
    """Query, key, value and output, each way."""
    expected: list[Line] = [
        ("all_to_all", "context", 8 * BLOCKS, SIXTH * SAMPLE // 2 * FLOAT),
        ("all_reduce", "context", 1, (ALL + 2) * FLOAT),
    ]
    assert_travels(ranks, "context:method=ulysses", [expected] * 2, None)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_pipeline(ranks: Any, schedule: str) -> None:
    """Messages between stages; of the rest, flags and the gradients of what is outside the blocks."""
    rest = [flags_line("pipeline"), ("all_reduce", "pipeline", 1, OUTSIDE * FLOAT)]
    stages = 4 if schedule == "interleaved" else 2
    expected = [[*pipe_lines(rank, list(MICRO), stages), *rest] for rank in range(2)]
    assert_travels(ranks, f"pipeline:schedule={schedule}", expected, "pipeline")


def test_pipeline_says_shapes_once(ranks: Any) -> None:
    """In the first update two headers of ten numbers go forward: micro-batches have two samples, or one.

    And all ranks hear from each other whether the forward pass goes through the blocks in order, and from the last one
    whether its loss asks for more than its micro-batch (`everyrank.gather`).
    """
    rest = [flags_line("pipeline"), ("all_reduce", "pipeline", 1, OUTSIDE * FLOAT)]
    rest += [("all_reduce", "pipeline", 2, 8)]
    expected = [
        ledger(*pipe_lines(rank, list(MICRO)), *rest, (way, "pipeline", 2, 10 * 8))
        for rank, way in enumerate(("send", "recv"))
    ]
    assert ranks(2, of_decoder, "pipeline", "sgd", None, 1) == expected


def test_pipeline_tensor(ranks: Any) -> None:
    """Both stages look up the embedding, the last one has the head and the loss; outside gradients go in parts."""
    outside = TIED // 2 + WIDTH
    rest = [flags_line("pipeline x tensor"), ("all_reduce", "pipeline", 1, outside * FLOAT)]
    expected = [
        [
            *pipe_lines(rank // 2, list(MICRO)),
            *(line for samples in MICRO for line in tensor_lines(samples, BLOCKS // 2, is_last=rank >= 2)),
            *rest,
        ]
        for rank in range(4)
    ]
    assert_travels(ranks, "pipeline:tensor=2", expected, "pipeline x tensor")


def test_pipeline_shard(ranks: Any) -> None:
    """Blocks are gathered and scattered for each micro-batch; what is outside of them is not sharded."""
    own = BLOCKS // 2
    expected = [
        [
            *pipe_lines(rank // 2, [1] * len(MICRO)),  # two samples on two readers; of one sample, one is borrowed
            ("all_gather", "shard", 2 * own * len(MICRO), BLOCK // 2 * FLOAT),
            ("reduce_scatter", "shard", own * len(MICRO), BLOCK * FLOAT),
            flags_line("pipeline x shard"),
            ("all_reduce", "pipeline x shard", 1, OUTSIDE * FLOAT),
        ]
        for rank in range(4)
    ]
    assert_travels(ranks, "pipeline:shard=2", expected, "pipeline x shard")


def test_pipeline_replicate(ranks: Any) -> None:
    """The blocks' gradients go over the replicas."""
    expected = [
        [
            *pipe_lines(rank // 2, [1] * len(MICRO)),
            ("all_reduce", "replicate", 1, BLOCKS // 2 * BLOCK * FLOAT),
            flags_line("pipeline x replicate"),
            ("all_reduce", "pipeline x replicate", 1, OUTSIDE * FLOAT),
        ]
        for rank in range(4)
    ]
    assert_travels(ranks, "pipeline:replicate=2", expected, "pipeline x replicate")


def replica_lines(block: int, outside: int, degree: int, group: str = "replicate") -> list[Line]:
    """An all-reduce over the replicas of each part that a reduce-scatter leaves."""
    return [
        ("all_reduce", group, BLOCKS, block // degree * FLOAT),
        ("all_reduce", group, 1, outside // degree * FLOAT),
    ]


def test_fsdp_replicate(ranks: Any) -> None:
    """Gathers and scatters among the shards, an all-reduce of each part over the replicas."""
    expected = [
        *shard_lines(BLOCK, OUTSIDE, 2, "shard"),
        *replica_lines(BLOCK, OUTSIDE, 2),
        count_line("replicate x shard"),
    ]
    assert_travels(ranks, "fsdp:replicate=2", [expected] * 4, "replicate x shard")


def test_fsdp_replicate_accumulate(ranks: Any) -> None:
    """Among the shards all of that for each micro-batch; over the replicas once, as the count."""
    shards = shard_lines(BLOCK, OUTSIDE, 2, "shard")
    expected = [*shards, *shards, *replica_lines(BLOCK, OUTSIDE, 2), count_line("replicate x shard")]
    assert ranks(4, of_decoder, "fsdp:replicate=2,accumulate=2") == [ledger(*expected)] * 4


def half_split(matrices: int, norms: int) -> int:
    """Elements that one of two tensor ranks has."""
    return matrices // 2 + norms


def test_fsdp_tensor(ranks: Any) -> None:
    """Halves of the matrices are sharded, each with its neighbours; activations go between tensor ranks."""
    block, outside = half_split(MATRICES, 2 * WIDTH), half_split(TIED, WIDTH)
    expected = [
        [*shard_lines(block, outside, 2, "shard"), *tensor_lines(samples), count_line("shard x tensor")]
        for samples in parts(SIXTH, 2)
        for _ in range(2)
    ]
    assert_travels(ranks, "fsdp:tensor=2", expected, "shard x tensor")


def test_fsdp_tensor_by_sequence(ranks: Any) -> None:
    """The same with the activations split."""
    block, outside = half_split(MATRICES, 2 * WIDTH), half_split(TIED, WIDTH)
    expected = [
        [*shard_lines(block, outside, 2, "shard"), *sequence_lines(samples, 2), count_line("shard x tensor")]
        for samples in parts(SIXTH, 2)
        for _ in range(2)
    ]
    assert_travels(ranks, "fsdp:tensor=2,sequence=true", expected, "shard x tensor")


def test_fsdp_context(ranks: Any) -> None:
    """Parameters are sharded over the ranks that share a sequence, too."""
    group = "shard x context"
    expected = [
        [*shard_lines(BLOCK, OUTSIDE, 4, group), *ring_lines(samples, 2), count_line(group)]
        for samples in parts(SIXTH, 2)
        for _ in range(2)
    ]
    assert_travels(ranks, "fsdp:context=2", expected, group)


def test_fsdp_replicate_context(ranks: Any) -> None:
    """The axis along which parameters lie in shards is named for what it is."""
    expected = [
        [
            *shard_lines(BLOCK, OUTSIDE, 2, "context"),
            *replica_lines(BLOCK, OUTSIDE, 2),
            *ring_lines(samples, 2),
            count_line("replicate x context"),
        ]
        for samples in parts(SIXTH, 2)
        for _ in range(2)
    ]
    assert_travels(ranks, "fsdp:replicate=2,shard=1,context=2", expected, "replicate x context")


def test_ddp_tensor(ranks: Any) -> None:
    """Replicas of halves: an all-reduce for each block, in which gathers and scatters over one shard vanish."""
    block, outside = half_split(MATRICES, 2 * WIDTH), half_split(TIED, WIDTH)
    expected = [
        [*replica_lines(block, outside, 1), *tensor_lines(samples), count_line("replicate x tensor")]
        for samples in parts(SIXTH, 2)
        for _ in range(2)
    ]
    assert_travels(ranks, "ddp:tensor=2", expected, "replicate x tensor")


def test_ddp_context(ranks: Any) -> None:
    """One all-reduce over all ranks: those that share a sequence are replicas, too."""
    expected = [
        [*ring_lines(samples, 2), ("all_reduce", "replicate x context", 1, (ALL + 2) * FLOAT)]
        for samples in parts(SIXTH, 2)
        for _ in range(2)
    ]
    assert_travels(ranks, "ddp:context=2", expected, None)
