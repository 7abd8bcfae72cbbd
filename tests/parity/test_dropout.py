"""Dropout has the same masks under every layout as on one device. Parity detects each mistake in the masks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zoo
from everyrank import parse_layout
from everyrank.builtin.digits import workload as digits
from everyrank.data import Batch, Update
from everyrank.loop import open_data, run_updates
from everyrank.parallel.dropout.exact import DropoutSite, ExactDropout
from everyrank.parallel.dropout.masks import whole_dim
from everyrank.parity import ParityCase, check_layout, parity_case
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from parity.test_equal import assert_equal, parities

pytestmark = pytest.mark.integration

_COUNTER = iter(range(10**9))


def quick_case(world: World, name: str, steps: int = 4, **changes: Any) -> ParityCase:
    """Return a case of a few updates in float64, over more than one epoch."""
    workload = zoo.workload(name, "sgd", **changes)
    return parity_case(workload, *open_data(workload, world), steps=steps, is_quick=True)


def check_quickly(world: World, key: str, name: str, layouts: list[str], changes: dict[str, Any]) -> Any:
    """Return the parity of each layout. It runs in the ranks."""
    case = quick_case(world, name, **changes)
    assert any("dropout on" in note for note in case.notes)
    return [check_layout(case, parse_layout(text), world, f"{key}/{text}")[0] for text in layouts]


def assert_quickly_equal(ranks: Any, count: int, name: str, layouts: list[str], **changes: Any) -> None:
    """Assert that each layout is equal to one device in a quick check."""
    assert_equal(layouts, ranks(count, check_quickly, f"dropout/{next(_COUNTER)}", name, layouts, changes)[0])


def test_decoder_dropout_is_equal(ranks: Any) -> None:
    """Embeddings, residuals, split features and attention weights drop, by modules and by functions."""
    layouts = [
        "ddp:accumulate=3,recompute",
        "tensor:sequence=true,recompute",
        "context",
        "context:method=ulysses,recompute",
        "pipeline:schedule=interleaved,recompute",
    ]
    assert_quickly_equal(ranks, 2, "decoder", layouts, model=zoo.decoder_with_dropout_everywhere)


def test_dropout_in_blocks_is_equal(ranks: Any) -> None:
    """Some ranks have no sample, and some micro-batches have one."""
    layouts = ["ddp:accumulate=3", "fsdp", "zero1:accumulate=2,recompute"]
    assert_quickly_equal(ranks, 3, "frozen", layouts, model=zoo.DropoutModel, blocks="blocks")


def test_dropout_in_checkpoints_of_the_model_is_equal(ranks: Any) -> None:
    """A model that checkpoints its own blocks has the gradients of a model without checkpoints.

    F.dropout inside of such a checkpoint is refused.
    """
    checkpointed, expected = (ranks(1, gradients, model)[0] for model in (with_checkpoints, zoo.DropoutModel))
    assert checkpointed == expected
    with pytest.raises(AssertionError, match=r"dropout as a function inside torch.utils.checkpoint"):
        ranks(1, gradients, FunctionInCheckpoint)


def with_checkpoints() -> nn.Module:
    """Return a model that checkpoints its own blocks."""
    return zoo.DropoutModel(checkpoints=True)


class FunctionInCheckpoint(zoo.DropoutModel):
    """A model with F.dropout inside of an activation checkpoint."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.embedding(values)

        def block(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(self.blocks[0](values), 0.5, self.training)

        return self.head(zoo.checkpoint(block, values, use_reentrant=False))


def gradients(world: World, model: Callable[[], nn.Module]) -> list[list[float]]:
    """Return the gradient of each parameter after an update of `single`."""
    workload = zoo.workload("frozen", "sgd", model=model, blocks="blocks", clip_norm=None, steps=1, epochs=None)
    data, _ = open_data(workload, world)
    prepared = prepare(workload, parse_layout("single:precision=float64"), single_process_world(world))
    list(run_updates(prepared, data, [Update(0, 0, 0)]))
    return [p.grad.flatten().tolist() for p in prepared.trainable.parameters if p.grad is not None]


CUSTOM_PARALLELIZE = """\
from torch.nn.parallel import DistributedDataParallel
from everyrank import ParallelContract

contract = ParallelContract(axes={"shard": "batch"})


def parallelize(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("shard"))
"""


def test_dropout_under_custom_parallelize_is_equal(ranks: Any, tmp_path: Path) -> None:
    """A custom parallelize function gets a model whose dropout masks are those of one device."""
    (tmp_path / "own.py").write_text(CUSTOM_PARALLELIZE)
    layouts = [f"{tmp_path / 'own.py'}:shard=2"]
    assert_quickly_equal(ranks, 2, "frozen", layouts, model=zoo.DropoutModel, blocks="blocks")


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_convnet_dropout_is_equal(ranks: Any, norm: str) -> None:
    """The convnet drops whole channels and single elements. Batch norm is over all ranks."""
    results = ranks(2, check_convnet, norm, f"dropout/{next(_COUNTER)}")[0]
    assert_equal(["ddp", "fsdp:recompute"], results)


def check_convnet(world: World, norm: str, key: str) -> Any:
    """Return the parity of ddp and of fsdp with recomputation."""
    workload = digits(batch=16, norm=norm, dropout=0.1)
    case = parity_case(workload, *open_data(workload, world), steps=2, is_quick=True)
    return [check_layout(case, parse_layout(text), world, f"{key}/{text}")[0] for text in ("ddp", "fsdp:recompute")]


# --- mutations


def seeded_by_rank(world: World) -> Any:
    """Each rank has its own seed, as in code that wants different masks on different ranks."""
    original = ExactDropout.begin

    def begin(exact: ExactDropout, batch: Batch, *rest: Any) -> None:
        exact.seed += exact.mesh.world.rank
        original(exact, batch, *rest)
        exact.seed -= exact.mesh.world.rank

    return mock.patch.object(ExactDropout, "begin", begin)


def sample_forgotten(world: World) -> Any:
    """Samples are counted from 0 on every rank and in every micro-batch."""
    original = ExactDropout.begin

    def begin(exact: ExactDropout, batch: Batch, *rest: Any) -> None:
        original(exact, dataclasses.replace(batch, start=0, sample_indices=()), *rest)

    return mock.patch.object(ExactDropout, "begin", begin)


def update_forgotten(world: World) -> Any:
    """Every update has the same masks."""
    original = ExactDropout.begin

    def begin(exact: ExactDropout, *args: Any) -> None:
        exact.step = 0
        original(exact, *args)

    return mock.patch.object(ExactDropout, "begin", begin)


def call_count_only(world: World) -> Any:
    """Calls are counted over the whole forward pass. A pipeline stage runs only a part of it."""

    def module_key(exact: ExactDropout, site: DropoutSite) -> torch.Tensor:
        exact.scope.num_calls += 1
        return exact.scope.key + 12345 * exact.scope.num_calls

    return mock.patch.object(ExactDropout, "module_key", module_key)


def recompute_draws_anew(world: World) -> Any:
    """A recomputed block continues to count its calls, so it has different masks."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(ExactDropout, "back_at", return_value=contextlib.nullcontext()))
    stack.enter_context(mock.patch("everyrank.parallel.dropout.exact._is_in_backward", return_value=False))
    return stack


def positions_forgotten(world: World) -> Any:
    """Positions are counted from 0 in each part of a sequence."""
    original = ExactDropout.begin
    return mock.patch.object(ExactDropout, "begin", lambda exact, batch, *_: original(exact, batch))


def features_forgotten(world: World) -> Any:
    """Split features and heads are counted from 0 on each rank."""
    return mock.patch.object(ExactDropout, "features_here", lambda _, count, *__: whole_dim(count))


MUTATIONS = [
    (seeded_by_rank, "frozen", "ddp", zoo.DropoutModel),
    (sample_forgotten, "frozen", "ddp", zoo.DropoutModel),
    (sample_forgotten, "frozen", "single:accumulate=2", zoo.DropoutModel),
    (update_forgotten, "frozen", "ddp", zoo.DropoutModel),
    (call_count_only, "frozen", "pipeline", zoo.DropoutModel),
    (recompute_draws_anew, "frozen", "ddp:recompute", zoo.DropoutModel),
    (positions_forgotten, "decoder", "context", zoo.decoder_with_dropout),
    (features_forgotten, "decoder", "tensor", zoo.decoder_with_dropout_everywhere),
]


@pytest.mark.parametrize(("mutation", "name", "layout", "model"), MUTATIONS)
def test_mutation_of_dropout_is_detected(ranks: Any, mutation: Any, name: str, layout: str, model: Any) -> None:
    """The mutation affects only the layout. Its reference ran before."""
    before, after = ranks(2, check_mutation, mutation, name, layout, model, f"dropout/{next(_COUNTER)}")[0]
    assert (before, after) == ("equal", "different")


def check_mutation(world: World, mutation: Any, name: str, text: str, model: Any, key: str) -> tuple[str, str]:
    """Return (status without the mutation, status with the mutation)."""
    changes = {"blocks": "blocks"} if name == "frozen" else {}
    case, layout = quick_case(world, name, steps=2, model=model, **changes), parse_layout(text)
    before = check_layout(case, layout, world, f"{key}/before")[0].status
    with mutation(world):
        return before, check_layout(case, layout, world, f"{key}/after")[0].status


@pytest.mark.parametrize("count", [2, 4])
def test_decoder_dropout_is_equal_under_model_parallelism(ranks: Any, count: int) -> None:
    """The layouts are those of data and model parallelism, and their meshes."""
    layouts = {
        2: [
            "ddp",
            "zero1",
            "fsdp",
            "tensor",
            "tensor:sequence=true,accumulate=2,recompute",
            "context:recompute",
            "context:method=ulysses,accumulate=2",
            "pipeline",
            "pipeline:schedule=gpipe,recompute",
            "pipeline:schedule=zero-bubble",
        ],
        4: [
            "fsdp:tensor=2,sequence=true,recompute",
            "fsdp:tensor=2,context=2",
            "ddp:context=2,accumulate=2",
            "pipeline:tensor=2,schedule=interleaved",
            "pipeline:shard=2,recompute",
        ],
    }[count]
    assert_quickly_equal(ranks, count, "decoder", layouts, model=zoo.decoder_with_dropout_everywhere)


def test_dropout_in_low_precision_is_equal(ranks: Any) -> None:
    """The masks in bf16 are those of float64. So bf16 differs from `single` only by rounding."""
    layouts = ["ddp:precision=bf16,recompute"]
    assert_equal(
        layouts, parities(ranks, 2, "decoder", "sgd", layouts, model=zoo.decoder_with_dropout_everywhere, steps=4)
    )
