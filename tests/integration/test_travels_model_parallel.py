"""Communication of one update under tensor, context, pipeline and hybrid layouts, as their headers describe it.

The expected counts are computed from the shapes of the model, the batch and the layout. A test fails if an update has
an operation that the header does not mention.
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
MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN  # elements of one block: attention and feed-forward
BLOCK = MATRICES + 2 * WIDTH  # with two norms
TIED = VOCABULARY * WIDTH  # embedding and head
OUTSIDE = TIED + WIDTH  # elements outside of the blocks: tied weight and last norm
NUM_OUTSIDE = 2  # parameters outside of the blocks
ALL = BLOCKS * BLOCK + OUTSIDE
SAMPLE = TOKENS * WIDTH  # elements of the activation of one sample

UPDATES_PER_EPOCH = 2  # 9 samples in batches of 7 and 2
MEASURED_UPDATE = 3  # the first update of the second epoch: DDP rebuilds its buckets in the second update
FULL_BATCH = 7  # samples of the measured update
MICRO = (2, 2, 2, 1)  # samples of its four micro-batches

Line = tuple[str, str, int, int]  # operation, group, count, bytes of each
Counts = list[tuple[str, str, int, int]]  # operation, group, count, total bytes


def add_up(*lines: Line) -> Counts:
    """Return the count and the total bytes of each operation and group."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for operation, group, count, size in lines:
        if count:
            counts[operation, group] += count
            sizes[operation, group] += count * size
    return [(*key, count, sizes[key]) for key, count in sorted(counts.items())]


def count_update(world: World, workload: Any, text: str, update: int) -> Counts:
    """Train and return all collectives and messages of one update; the first update is 1. Runs on each rank."""
    layout = parse_layout(text)
    train_data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    updates = run_updates(prepared, train_data, all_updates(update, UPDATES_PER_EPOCH))
    for _ in range(update - 1):
        next(updates)
    with CommCounter(prepared.mesh.group_axes()) as counter:
        next(updates)
    return [(row.op, row.group, row.count, row.bytes) for row in counter.collectives()]


def count_decoder(
    world: World, text: str, optimizer: str = "sgd", clip_norm: float | None = None, update: int = MEASURED_UPDATE
) -> Counts:
    return count_update(world, zoo.workload("decoder", optimizer, clip_norm=clip_norm), text, update)


def with_and_without_clipping(world: World, text: str) -> tuple[Counts, Counts]:
    """Return the counts with SGD, and with AdamW and clipping. The optimizer must not communicate."""
    return count_decoder(world, text), count_decoder(world, text, "adamw", 0.5)


def assert_communication(ranks: Any, text: str, expected: list[list[Line]], norm_group: str | None) -> None:
    """Assert that each rank has the `expected` lines, and with clip_norm also an all-reduce over `norm_group`."""
    plain, clipped = zip(*ranks(len(expected), with_and_without_clipping, text), strict=True)
    assert list(plain) == [add_up(*lines) for lines in expected]
    norm_lines: list[Line] = [("all_reduce", norm_group, 1, DOUBLE)] if norm_group else []
    assert list(clipped) == [add_up(*lines, *norm_lines) for lines in expected]


