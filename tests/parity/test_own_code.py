"""Correct custom parallelize functions are equal to one device. Parity names the cause of each mistake in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from everyrank import parse_layout
from everyrank.errors import EveryrankError
from everyrank.parallel.custom import clean_name
from everyrank.parity import check_layout
from everyrank.record import Parity
from everyrank.world import World
from parity.test_equal import in_float64

pytestmark = pytest.mark.integration

_COUNTER = iter(range(10**9))

CUSTOM_PARALLELIZE = '''\
"""As a person keeps it: outside of everyrank, in the shape of torchtitan's."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from everyrank import ParallelContract
from everyrank.builtin.decoder import rotate

contract = ParallelContract(axes={"shard": "batch", "tensor": "same"})


def split(model, mesh, down=RowwiseParallel):
    plan = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(),
        "feed.gate": ColwiseParallel(),
        "feed.up": ColwiseParallel(),
        "feed.down": down(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)


def parallelize(model, mesh):
    split(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def sequence(model, mesh):
    """The plan of torchtitan's decoder: between matrices the sequence is split, and norms are replicated DTensors."""
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], ends)
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "feed_norm": SequenceParallel(),
        "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed.gate": ColwiseParallel(),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    return model


def titan(model, mesh):
    model = sequence(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def wrong_plan(model, mesh):
    split(model, mesh, ColwiseParallel)
    return model


def clip_by(model, max_norm, squares):
    factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def counted_twice(model, max_norm, mesh):
    squares = sum(parameter.grad.to_local().square().sum() for parameter in model.parameters())
    dist.all_reduce(squares)
    clip_by(model, max_norm, squares)


def counted_once(model, max_norm, mesh):
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        squares += parameter.grad.full_tensor().square().sum()
    clip_by(model, max_norm, squares)


def counted_here(model, max_norm, mesh):
    clip_by(model, max_norm, sum(parameter.grad.to_local().square().sum() for parameter in model.parameters()))


def clipped(clip):
    def parallelized(model, mesh):
        return parallelize(model, mesh)

    parallelized.contract = ParallelContract(axes={"shard": "batch", "tensor": "same"}, clip_grad_norm=clip)
    return parallelized


norm_once, norm_twice, norm_here = clipped(counted_once), clipped(counted_twice), clipped(counted_here)


def ddp(model, mesh):
    return DistributedDataParallel(model, process_group=mesh["data"].get_group())


def adds(model, mesh):
    model.blocks[0].shift = nn.Parameter(torch.zeros(()))
    model.blocks[0].register_forward_hook(lambda module, args, output: output + module.shift)
    return DistributedDataParallel(model, process_group=mesh["data"].get_group())


def reduce(model, mesh):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def by_hand(model, mesh):
    return model


def not_reduced(model, mesh):
    return model


def summed(model, mesh):
    return model


one_axis = {"data": "batch"}
ddp.contract = adds.contract = not_reduced.contract = ParallelContract()
by_hand.contract = ParallelContract(one_axis, gradients="sum", after_backward=reduce)
summed.contract = ParallelContract(one_axis, after_backward=reduce)


def attend(attention, group, stream, positions):
    """Queries of this rank's positions; keys and values of all."""
    heads = [
        layer(stream).unflatten(-1, (-1, attention.head_width)).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    ]
    query, key, value = rotate(heads[0], positions), rotate(heads[1], positions), heads[2]
    key, value = (all_gather_tensor_autograd(one.contiguous(), 2, group) for one in (key, value))
    places = torch.arange(key.shape[2])
    mask = positions[0][:, None] >= places[None, :]
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return attention.output(mixed.transpose(1, 2).flatten(-2))


def context(model, mesh):
    for block in model.blocks:
        block.attention.forward = functools.partial(attend, block.attention, mesh["context"].get_group())
    return model


def context_loss(model, mesh):
    return context(model, mesh)


def divided(loss, mesh):
    return loss / mesh["context"].size()


def attend_here(attention, stream, positions):
    """Forgets the keys of the other ranks: right on the first one, whose positions see no others."""
    heads = [
        layer(stream).unflatten(-1, (-1, attention.head_width)).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    ]
    query, key, value = rotate(heads[0], positions), rotate(heads[1], positions), heads[2]
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attention.output(mixed.transpose(1, 2).flatten(-2))


def context_alone(model, mesh):
    model.blocks[2].attention.forward = functools.partial(attend_here, model.blocks[2].attention)
    for block in (model.blocks[0], model.blocks[1], model.blocks[3]):
        block.attention.forward = functools.partial(attend, block.attention, mesh["context"].get_group())
    return model


by_context = {"data": "batch", "context": "sequence"}
context.contract = ParallelContract(by_context, scale_loss=divided, after_backward=reduce)
context_alone.contract = ParallelContract(by_context, scale_loss=divided, after_backward=reduce)
context_loss.contract = ParallelContract(by_context, after_backward=reduce)


class Copied(torch.autograd.Function):
    """The same on every rank; backward adds up what each rank has of the gradient."""

    @staticmethod
    def forward(context, value, group):
        context.group = group
        return value.view_as(value)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class Gathered(torch.autograd.Function):
    """The features of all ranks; backward takes this rank's."""

    @staticmethod
    def forward(context, value, group):
        context.rank, context.size = dist.get_rank(group), dist.get_world_size(group)
        rows = [torch.empty_like(value) for _ in range(context.size)]
        dist.all_gather(rows, value.contiguous(), group=group)
        return torch.cat(rows, dim=-1)

    @staticmethod
    def backward(context, gradient):
        return gradient.chunk(context.size, dim=-1)[context.rank], None


class Part(nn.Module):
    """A part of a matrix that no DTensor tells of: this rank's rows."""

    def __init__(self, linear, group):
        super().__init__()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, dim=0)[rank].clone())
        self.group = group

    def forward(self, value):
        return Gathered.apply(F.linear(Copied.apply(value, self.group), self.weight), self.group)


