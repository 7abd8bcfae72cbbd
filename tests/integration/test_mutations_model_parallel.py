"""Each mistake in splitting matrices, sequences and layers must turn parity red, or be refused by its name.

A mutation patches the real code inside the ranks for one check, as in test_mutations.py; what it is compared with ran
before. Each case names the optimizer it is run under. All show under SGD and under AdamW alike, the counting of all
tensor ranks under AdamW by the count alone: it hides the factor in the gradients.
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
from integration.test_travels_model_parallel import OTHER_PLAN, Other

_COUNTER = iter(range(10**9))
Patch = contextlib.AbstractContextManager[Any]


# tensor


def rowwise_not_reduced() -> Patch:
    """What a rank has added up over its own features is taken for the output."""

    class Alone(RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(
            output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any
        ) -> Any:
            if isinstance(mod, nn.Embedding):
                return RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
            return outputs.to_local()

    return mock.patch.object(tensor_module, "RowwiseParallel", Alone)


def colwise_input_not_reduced() -> Patch:
    """The gradient of what goes into split layers is what this rank's features say of it."""

    def gathering(devices: Any, by_sequence: bool, dim: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = DTensor.from_local(args[0], devices, [Replicate()], run_check=False, grad_placements=[Partial()])
            return (value, *args[1:]), kwargs

        return hook

    return mock.patch.object(tensor_module, "_gathering", gathering)


def replicate_sum_forgotten() -> Patch:
    """A weight that is used on split features keeps the gradient of this rank's features."""
    original = TensorParallel.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.to_sum = []

    return mock.patch.object(TensorParallel, "__init__", init)


def _nobody_looks() -> Patch:
    return mock.patch.object(TensorParallel, "_check_identical")


def rowwise_not_reduced_unseen() -> Patch:
    """The same, and nobody looks at the gradients of the first update."""
    return _both(rowwise_not_reduced(), _nobody_looks())


def colwise_input_not_reduced_unseen() -> Patch:
    """The same, and nobody looks at the gradients of the first update."""
    return _both(colwise_input_not_reduced(), _nobody_looks())


def replicate_sum_forgotten_unseen() -> Patch:
    """The same, and nobody looks at the gradients of the first update."""
    return _both(replicate_sum_forgotten(), _nobody_looks())


def untied() -> Patch:
    """Splitting unties the head from the embedding, and nobody ties them again."""
    return mock.patch.object(tensor_module, "_tie")


def tensor_ranks_read_apart() -> Patch:
    """Ranks that split a matrix read different samples."""
    apart = property(lambda mesh: Slice(mesh.world.rank, mesh.world.size))
    return mock.patch.object(Mesh, "data_slice", apart)


def all_tensor_ranks_count() -> Patch:
    """Every rank that has computed a loss counts it."""
    return mock.patch.object(ParallelModel, "count_once", lambda parallel, pair: pair)


# shards and replicas


def same_slice() -> Patch:
    """All shards read the first one's samples."""
    return mock.patch.object(Mesh, "data_slice", property(lambda mesh: Slice(0, mesh.size("replicate", "shard"))))


def replicas_not_reduced() -> Patch:
    """Gradients are reduced over the shards alone."""
    original = Mesh.device_mesh
    return mock.patch.object(
        Mesh, "device_mesh", lambda mesh, *axes: original(mesh, *(axis for axis in axes if axis != "replicate"))
    )


# context


def source_off_by_one() -> Patch:
    """A rank takes the keys that are here for those of the next rank."""
    original = ring_module._chunk_pairs
    return mock.patch.object(
        ring_module, "_chunk_pairs", lambda ring, source, *rest: original(ring, (source + 1) % ring.count, *rest)
    )


def ring_turns_round() -> Patch:
    """Keys go to the rank before instead of the next one."""
    original = ring_module.ring_send_recv

    def pass_on(tensor: Tensor, ring: Any) -> Any:
        return original(tensor, dataclasses.replace(ring, index=ring.count - 1 - ring.index, ranks=ring.ranks[::-1]))

    return mock.patch.object(ring_module, "ring_send_recv", pass_on)


def neighbour_keeps_gradients() -> Patch:
    """The gradients of keys and values do not take the last step, home."""
    original = ring_module.ring_send_recv

    def pass_on(tensor: Tensor, ring: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_name == "backward" and caller.f_locals["step"] == ring.count - 1:
            return lambda: tensor
        return original(tensor, ring)

    return mock.patch.object(ring_module, "ring_send_recv", pass_on)


def merged_by_maximum() -> Patch:
    """Partial softmaxes are put together by the larger of their sums, not by both."""
    return mock.patch.object(torch, "logaddexp", torch.maximum)


def _chunk_backward(change: Callable[..., Any]) -> Patch:
    return mock.patch.object(ring_module, "attend_backward", _with(change, ring_module.attend_backward))


def chunk_normalised_alone() -> Patch:
    """In backward the probabilities of a chunk add up to one by themselves."""

    def backward(
        original: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, _: Tensor, *rest: Any
    ) -> Any:
        return original(q, k, v, out, dout, ring_module.attend(q, k, v, *rest)[1], *rest)

    return _chunk_backward(backward)


def masked_forward_alone() -> Patch:
    """In backward early queries have looked at late keys."""
    return _chunk_backward(lambda original, *arguments: original(*arguments[:-1], False))


def other_keys_get_gradients() -> Patch:
    """The gradients of a chunk's keys and values go to its positions in reverse."""

    def backward(original: Any, *arguments: Any) -> Any:
        dq, dkv = original(*arguments)
        return dq, dkv.flip(-2)

    return _chunk_backward(backward)


def plain_operators() -> Patch:
    """No mistake: a torch without flash attention for CPUs."""
    return mock.patch.object(chunk_module, "_flash_is_right", return_value=False)


def positions_in_line() -> Patch:
    """Tokens are a head and a tail; their positions are counted through."""
    original = ContextParallel.take

    def take(self: ContextParallel, batch: Any) -> Any:
        part = original(self, batch)
        places = batch.input["positions"].chunk(self.ring.count, dim=self.dim)[self.ring.index]
        return dataclasses.replace(part, input={**part.input, "positions": places})

    return mock.patch.object(ContextParallel, "take", take)


def sequence_in_line() -> Patch:
    """Sequences are cut into one piece for each rank; attention thinks of a head and a tail."""
    return mock.patch.object(context_module, "chunk_order", lambda count: list(range(2 * count)))


def pair_skipped() -> Patch:
    """Of the chunks of another rank, the last pair is left out."""
    original = ring_module._chunk_pairs

    def pairs(ring: Any, source: int, *rest: Any) -> Any:
        found = original(ring, source, *rest)
        return found if source == ring.index else found[:-1]

    return mock.patch.object(ring_module, "_chunk_pairs", pairs)


def heads_in_line() -> Patch:
    """Whole sequences are put together rank after rank; a head and a tail is what ranks have."""
    return mock.patch.object(ring_module, "chunk_order", lambda count: list(range(2 * count)))


# pipeline


def _schedule(keep: Callable[[Action, int], bool]) -> Patch:
    original = pipe_module._schedule

    def schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Any:
        rows = original(name, ranks, micro_batches, chunks)
        return [[action for action in row if keep(action, micro_batches - 1)] for row in rows]

    return mock.patch.object(pipe_module, "_schedule", schedule)


def micro_batch_dropped() -> Patch:
    """The last micro-batch does not go through."""
    return _schedule(lambda action, last: action.micro < last)


def backward_dropped() -> Patch:
    """The last micro-batch goes forward alone."""
    return _schedule(lambda action, last: action.micro < last or action.kind == "F")


def weight_gradients_dropped() -> Patch:
    """Those of the last micro-batch wait for ever."""
    return _schedule(lambda action, last: action.micro < last or action.kind != "W")


def gradient_not_sent() -> Patch:
    """The stage before gets zeros."""
    original = PipelineRun._send

    def send(self: PipelineRun, kind: str, stage: int, index: int, tensor: Tensor, key: Any) -> None:
        original(self, kind, stage, index, torch.zeros_like(tensor) if kind == "B" else tensor, key)

    return mock.patch.object(PipelineRun, "_send", send)


def _averaging(change: Callable[..., Any]) -> Patch:
    module = _strategy("pipeline")
    return mock.patch.object(module, "all_reduce_grads", _with(change, module.all_reduce_grads))


def outside_not_summed() -> Patch:
    """Each stage steps on its own gradients of what is outside of the blocks."""
    return _averaging(lambda original, ps, mesh, *stages: None if stages else original(ps, mesh))


def blocks_not_averaged() -> Patch:
    """Replicas step on their own gradients of the blocks."""
    return _averaging(lambda original, ps, mesh, *stages: original(ps, mesh, *stages) if stages else None)


def tie_counted_once() -> Patch:
    """Of a tied weight the gradient of the head is sent round, and the embedding's forgotten."""

    def all_reduce_grads(original: Any, parameters: Any, mesh: Mesh, *stages: str) -> None:
        if stages and mesh.is_first("pipeline"):
            for parameter in parameters:
                if parameter.dim() == 2:
                    parameter.grad.zero_()
        original(parameters, mesh, *stages)

    return _averaging(all_reduce_grads)


def block_skipped() -> Patch:
    """The first stage ends a block too early."""

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
    """The block at the cut runs on both sides of it."""

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
    """Each rank clips by the norm of what it holds."""

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
    """What several ranks hold is counted by each."""
    return mock.patch.object(norm_module, "is_norm_param", return_value=True)


def _strategy(name: str) -> Any:
    return importlib.import_module(f"everyrank.strategies.{name}")


def _with(change: Callable[..., Any], original: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: change(original, *arguments, **named)


def _both(*patches: Patch) -> Patch:
    stack = contextlib.ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


# what a case is about, beside the decoder without clipping
TRAITS: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("decoder", {"clip_norm": None}),
    "clip": ("decoder", {"clip_norm": 0.01}),
    # ranks that read what they should not have to find as many samples there, or they wait for each other
    "even": (
        "decoder",
        {
            "clip_norm": None,
            "global_batch": 8,
            "train_data": lambda: zoo.Passages(24),
            "eval_data": None,
            "metrics": {},
        },
    ),
    "experts": ("experts", {"clip_norm": None}),
    "experts, clip": ("experts", {"clip_norm": 0.01}),
    "words": ("frozen", {"clip_norm": None, "model": Other, "tensor_plan": OTHER_PLAN, "blocks": None}),
}
# mutation, layout, trait, optimizer under which it shows, ranks, words of the cause; "!" before those of a refusal
CASES: list[tuple[Callable[[], Patch], str, str, str, int, str]] = [
    (rowwise_not_reduced, "tensor", "", "sgd", 2, "!not the same on all tensor ranks"),
    (rowwise_not_reduced_unseen, "tensor", "", "sgd", 2, "loss differs before"),
    (colwise_input_not_reduced, "tensor", "", "sgd", 2, "!not the same on all tensor ranks"),
    (colwise_input_not_reduced_unseen, "tensor", "", "sgd", 2, "different weights"),
    (replicate_sum_forgotten, "tensor", "words", "sgd", 2, "!add 'norm': 'replicate_sum'"),
    (replicate_sum_forgotten_unseen, "tensor", "words", "sgd", 2, "different weights"),
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

_subjects: dict[tuple[str, str], ParityCase] = {}  # in each rank: a run of single serves all cases that need it


def check(
    world: World,
    mutation: Callable[[], Patch] | None,
    text: str,
    trait: str,
    optimizer: str,
    key: str,
    is_checked: bool = False,
) -> Any:
    """The parity of a layout under a mutation, or the words with which it is refused.

    Without the check before the first update, which would refuse most of them: parity has to find them by itself.
    """
    if (trait, optimizer) not in _subjects:
        name, changes = TRAITS[trait]
        workload = zoo.workload(name, optimizer, **changes)
        # an update of a full batch, one of a ragged one, and two of the next epoch
        _subjects[trait, optimizer] = parity_case(workload, *open_data(workload, world), steps=4)
    subject = _subjects[trait, optimizer]
    layout = dataclasses.replace(parse_layout(text), precision="float64")
    ensure_references(subject, layout, world, f"{key}/single")  # before anything is patched
    first_look = (
        contextlib.nullcontext()
        if is_checked or mutation is None
        else mock.patch.object(ParallelModel, "before_first_update")
    )
    with first_look, mutation() if mutation is not None else contextlib.nullcontext():
        try:
            parity = check_layout(subject, layout, world, key)[0]
            return parity.reason if parity.status == "refused" else parity
        except WorkloadError as error:
            return str(error)


@pytest.mark.parametrize(
    ("mutation", "text", "trait", "optimizer", "count", "words"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in CASES],
)
def test_mutation_is_red(
    ranks: Any, mutation: Callable[[], Patch], text: str, trait: str, optimizer: str, count: int, words: str
) -> None:
    """The mistake is found and its first divergence named, or it is refused with what to do."""
    found = ranks(count, check, mutation, text, trait, optimizer, f"mutation-mp/{next(_COUNTER)}")
    if words.startswith("!"):
        assert all(isinstance(each, str) and words[1:] in each for each in found), found
        return
    parity = found[0]
    assert isinstance(parity, Parity), parity
    assert parity.status == "different"
    assert parity.first_divergence
    assert words in (parity.cause or ""), parity


@pytest.mark.parametrize(
    ("name", "meta"),
    [
        ("rowwise_not_reduced", ""),
        ("rowwise_not_reduced", ":meta=true"),  # which has no whole model to compare with, but its parameters in turn
        ("source_off_by_one", ""),
        ("positions_in_line", ""),
        ("pair_skipped", ""),
        ("heads_in_line", ""),
    ],
)
def test_check_equal_refuses(ranks: Any, name: str, meta: str) -> None:
    """What computes something else in parts than as a whole does not train at all."""
    mutation, text, trait, optimizer, count, _ = next(case for case in CASES if case[0].__name__ == name)
    text += meta
    for found in ranks(count, check, mutation, text, trait, optimizer, f"mutation-mp/{next(_COUNTER)}", True):
        assert isinstance(found, str), found
        assert "in parts" in found


@pytest.mark.parametrize("count", [2, 4])
def test_equal_without_mutation(ranks: Any, count: int) -> None:
    """The same layouts on the same workloads, as they are."""
    for text, trait, optimizer in dict.fromkeys((case[1], case[2], case[3]) for case in CASES if case[4] == count):
        parity = ranks(count, check, None, text, trait, optimizer, f"mutation-mp/{next(_COUNTER)}")[0]
        assert isinstance(parity, Parity), parity
        assert parity.status == "equal", (text, trait, parity)


@pytest.mark.parametrize("count", [2, 4])
def test_equal_by_plain_operators(ranks: Any, count: int) -> None:
    """The ring without torch's flash attention; with it, it is equal above."""
    parity = ranks(count, check, plain_operators, "context", "", "sgd", f"mutation-mp/{next(_COUNTER)}")[0]
    assert isinstance(parity, Parity), parity
    assert parity.status == "equal", parity