def split_evenly(total: int, count: int) -> list[int]:
    """Return the samples of each of `count` ranks or micro-batches."""
    return [total // count + (index < total % count) for index in range(count)]


def tensor_lines(samples: int, blocks: int = BLOCKS, is_last: bool = True) -> list[Line]:
    """Return the lines of tensor parallelism for one micro-batch of a stage. Only the last stage has the head."""
    forward = 1 + 2 * blocks  # the embedding, and the outputs of attention and feed-forward
    backward = 2 * blocks + is_last  # the inputs of attention and feed-forward, and of the head
    return [
        ("all_reduce", "tensor", forward + backward, samples * SAMPLE * FLOAT),
        ("all_reduce", "tensor", 3 * is_last, samples * TOKENS * FLOAT),  # the loss over a split vocabulary
    ]


def sequence_lines(samples: int, degree: int) -> list[Line]:
    """Return the lines with sequence=true, where activations between the split matrices are split as well."""
    splits = 1 + 2 * BLOCKS
    return [
        ("reduce_scatter", "tensor", 2 * splits, samples * SAMPLE * FLOAT),
        ("all_gather", "tensor", 2 * splits, samples * SAMPLE // degree * FLOAT),
        ("all_reduce", "tensor", 3, samples * TOKENS * FLOAT),
        ("all_reduce", "tensor", 2 * BLOCKS + 1, WIDTH * FLOAT),  # the gradients of the norms
    ]


def ring_lines(samples: int, count: int) -> list[Line]:
    """Return the messages of ring attention on N ranks.

    Keys and values are sent N-1 times in forward and N-1 times in backward, and their gradients N times.
    """
    passes = BLOCKS * ((count - 1) + (count - 1) + count)
    size = samples * 2 * SAMPLE // count * FLOAT
    return [("send", "context", passes, size), ("recv", "context", passes, size)]


def shard_lines(block: int, outside: int, degree: int, group: str) -> list[Line]:
    """Return the lines of FSDP: blocks are gathered twice, other parameters once, and all gradients are scattered."""
    return [
        ("all_gather", group, 2 * BLOCKS, block // degree * FLOAT),
        ("all_gather", group, 1, outside // degree * FLOAT),
        ("reduce_scatter", group, BLOCKS, block * FLOAT),
        ("reduce_scatter", group, 1, outside * FLOAT),
    ]


def pipeline_lines(rank: int, micro: list[int], stages: int = 2) -> list[Line]:
    """Return the messages of one of two pipeline ranks.

    Each stage but the last sends activations, and each stage but the first sends gradients.
    """
    local_stages = range(rank, stages, 2)
    sent = sum((stage < stages - 1) + (stage > 0) for stage in local_stages)
    return [
        (operation, "pipeline", sent, samples * SAMPLE * FLOAT) for operation in ("send", "recv") for samples in micro
    ]


def count_line(group: str) -> Line:
    """Return the all-reduce of the loss sum and the number of its terms."""
    return ("all_reduce", group, 1, 2 * DOUBLE)


def flags_line(group: str) -> Line:
    """Return the all-reduce of the loss sum, the count, and a flag for each parameter outside of the blocks."""
    return ("all_reduce", group, 1, (2 + NUM_OUTSIDE) * DOUBLE)


def test_tensor(ranks: Any) -> None:
    """Forward and backward have two all-reduces per block. Embedding and head have one each, and the loss has three."""
    assert_communication(ranks, "tensor", [tensor_lines(FULL_BATCH)] * 2, "tensor")


@pytest.mark.parametrize("count", [2, 4])
def test_tensor_with_sequence_parallelism(ranks: Any, count: int) -> None:
    """A reduce-scatter and an all-gather replace each all-reduce. An update sums the gradients of the norms once."""
    assert_communication(ranks, "tensor:sequence=true", [sequence_lines(FULL_BATCH, count)] * count, "tensor")


def test_tensor_with_gradient_accumulation(ranks: Any) -> None:
    """Each micro-batch has all operations."""
    expected = [line for samples in split_evenly(FULL_BATCH, 3) for line in tensor_lines(samples)]
    assert ranks(2, count_decoder, "tensor:accumulate=3") == [add_up(*expected)] * 2


def test_tensor_checks_replicated_gradients_in_the_first_update(ranks: Any) -> None:
    """An all-gather with one number for each parameter that is not split checks that its gradient is identical."""
    expected = add_up(*tensor_lines(7), ("all_gather", "tensor", 1, (2 * BLOCKS + 1) * DOUBLE))
    assert ranks(2, count_first_update) == [expected] * 2


def count_first_update(world: World) -> Counts:
    """Return the counts of the first update, without those of the check before it."""
    with mock.patch.object(ParallelModel, "call_once"):
        return count_decoder(world, "tensor", update=1)


class UncommonStyles(nn.Module):
    """A model for the styles that the decoder does not use: colwise without gather, colwise_gather, replicate_sum."""

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


UNCOMMON_PLAN = {"up": "colwise", "norm": "replicate_sum", "down": "rowwise", "head": "colwise_gather"}


def count_uncommon_styles(world: World, text: str) -> Counts:
    workload = zoo.workload("frozen", model=UncommonStyles, tensor_plan=UNCOMMON_PLAN, blocks=None, clip_norm=None)
    return count_update(world, workload, text, MEASURED_UPDATE)


def test_tensor_with_uncommon_styles(ranks: Any) -> None:
    """Each micro-batch sums the input gradients of colwise layers. The replicate_sum gradient is summed once."""
    for accumulate in (1, 3):
        expected: list[Line] = [("all_reduce", "tensor", 1, 2 * FLOAT)]  # the norm's weight
        for samples in split_evenly(FULL_BATCH, accumulate):
            expected += [
                ("all_reduce", "tensor", 1, samples * 6 * FLOAT),  # forward, of down
                ("all_gather", "tensor", 1, samples * 2 // 2 * FLOAT),  # forward, of head
                ("all_reduce", "tensor", 1, samples * 6 * FLOAT),  # backward, of head
                ("all_reduce", "tensor", 1, samples * 6 * FLOAT),  # backward, of up
            ]
        assert ranks(2, count_uncommon_styles, f"tensor:accumulate={accumulate}") == [add_up(*expected)] * 2


@pytest.mark.parametrize("count", [2, 4])
def test_context(ranks: Any, count: int) -> None:
    """The ring passes keys and values. One all-reduce has the gradients and the count, and clipping adds none."""
    expected = [*ring_lines(FULL_BATCH, count), ("all_reduce", "context", 1, (ALL + 2) * FLOAT)]
    assert_communication(ranks, "context", [expected] * count, None)


def test_context_with_gradient_accumulation(ranks: Any) -> None:
    """Each micro-batch has the messages of the ring. Gradients are reduced once."""
    expected = [line for samples in split_evenly(FULL_BATCH, 3) for line in ring_lines(samples, 2)]
    expected += [("all_reduce", "context", 1, (ALL + 2) * FLOAT)]
    assert ranks(2, count_decoder, "context:accumulate=3") == [add_up(*expected)] * 2


def test_context_ulysses(ranks: Any) -> None:
    """All-to-alls exchange query, key, value and output, and their gradients."""
    expected: list[Line] = [
        ("all_to_all", "context", 8 * BLOCKS, FULL_BATCH * SAMPLE // 2 * FLOAT),
        ("all_reduce", "context", 1, (ALL + 2) * FLOAT),
    ]
    assert_communication(ranks, "context:method=ulysses", [expected] * 2, None)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_pipeline(ranks: Any, schedule: str) -> None:
    """Stages send messages. All-reduces have the flags and the gradients of parameters outside of the blocks."""
    all_reduces = [flags_line("pipeline"), ("all_reduce", "pipeline", 1, OUTSIDE * FLOAT)]
    stages = 4 if schedule == "interleaved" else 2
    expected = [[*pipeline_lines(rank, list(MICRO), stages), *all_reduces] for rank in range(2)]
    assert_communication(ranks, f"pipeline:schedule={schedule}", expected, "pipeline")


def test_pipeline_sends_shapes_in_the_first_update(ranks: Any) -> None:
    """Two headers of ten numbers have the shapes of micro-batches with two samples and with one.

    Two more all-reduces check that forward runs the blocks in order, and whether the loss needs the whole batch
    (`everyrank.gather`).
    """
    all_reduces = [flags_line("pipeline"), ("all_reduce", "pipeline", 1, OUTSIDE * FLOAT)]
    all_reduces += [("all_reduce", "pipeline", 2, 8)]
    expected = [
        add_up(*pipeline_lines(rank, list(MICRO)), *all_reduces, (operation, "pipeline", 2, 10 * 8))
        for rank, operation in enumerate(("send", "recv"))
    ]
    assert ranks(2, count_decoder, "pipeline", "sgd", None, 1) == expected


def test_pipeline_tensor(ranks: Any) -> None:
    """Both stages use the embedding. Only the last one has the head. Each tensor rank reduces its shard of the tie."""
    outside = TIED // 2 + WIDTH
    all_reduces = [flags_line("pipeline x tensor"), ("all_reduce", "pipeline", 1, outside * FLOAT)]
    expected = [
        [
            *pipeline_lines(rank // 2, list(MICRO)),
            *(line for samples in MICRO for line in tensor_lines(samples, BLOCKS // 2, is_last=rank >= 2)),
            *all_reduces,
        ]
        for rank in range(4)
    ]
    assert_communication(ranks, "pipeline:tensor=2", expected, "pipeline x tensor")


def test_pipeline_shard(ranks: Any) -> None:
    """Each micro-batch gathers and scatters the blocks. Parameters outside of them are not sharded."""
    stage_blocks = BLOCKS // 2
    expected = [
        [
            *pipeline_lines(rank // 2, [1] * len(MICRO)),  # two ranks with one sample each, or a dummy sample
            ("all_gather", "shard", 2 * stage_blocks * len(MICRO), BLOCK // 2 * FLOAT),
            ("reduce_scatter", "shard", stage_blocks * len(MICRO), BLOCK * FLOAT),
            flags_line("pipeline x shard"),
            ("all_reduce", "pipeline x shard", 1, OUTSIDE * FLOAT),
        ]
        for rank in range(4)
    ]
    assert_communication(ranks, "pipeline:shard=2", expected, "pipeline x shard")


def test_pipeline_replicate(ranks: Any) -> None:
    """The gradients of the blocks are reduced over the replicas."""
    expected = [
        [
            *pipeline_lines(rank // 2, [1] * len(MICRO)),
            ("all_reduce", "replicate", 1, BLOCKS // 2 * BLOCK * FLOAT),
            flags_line("pipeline x replicate"),
            ("all_reduce", "pipeline x replicate", 1, OUTSIDE * FLOAT),
        ]
        for rank in range(4)
    ]
    assert_communication(ranks, "pipeline:replicate=2", expected, "pipeline x replicate")


def replica_lines(block: int, outside: int, degree: int, group: str = "replicate") -> list[Line]:
    """Return the all-reduces over the replicas, one for the output of each reduce-scatter."""
    return [
        ("all_reduce", group, BLOCKS, block // degree * FLOAT),
        ("all_reduce", group, 1, outside // degree * FLOAT),
    ]


def test_fsdp_replicate(ranks: Any) -> None:
    """Shards gather parameters and scatter gradients. Replicas all-reduce each gradient shard."""
    expected = [
        *shard_lines(BLOCK, OUTSIDE, 2, "shard"),
        *replica_lines(BLOCK, OUTSIDE, 2),
        count_line("replicate x shard"),
    ]
    assert_communication(ranks, "fsdp:replicate=2", [expected] * 4, "replicate x shard")


def test_fsdp_replicate_with_gradient_accumulation(ranks: Any) -> None:
    """Shards communicate in each micro-batch, replicas once per update."""
    shards = shard_lines(BLOCK, OUTSIDE, 2, "shard")
    expected = [*shards, *shards, *replica_lines(BLOCK, OUTSIDE, 2), count_line("replicate x shard")]
    assert ranks(4, count_decoder, "fsdp:replicate=2,accumulate=2") == [add_up(*expected)] * 4


def tensor_shard_elements(matrices: int, norms: int) -> int:
    """Return the elements that each of two tensor ranks has."""
    return matrices // 2 + norms


def test_fsdp_tensor(ranks: Any) -> None:
    """FSDP shards the tensor shards of the matrices. Tensor ranks reduce activations."""
    block, outside = tensor_shard_elements(MATRICES, 2 * WIDTH), tensor_shard_elements(TIED, WIDTH)
    expected = [
        [*shard_lines(block, outside, 2, "shard"), *tensor_lines(samples), count_line("shard x tensor")]
        for samples in split_evenly(FULL_BATCH, 2)
        for _ in range(2)
    ]
    assert_communication(ranks, "fsdp:tensor=2", expected, "shard x tensor")


def test_fsdp_tensor_with_sequence_parallelism(ranks: Any) -> None:
    """The activations between the split matrices are split as well."""
    block, outside = tensor_shard_elements(MATRICES, 2 * WIDTH), tensor_shard_elements(TIED, WIDTH)
    expected = [
        [*shard_lines(block, outside, 2, "shard"), *sequence_lines(samples, 2), count_line("shard x tensor")]
        for samples in split_evenly(FULL_BATCH, 2)
        for _ in range(2)
    ]
    assert_communication(ranks, "fsdp:tensor=2,sequence=true", expected, "shard x tensor")


def test_fsdp_context(ranks: Any) -> None:
    """FSDP also shards parameters over the ranks of one sequence."""
    group = "shard x context"
    expected = [
        [*shard_lines(BLOCK, OUTSIDE, 4, group), *ring_lines(samples, 2), count_line(group)]
        for samples in split_evenly(FULL_BATCH, 2)
        for _ in range(2)
    ]
    assert_communication(ranks, "fsdp:context=2", expected, group)


def test_fsdp_replicate_context(ranks: Any) -> None:
    """Only the context axis shards the parameters, so FSDP uses its group."""
    expected = [
        [
            *shard_lines(BLOCK, OUTSIDE, 2, "context"),
            *replica_lines(BLOCK, OUTSIDE, 2),
            *ring_lines(samples, 2),
            count_line("replicate x context"),
        ]
        for samples in split_evenly(FULL_BATCH, 2)
        for _ in range(2)
    ]
    assert_communication(ranks, "fsdp:replicate=2,shard=1,context=2", expected, "replicate x context")


def test_ddp_tensor(ranks: Any) -> None:
    """Each block has one all-reduce over the replicas of a tensor shard. There are no gathers and scatters."""
    block, outside = tensor_shard_elements(MATRICES, 2 * WIDTH), tensor_shard_elements(TIED, WIDTH)
    expected = [
        [*replica_lines(block, outside, 1), *tensor_lines(samples), count_line("replicate x tensor")]
        for samples in split_evenly(FULL_BATCH, 2)
        for _ in range(2)
    ]
    assert_communication(ranks, "ddp:tensor=2", expected, "replicate x tensor")


def test_ddp_context(ranks: Any) -> None:
    """One all-reduce covers all ranks, because the ranks of one sequence also have the same parameters."""
    expected = [
        [*ring_lines(samples, 2), ("all_reduce", "replicate x context", 1, (ALL + 2) * FLOAT)]
        for samples in split_evenly(FULL_BATCH, 2)
        for _ in range(2)
    ]
    assert_communication(ranks, "ddp:context=2", expected, None)
