"""Parity must detect each mutation of tensor, context and pipeline parallelism, or training must be refused.

A mutation patches the code of everyrank inside the ranks for one check, as in test_mutations.py. The reference runs
before, without it. All mutations are visible under SGD and AdamW. AdamW hides the factor of `all_tensor_ranks_count` in
the gradients, so there parity detects it only by the number of loss terms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

import everyrank.parallel.context.apply as context_module
import everyrank.parallel.context.attention as ring_module
import everyrank.parallel.context.chunk as chunk_module
import everyrank.parallel.gradients as norm_module
import everyrank.parallel.pipeline.run as pipe_module
import everyrank.parallel.tensor.apply as tensor_module
import zoo
from everyrank import parse_layout
from everyrank.data import Slice
from everyrank.errors import WorkloadError
from everyrank.loop import open_data
from everyrank.parallel.context.apply import ContextParallel
from everyrank.parallel.mesh import Mesh
from everyrank.parallel.parallelize import ParallelModel
from everyrank.parallel.pipeline.run import PipelineRun
from everyrank.parallel.pipeline.schedule import Action
from everyrank.parallel.pipeline.stage import Stages
from everyrank.parallel.tensor.apply import TensorParallel
from everyrank.parity import ParityCase, check_layout, parity_case
from everyrank.parity.reference import ensure_references
from everyrank.record import Parity
from everyrank.world import World
from integration.test_travels_model_parallel import UNCOMMON_PLAN, UncommonStyles

_COUNTER = iter(range(10**9))
Patch = contextlib.AbstractContextManager[Any]


# tensor


def rowwise_not_reduced() -> Patch:
    """A rowwise layer returns the sum over the local features, without the all-reduce."""

    class NotReduced(RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(
            output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any
        ) -> Any:
            if isinstance(mod, nn.Embedding):
                return RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
            return outputs.to_local()

    return mock.patch.object(tensor_module, "RowwiseParallel", NotReduced)


def colwise_input_not_reduced() -> Patch:
    """The gradient of the input of split layers is not summed over the ranks."""

    def gathering(devices: Any, by_sequence: bool, dim: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = DTensor.from_local(args[0], devices, [Replicate()], run_check=False, grad_placements=[Partial()])
            return (value, *args[1:]), kwargs

        return hook

    return mock.patch.object(tensor_module, "_gathering", gathering)


def replicate_sum_forgotten() -> Patch:
    """The gradient of a weight used on split features is not summed over the ranks."""
    original = TensorParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.to_sum = []

    return mock.patch.object(TensorParallel, "__init__", init)


def _unchecked() -> Patch:
    """Skip the check that gradients are the same on all tensor ranks in the first update."""
    return mock.patch.object(TensorParallel, "_check_identical")


def rowwise_not_reduced_unseen() -> Patch:
    """The same without the check of gradients in the first update."""
    return _all_of(rowwise_not_reduced(), _unchecked())


def colwise_input_not_reduced_unseen() -> Patch:
    """The same without the check of gradients in the first update."""
    return _all_of(colwise_input_not_reduced(), _unchecked())


def replicate_sum_forgotten_unseen() -> Patch:
    """The same without the check of gradients in the first update."""
    return _all_of(replicate_sum_forgotten(), _unchecked())


def untied() -> Patch:
    """Splitting unties the head from the embedding, and they are not tied again."""
    return mock.patch.object(tensor_module, "_tie")


def tensor_ranks_read_apart() -> Patch:
    """The ranks of a tensor group read different samples."""
    slice_by_rank = property(lambda mesh: Slice(mesh.world.rank, mesh.world.size))
    return mock.patch.object(Mesh, "data_slice", slice_by_rank)


def all_tensor_ranks_count() -> Patch:
    """All tensor ranks count the loss that they compute together."""
    return mock.patch.object(ParallelModel, "count_once", lambda parallel, pair: pair)


# shards and replicas


def same_slice() -> Patch:
    """All shards read the samples of the first one."""
    return mock.patch.object(Mesh, "data_slice", property(lambda mesh: Slice(0, mesh.size("replicate", "shard"))))


def replicas_not_reduced() -> Patch:
    """Gradients are reduced over the shards only."""
    original = Mesh.device_mesh
    return mock.patch.object(
        Mesh, "device_mesh", lambda mesh, *axes: original(mesh, *(axis for axis in axes if axis != "replicate"))
    )


# context


def source_off_by_one() -> Patch:
    """A rank treats the keys that it holds as those of the next rank."""
    original = ring_module._chunk_pairs
    return mock.patch.object(
        ring_module, "_chunk_pairs", lambda ring, source, *rest: original(ring, (source + 1) % ring.count, *rest)
    )


def ring_turns_round() -> Patch:
    """Keys go to the previous rank instead of the next one."""
    original = ring_module.ring_send_recv

    def pass_on(tensor: Tensor, ring: Any) -> Any:
        return original(tensor, dataclasses.replace(ring, index=ring.count - 1 - ring.index, ranks=ring.ranks[::-1]))

    return mock.patch.object(ring_module, "ring_send_recv", pass_on)


def neighbour_keeps_gradients() -> Patch:
    """The gradients of keys and values are not sent in the last step, to the rank that owns them."""
    original = ring_module.ring_send_recv

    def pass_on(tensor: Tensor, ring: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_name == "backward" and caller.f_locals["step"] == ring.count - 1:
            return lambda: tensor
        return original(tensor, ring)

    return mock.patch.object(ring_module, "ring_send_recv", pass_on)


def merged_by_maximum() -> Patch:
    """Partial softmaxes are merged with the larger of their sums, not with both."""
    return mock.patch.object(torch, "logaddexp", torch.maximum)


def _chunk_backward(change: Callable[..., Any]) -> Patch:
    return mock.patch.object(ring_module, "attend_backward", _with(change, ring_module.attend_backward))


def chunk_normalised_alone() -> Patch:
    """In backward the softmax of each chunk is normalized separately."""

    def backward(
        original: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, _: Tensor, *rest: Any
    ) -> Any:
        return original(q, k, v, out, dout, ring_module.attend(q, k, v, *rest)[1], *rest)

    return _chunk_backward(backward)


def masked_forward_alone() -> Patch:
    """Backward has no causal mask."""
    return _chunk_backward(lambda original, *arguments: original(*arguments[:-1], False))


def other_keys_get_gradients() -> Patch:
    """The gradients of the keys and values of a chunk are in reverse order."""

    def backward(original: Any, *arguments: Any) -> Any:
        dq, dkv = original(*arguments)
        return dq, dkv.flip(-2)

    return _chunk_backward(backward)


def plain_operators() -> Patch:
    """Use plain operators, as if torch had no flash attention for CPUs. This is no mistake."""
    return mock.patch.object(chunk_module, "_flash_is_right", return_value=False)


def positions_in_line() -> Patch:
    """A rank takes the positions of one contiguous chunk, but the tokens of a chunk from each end."""
    original = ContextParallel.take

    def take(self: ContextParallel, batch: Any) -> Any:
        local_batch = original(self, batch)
        positions = batch.input["positions"].chunk(self.group.count, dim=self.dim)[self.group.index]
        return dataclasses.replace(local_batch, input={**local_batch.input, "positions": positions})

    return mock.patch.object(ContextParallel, "take", take)


def sequence_in_line() -> Patch:
    """A rank takes one contiguous chunk of a sequence, but attention expects a chunk from each end."""
    return mock.patch.object(context_module, "chunk_order", lambda count: list(range(2 * count)))


def pair_skipped() -> Patch:
    """The last pair of chunks of each other rank is left out."""
    original = ring_module._chunk_pairs

    def pairs(ring: Any, source: int, *rest: Any) -> Any:
        chunk_pairs = original(ring, source, *rest)
        return chunk_pairs if source == ring.index else chunk_pairs[:-1]

    return mock.patch.object(ring_module, "_chunk_pairs", pairs)


def heads_in_line() -> Patch:
    """Full sequences are joined rank by rank, but a rank has a chunk from each end."""
    return mock.patch.object(ring_module, "chunk_order", lambda count: list(range(2 * count)))


# pipeline


def _schedule(keep: Callable[[Action, int], bool]) -> Patch:
    original = pipe_module._schedule

    def schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Any:
        rows = original(name, ranks, micro_batches, chunks)
        return [[action for action in row if keep(action, micro_batches - 1)] for row in rows]

    return mock.patch.object(pipe_module, "_schedule", schedule)


def micro_batch_dropped() -> Patch:
    """The last micro-batch is left out."""
    return _schedule(lambda action, last: action.micro < last)


def backward_dropped() -> Patch:
    """The last micro-batch has no backward pass."""
    return _schedule(lambda action, last: action.micro < last or action.kind == "F")


def weight_gradients_dropped() -> Patch:
    """The weight gradients of the last micro-batch are never computed."""
    return _schedule(lambda action, last: action.micro < last or action.kind != "W")


def gradient_not_sent() -> Patch:
    """The previous stage receives a gradient of zeros."""
    original = PipelineRun._send

    def send(self: PipelineRun, kind: str, stage: int, index: int, tensor: Tensor, key: Any) -> None:
        original(self, kind, stage, index, torch.zeros_like(tensor) if kind == "B" else tensor, key)

    return mock.patch.object(PipelineRun, "_send", send)


def _averaging(change: Callable[..., Any]) -> Patch:
    module = _strategy("pipeline")
    return mock.patch.object(module, "all_reduce_grads", _with(change, module.all_reduce_grads))


def outside_not_summed() -> Patch:
    """The gradients of parameters outside of the blocks are not summed over the stages."""
    return _averaging(lambda original, parameters, mesh, *stages: None if stages else original(parameters, mesh))


def blocks_not_averaged() -> Patch:
    """The gradients of the blocks are not averaged over the replicas."""
    return _averaging(
        lambda original, parameters, mesh, *stages: original(parameters, mesh, *stages) if stages else None
    )


def tie_counted_once() -> Patch:
    """The gradient of a tied weight has the gradient of the head only, not that of the embedding."""

    def all_reduce_grads(original: Any, parameters: Any, mesh: Mesh, *stages: str) -> None:
        if stages and mesh.is_first("pipeline"):
            for parameter in parameters:
                if parameter.dim() == 2:
                    parameter.grad.zero_()
        original(parameters, mesh, *stages)

    return _averaging(all_reduce_grads)


def block_skipped() -> Patch:
    """The first stage leaves out its last block."""

    def run(original: Any, self: Stages, number: int, *rest: Any) -> Any:
        spans = self.spans
        if number == 0:
            self.spans = [range(spans[0].start, spans[0].stop - 1), *spans[1:]]
        try:
            return original(self, number, *rest)
        finally:
            self.spans = spans

    return mock.patch.object(Stages, "run", _with(run, Stages.run))


def block_twice() -> Patch:
    """The last block of the first stage runs twice."""

    def run(original: Any, self: Stages, number: int, *rest: Any) -> Any:
        last = self.spans[0][-1]
        block = self.blocks[last]
        if number == 0:
            self.blocks[last] = lambda value, *more: block(block(value, *more), *more)  # type: ignore[call-overload]
        try:
            return original(self, number, *rest)
        finally:
            self.blocks[last] = block

    return mock.patch.object(Stages, "run", _with(run, Stages.run))


# clipping


def clipped_by_local_norm() -> Patch:
    """Each rank clips with the norm of its local gradients."""

    def make_trainable(original: Any, *arguments: Any) -> Any:
        trainable = original(*arguments)
        step = trainable.optimizer_step
        trainable.optimizer_step = lambda total, num_averaged=1, sum_grad_squares=None: step(total, num_averaged)
        return trainable

    stack = contextlib.ExitStack()
    for name in ("tensor", "fsdp", "pipeline"):
        module = _strategy(name)
        stack.enter_context(mock.patch.object(module, "make_trainable", _with(make_trainable, module.make_trainable)))
    return stack


def replicas_in_norm() -> Patch:
    """The norm counts a replicated gradient once for each rank."""
    return mock.patch.object(norm_module, "is_norm_param", return_value=True)


def _strategy(name: str) -> Any:
    return importlib.import_module(f"everyrank.strategies.{name}")


def _with(change: Callable[..., Any], original: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(original, *args, **kwargs)


def _all_of(*patches: Patch) -> Patch:
    stack = contextlib.ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


# trait of a case: its workload and changes of it
TRAITS: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("decoder", {"clip_norm": None}),
    "clip": ("decoder", {"clip_norm": 0.01}),
    # Each wrong slice must have as many samples as the right one. Otherwise the ranks would wait for each other.
    "even": (
        "decoder",
        {
            "clip_norm": None,
            "global_batch": 8,
            "train_data": lambda: zoo.SentencesWithPositions(24),
            "eval_data": None,
            "metrics": {},
        },
    ),
    "experts": ("experts", {"clip_norm": None}),
    "experts, clip": ("experts", {"clip_norm": 0.01}),
    "styles": ("frozen", {"clip_norm": None, "model": UncommonStyles, "tensor_plan": UNCOMMON_PLAN, "blocks": None}),
}
# mutation, layout, trait, optimizer, number of ranks, fragment of the cause; after "!" a fragment of an error message
CASES: list[tuple[Callable[[], Patch], str, str, str, int, str]] = [
    (rowwise_not_reduced, "tensor", "", "sgd", 2, "!not the same on all tensor ranks"),
    (rowwise_not_reduced_unseen, "tensor", "", "sgd", 2, "loss differs before"),
    (colwise_input_not_reduced, "tensor", "", "sgd", 2, "!not the same on all tensor ranks"),
    (colwise_input_not_reduced_unseen, "tensor", "", "sgd", 2, "different weights"),
    (replicate_sum_forgotten, "tensor", "styles", "sgd", 2, "!add 'norm': 'replicate_sum'"),
    (replicate_sum_forgotten_unseen, "tensor", "styles", "sgd", 2, "different weights"),
    (untied, "tensor", "", "sgd", 2, ""),
    (tensor_ranks_read_apart, "tensor", "even", "sgd", 2, "read the wrong samples"),
    (all_tensor_ranks_count, "tensor", "", "sgd", 2, "counted"),
    (all_tensor_ranks_count, "fsdp:tensor=2", "", "sgd", 4, "counted"),
    (all_tensor_ranks_count, "pipeline:tensor=2", "", "sgd", 4, "counted"),
    (same_slice, "fsdp:tensor=2", "", "sgd", 4, "samples"),
    (tensor_ranks_read_apart, "fsdp:tensor=2", "even", "sgd", 4, "read the wrong samples"),
    (replicas_not_reduced, "fsdp:replicate=2", "", "sgd", 4, ""),
    (source_off_by_one, "context", "", "sgd", 2, "loss differs before"),
    (ring_turns_round, "context", "", "sgd", 4, "loss differs before"),
    (neighbour_keeps_gradients, "context", "", "sgd", 2, ""),
    (merged_by_maximum, "context", "", "sgd", 2, "loss differs before"),
    (chunk_normalised_alone, "context", "", "sgd", 2, ""),
    (masked_forward_alone, "context", "", "sgd", 2, ""),
    (other_keys_get_gradients, "context", "", "sgd", 2, ""),
    (positions_in_line, "context", "", "sgd", 2, "loss differs before"),
    (sequence_in_line, "context", "", "sgd", 2, "loss differs before"),
    (pair_skipped, "context", "", "sgd", 2, "loss differs before"),
    (heads_in_line, "context:method=ulysses", "", "sgd", 2, "loss differs before"),
    (micro_batch_dropped, "pipeline", "", "sgd", 2, "counted"),
    (backward_dropped, "pipeline", "", "sgd", 2, ""),
    (weight_gradients_dropped, "pipeline:schedule=zero-bubble", "", "sgd", 2, ""),
    (gradient_not_sent, "pipeline", "", "sgd", 2, ""),
    (outside_not_summed, "pipeline", "", "sgd", 2, "different weights"),
    (blocks_not_averaged, "pipeline:replicate=2", "", "sgd", 4, ""),
    (tie_counted_once, "pipeline", "", "sgd", 2, ""),
    (block_skipped, "pipeline", "", "sgd", 2, "loss differs before"),
    (block_twice, "pipeline", "", "sgd", 2, "loss differs before"),
    (clipped_by_local_norm, "tensor", "clip", "sgd", 2, ""),
    (clipped_by_local_norm, "fsdp:tensor=2", "clip", "sgd", 4, ""),
    (clipped_by_local_norm, "pipeline", "clip", "sgd", 2, ""),
    (replicas_in_norm, "tensor", "clip", "sgd", 2, ""),
    (replicas_in_norm, "fsdp:tensor=2", "clip", "sgd", 4, ""),
    (replicas_in_norm, "pipeline", "clip", "sgd", 2, ""),
]

_parity_cases: dict[tuple[str, str], ParityCase] = {}  # by trait and optimizer, in each rank: references are reused


def check(
    world: World,
    mutation: Callable[[], Patch] | None,
    text: str,
    trait: str,
    optimizer: str,
    key: str,
    is_checked: bool = False,
) -> Any:
    """Return the parity of a layout under a mutation, or the error message.

    The check before the first update would refuse most mutations. It is left out unless `is_checked`, so that parity
    must detect them.
    """
    if (trait, optimizer) not in _parity_cases:
        name, changes = TRAITS[trait]
        workload = zoo.workload(name, optimizer, **changes)
        # four updates include an uneven last batch and a second epoch
        _parity_cases[trait, optimizer] = parity_case(workload, *open_data(workload, world), steps=4)
    case = _parity_cases[trait, optimizer]
    layout = dataclasses.replace(parse_layout(text), precision="float64")
    ensure_references(case, layout, world, f"{key}/single")  # before anything is patched
    skip_check = (
        contextlib.nullcontext() if is_checked or mutation is None else mock.patch.object(ParallelModel, "call_once")
    )
    with skip_check, mutation() if mutation is not None else contextlib.nullcontext():
        try:
            parity = check_layout(case, layout, world, key)[0]
            return parity.reason if parity.status == "refused" else parity
        except WorkloadError as error:
            return str(error)


@pytest.mark.parametrize(
    ("mutation", "text", "trait", "optimizer", "count", "fragment"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in CASES],
)
def test_mutation_is_detected(
    ranks: Any, mutation: Callable[[], Patch], text: str, trait: str, optimizer: str, count: int, fragment: str
) -> None:
    """Parity reports the first divergence, or an error message tells what to do."""
    results = ranks(count, check, mutation, text, trait, optimizer, f"mutation-mp/{next(_COUNTER)}")
    if fragment.startswith("!"):
        assert all(isinstance(result, str) and fragment[1:] in result for result in results), results
        return
    parity = results[0]
    assert isinstance(parity, Parity), parity
    assert parity.status == "different"
    assert parity.first_divergence
    assert fragment in (parity.cause or ""), parity


@pytest.mark.parametrize(
    ("name", "meta"),
    [
        ("rowwise_not_reduced", ""),
        ("rowwise_not_reduced", ":meta=true"),  # no rank has the full model: the check uses one parameter at a time
        ("source_off_by_one", ""),
        ("positions_in_line", ""),
        ("pair_skipped", ""),
        ("heads_in_line", ""),
    ],
)
def test_check_before_the_first_update_refuses_a_mutation(ranks: Any, name: str, meta: str) -> None:
    """A split model that computes different values than the full model does not train."""
    mutation, text, trait, optimizer, count, _ = next(case for case in CASES if case[0].__name__ == name)
    text += meta
    for message in ranks(count, check, mutation, text, trait, optimizer, f"mutation-mp/{next(_COUNTER)}", True):
        assert isinstance(message, str), message
        assert "in parts" in message


@pytest.mark.parametrize("count", [2, 4])
def test_layouts_are_equal_without_a_mutation(ranks: Any, count: int) -> None:
    """Layouts and workloads are those of the mutations."""
    for text, trait, optimizer in dict.fromkeys((case[1], case[2], case[3]) for case in CASES if case[4] == count):
        parity = ranks(count, check, None, text, trait, optimizer, f"mutation-mp/{next(_COUNTER)}")[0]
        assert isinstance(parity, Parity), parity
        assert parity.status == "equal", (text, trait, parity)


@pytest.mark.parametrize("count", [2, 4])
def test_ring_attention_without_flash_attention_is_equal(ranks: Any, count: int) -> None:
    """Other tests use flash attention of torch."""
    parity = ranks(count, check, plain_operators, "context", "", "sgd", f"mutation-mp/{next(_COUNTER)}")[0]
    assert isinstance(parity, Parity), parity
    assert parity.status == "equal", parity
