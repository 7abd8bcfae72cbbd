"""What takes more ranks, or more minutes, than the rest of the suite has: four ranks, 2 x 2 x 2, AdamW, compiled.

SGD shows every mutation (test_mutations_model_parallel.py). AdamW adds state that is split as the parameters are, so it
runs where layouts differ in that.
"""

from __future__ import annotations

import functools
from typing import Any

import zoo
from parity.test_equal import assert_equal, in_float64, parities
from parity.test_model_parallel import SMALL

CUBES = ["pipeline:shard=2,tensor=2", "fsdp:tensor=2,context=2", "fsdp:replicate=2,tensor=2"]


def test_two_by_two_by_two(ranks: Any) -> None:
    """Three axes of two ranks each, in float64."""
    layouts = in_float64(CUBES)
    assert_equal(layouts, parities(ranks, 8, "decoder", "sgd", layouts))


def test_four_ranks(ranks: Any) -> None:
    """Every layout of four ranks under SGD; float32 is compared on two ranks, bf16 and fp16 on four below."""
    layouts = in_float64(SMALL[4])
    assert_equal(layouts, parities(ranks, 4, "decoder", "sgd", layouts))


def test_adamw_in_float32(ranks: Any) -> None:
    """In float64, and in the layouts' own precision within the band of perturbed runs of single.

    One layout for each way in which the state is split. SGD runs under all of `SMALL[2]`.
    """
    layouts = ["tensor", "pipeline:schedule=interleaved,accumulate=2", "fsdp:tensor=2", "fsdp:context=2"]
    assert_equal(layouts, parities(ranks, 2, "decoder", "adamw", layouts))


def test_adamw_on_four_ranks(ranks: Any) -> None:
    """Its state is split over each axis, and over two of them, as the parameters are."""
    layouts = in_float64(["tensor", "pipeline:replicate=2", "pipeline:shard=2", "fsdp:replicate=2", "fsdp:tensor=2"])
    assert_equal(layouts, parities(ranks, 4, "decoder", "adamw", layouts))


def test_four_stages_and_eight_micro_batches(ranks: Any) -> None:
    """All schedules on four stages, with four and with eight micro-batches."""
    layouts = [
        f"pipeline:schedule={schedule},microbatches={number},precision=float64"
        for schedule in ("gpipe", "1f1b", "zero-bubble")
        for number in (4, 8)
    ]
    assert_equal(layouts, parities(ranks, 4, "decoder", "adamw", layouts, global_batch=16))


def test_low_precision_of_shards(ranks: Any) -> None:
    """Parameters gathered in bf16, over two axes and within stages."""
    layouts = ["fsdp:tensor=2,precision=bf16", "pipeline:shard=2,precision=bf16", "fsdp:context=2,precision=fp16"]
    assert_equal(layouts, parities(ranks, 4, "decoder", "sgd", layouts, steps=4, epochs=None))


def test_compiled(ranks: Any) -> None:
    """torch.compile changes no mathematics around split matrices. One block is enough: each is compiled alike."""
    layouts = ["tensor:compile,precision=float64"]
    model = functools.partial(zoo.decoder, num_blocks=1)
    assert_equal(layouts, parities(ranks, 2, "decoder", "sgd", layouts, steps=2, epochs=None, model=model))