def parts(model, mesh):
    model.blocks[0].feed.down = Part(model.blocks[0].feed.down, mesh["tensor"].get_group())
    return model


parts.contract = ParallelContract(axes={"tensor": "same"})
'''


def check_all(world: World, key: str, layouts: list[str], changes: dict[str, Any]) -> list[Parity | str]:
    """Return the parity of each layout, or the message if a layout is refused."""
    case = zoo.cached_parity_case(world, changes.pop("name", "decoder"), "adamw", **changes)
    results: list[Parity | str] = []
    for text in layouts:
        try:
            results.append(check_layout(case, parse_layout(text), world, f"{key}/{text}")[0])
        except EveryrankError as error:
            results.append(str(error))
    return results


@pytest.fixture
def check(ranks: Any, tmp_path: Path) -> Any:
    """`check(2, "ddp:data=2")` returns the parity of each layout on two ranks, or its message.

    The layouts are functions in a file outside of the repository.
    """
    path = tmp_path / "my_parallel.py"
    path.write_text(CUSTOM_PARALLELIZE)

    def call(count: int, *layouts: str, **changes: Any) -> list[Any]:
        custom_layouts = [f"{path}:{layout}" for layout in (layouts if count <= 2 else in_float64(layouts))]
        return ranks(count, check_all, f"own/{next(_COUNTER)}", custom_layouts, {"steps": 4, **changes})[0]

    return call


def test_correct_functions_are_equal(check: Any) -> None:
    """DistributedDataParallel, fully_shard, a DTensor plan and custom collectives are equal on two ranks."""
    layouts = ["ddp", "parallelize:tensor=1", "parallelize:shard=1", "by_hand", "norm_once:tensor=1", "context:data=1"]
    parities = check(2, *layouts)
    assert [getattr(parity, "status", parity) for parity in parities] == ["equal"] * len(layouts), parities
    assert [parity.status for parity in check(2, "ddp:accumulate=3", "by_hand:accumulate=3")] == ["equal", "equal"]
    assert parities[0].checks[0].startswith("gradients, float64, 3 updates: 3 losses")


def test_tensor_plan_with_fully_shard_is_equal(check: Any) -> None:
    """As in torchtitan, four ranks have a shard of each matrix. `norm_once` clips by its own norm function."""
    parities = check(4, "parallelize:tensor=2", "norm_once:tensor=2")
    assert [getattr(parity, "status", parity) for parity in parities] == ["equal", "equal"], parities


def untied() -> nn.Module:
    """Return a decoder whose head is not tied to its embedding. A plan would separate tied weights."""
    return zoo.decoder(tied=False)


def test_sequence_parallel_plan_is_equal(check: Any) -> None:
    """Matrices, sequences and the vocabulary are split, as in torchtitan. On four ranks, fully_shard follows."""
    for count, layout in ((2, "sequence:shard=1"), (4, "titan:tensor=2")):
        [parity] = check(count, layout, model=untied)
        assert getattr(parity, "status", parity) == "equal", parity


def test_tied_weights_that_a_plan_separates_are_named(check: Any) -> None:
    """A plan makes two DTensors of a tied weight without an error."""
    [parity] = check(2, "sequence:shard=1")
    assert parity.status == "different"
    assert parity.first_divergence == "update 0, gradient of embedding.weight (float64)"
    assert parity.cause.startswith("embedding.weight and head.weight are one tensor")


def test_wrong_gradient_norm_is_named(check: Any) -> None:
    """One function counts replicated gradients of tensor ranks twice. The other clips by the norm of each rank."""
    counted_twice, clipped_locally = check(4, "norm_twice:tensor=2", "norm_here:tensor=2")
    assert counted_twice.status == clipped_locally.status == "different"
    assert "over shard and tensor" in counted_twice.cause
    assert "embedding.weight first" in counted_twice.cause
    assert "counted 2 times" in counted_twice.cause
    assert "each rank clips" in clipped_locally.cause


class CachingModel(zoo.FrozenModel):
    """A model whose forward changes the shape of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        self.table = torch.ones(5)
        return super().forward(values)


def test_buffer_that_forward_resizes_is_not_compared(check: Any) -> None:
    """A function gathers the tensors of the model as built. The buffer now has another shape."""
    [parity] = check(2, "ddp", name="frozen", model=CachingModel)
    assert parity.status == "equal", parity
    assert parity.not_compared == ["table"]


def test_parameter_that_parallelize_adds_is_named(check: Any) -> None:
    """The gradients of the other parameters are equal, until the new one has changed."""
    [parity] = check(2, "adds")
    assert parity.status == "different"
    assert "adds blocks.0.shift, which is trained, too" in parity.cause


def test_colwise_instead_of_rowwise_is_named(check: Any) -> None:
    """The message has the layer and its correct style."""
    [message] = check(2, "wrong_plan:shard=1")
    assert "my_parallel.py:wrong_plan: blocks.0.feed.down (Linear) raised in forward" in message
    assert "24 features, and it gets 12" in message
    assert message.endswith("rowwise")
    assert "\n" not in message


def test_loss_that_is_not_divided_by_the_context_ranks_is_named(check: Any) -> None:
    """The gradient has the wrong scale. AdamW and clipping hide this in the weights."""
    [parity] = check(2, "context_loss:data=1")
    assert parity.status == "different"
    assert parity.first_divergence == "update 0, gradient of embedding.weight (float64)"
    assert "2 times that of one device" in parity.cause
    assert "divide the loss by mesh['context'].size()" in parity.cause


def test_first_module_with_a_different_output_is_named(check: Any) -> None:
    """One attention uses only the positions of its rank. Batch norm uses only the samples of its rank."""
    [parity] = check(2, "context_alone:data=1")
    assert parity.status == "different"
    assert "blocks.2.attention.output (Linear), on rank 1" in parity.cause
    assert "in blocks.2.attention (Attention)" in parity.cause
    [parity] = check(2, "ddp", name="norm")
    assert "blocks.0.1 (BatchNorm1d), on rank 0, 1" in parity.cause
    assert "SyncBatchNorm" in parity.cause


def test_gradient_reduction_that_contradicts_the_contract_is_named(check: Any) -> None:
    """One function sums instead of averaging. The other one does not reduce."""
    summed, not_reduced = check(2, "summed", "not_reduced")
    assert summed.status == not_reduced.status == "different"
    assert "2 times that of one device" in summed.cause
    assert "it is summed over" in summed.cause
    for expected_text in (
        "different weights",
        "embedding.weight first",
        "ranks along data",
        "mean over data",
    ):
        assert expected_text in not_reduced.cause


def test_plain_shard_is_reported_as_not_compared(check: Any) -> None:
    """A shard in a plain tensor is not compared, and the scope names it. Clipping needs its norm, so it is refused."""
    [refused] = check(2, "parts")
    assert refused.status == "refused"
    assert refused.reason.startswith("my_parallel.py:parts: blocks.0.feed.down.weight")
    [parity] = check(2, "parts", clip_norm=None)
    assert parity.status == "equal"
    assert parity.scope == "4 updates; not compared: blocks.0.feed.down.weight"
    assert [text.endswith("not compared: blocks.0.feed.down.weight") for text in parity.checks] == [True] * 3


@pytest.mark.parametrize(
    ("name", "expected_name"),
    [
        ("module.blocks.0.weight", "blocks.0.weight"),
        ("_orig_mod.module.head.weight", "head.weight"),
        ("blocks.0._orig_mod.norm.weight", "blocks.0.norm.weight"),
        ("blocks.1._checkpoint_wrapped_module.weight", "blocks.1.weight"),
    ],
)
def test_clean_name_removes_wrappers(name: str, expected_name: str) -> None:
    """Names of tensors are found inside any wrapper."""
    assert clean_name(name) == expected_name


def test_model_with_a_submodule_named_module() -> None:
    """The name of a wrapper can also be the name of a submodule. Such a model is compared, too."""
    from everyrank.parallel.custom import gatherable_tensors

    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert set(gatherable_tensors(nn.ModuleDict({"_orig_mod": model}), shapes)) == {"module.weight", "module.bias"}
    model["module"].weight = nn.Parameter(torch.zeros(1, 2))
    assert set(gatherable_tensors(model, shapes)) == {"module.bias"}
