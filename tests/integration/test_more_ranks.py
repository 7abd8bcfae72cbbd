"""Equivalence checks that take more ranks or more time than the rest of the suite has.

SGD detects every mutation (test_mutations_model_parallel.py). The state of AdamW is split like the parameters, so AdamW
runs only under layouts that split this state in different ways.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

import zoo
from parity.test_equal import COMPILED, assert_equal, in_float64, parities
from parity.test_model_parallel import SMALL

CUBES = ["pipeline:shard=2,tensor=2", "fsdp:tensor=2,context=2", "fsdp:replicate=2,tensor=2"]


def test_layouts_with_three_axes_are_equal_on_eight_ranks(ranks: Any) -> None:
    """Each layout has three axes of two ranks, in float64."""
    layouts = in_float64(CUBES)
    assert_equal(layouts, parities(ranks, 8, "decoder", "sgd", layouts))


def test_layouts_of_four_ranks_are_equal(ranks: Any) -> None:
    """SGD runs in float64. Other tests compare float32 on two ranks, and bf16 and fp16 on four."""
    layouts = in_float64(SMALL[4])
    assert_equal(layouts, parities(ranks, 4, "decoder", "sgd", layouts))


def test_adamw_is_equal_in_float64_and_float32(ranks: Any) -> None:
    """In the layout's precision, losses must be within the spread of perturbed runs of `single`.

    There is one layout for each way to split the optimizer state. SGD runs under all of `SMALL[2]`.
    """
    layouts = ["tensor", "pipeline:schedule=interleaved,accumulate=2", "fsdp:tensor=2", "fsdp:context=2"]
    assert_equal(layouts, parities(ranks, 2, "decoder", "adamw", layouts))


def test_adamw_is_equal_on_four_ranks(ranks: Any) -> None:
    """The optimizer state is split over one or two axes, like the parameters."""
    layouts = in_float64(["tensor", "pipeline:replicate=2", "pipeline:shard=2", "fsdp:replicate=2", "fsdp:tensor=2"])
    assert_equal(layouts, parities(ranks, 4, "decoder", "adamw", layouts))


def test_pipeline_schedules_are_equal_on_four_stages(ranks: Any) -> None:
    """Each schedule runs with four and with eight micro-batches."""
    layouts = [
        f"pipeline:schedule={schedule},microbatches={number},precision=float64"
        for schedule in ("gpipe", "1f1b", "zero-bubble")
        for number in (4, 8)
    ]
    assert_equal(layouts, parities(ranks, 4, "decoder", "adamw", layouts, global_batch=16))


def test_low_precision_of_shards_is_equal(ranks: Any) -> None:
    """FSDP gathers parameters in bf16 or fp16, over two axes and within pipeline stages."""
    layouts = ["fsdp:tensor=2,precision=bf16", "pipeline:shard=2,precision=bf16", "fsdp:context=2,precision=fp16"]
    assert_equal(layouts, parities(ranks, 4, "decoder", "sgd", layouts, steps=4, epochs=None))


@pytest.mark.timeout(450)
def test_compiled_tensor_layout_with_dropout_is_equal(ranks: Any) -> None:
    """torch.compile supports split matrices, and the dropout masks are those of a graph that is not compiled.

    One block is enough, because all compile in the same way.
    """
    layouts, model = ["tensor:compile,precision=float64"], functools.partial(zoo.decoder_with_dropout, num_blocks=1)
    assert_equal(layouts, parities(ranks, 2, "decoder", "sgd", layouts, **COMPILED, model=model))
