"""Own parallel code: right ones are equal to one device, and each mistake in one is red with its cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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

FILE = '''\
"""As a person keeps it: outside of everyrank, in the shape of torchtitan's."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
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
ddp.contract = not_reduced.contract = ParallelContract()
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
    """Parity of each layout, in the ranks; the message of one that is refused before."""
    subject = zoo.case(world, changes.pop("name", "decoder"), "adamw", **changes)
    found: list[Parity | str] = []
    for text in layouts:
        try:
            found.append(check_layout(subject, parse_layout(text), world, f"{key}/{text}")[0])
        except EveryrankError as error:
            found.append(str(error))
    return found


@pytest.fixture
def check(ranks: Any, tmp_path: Path) -> Any:
    """`check(ranks, "ddp:data=2")`: the parity, or the message, of functions in a file outside of the repository."""
    path = tmp_path / "my_parallel.py"
    path.write_text(FILE)

    def call(count: int, *layouts: str, **changes: Any) -> list[Any]:
        places = [f"{path}:{layout}" for layout in (layouts if count <= 2 else in_float64(layouts))]
        return ranks(count, check_all, f"own/{next(_COUNTER)}", places, {"steps": 6, **changes})[0]

    return call


def test_right_ones_are_equal(check: Any) -> None:
    """DistributedDataParallel, fully_shard, a DTensor plan, collectives of one's own: on two ranks."""
    layouts = ["ddp", "parallelize:tensor=1", "parallelize:shard=1", "by_hand", "norm_once:tensor=1", "context:data=1"]
    found = check(2, *layouts)
    assert [getattr(parity, "status", parity) for parity in found] == ["equal"] * len(layouts), found
    assert [parity.status for parity in check(2, "ddp:accumulate=3", "by_hand:accumulate=3")] == ["equal", "equal"]
    assert found[0].checks[0].startswith("gradients, float64, 3 updates: 3 losses")


def test_tensor_then_fully_shard(check: Any) -> None:
    """The shape of torchtitan's on four ranks, each rank with a part of each matrix: also clipped by its own norm."""
    found = check(4, "parallelize:tensor=2", "norm_once:tensor=2")
    assert [getattr(parity, "status", parity) for parity in found] == ["equal", "equal"], found


def untied() -> nn.Module:
    """A decoder whose head has weights of its own: a plan splits the two of a tied one apart."""
    return zoo.decoder(tied=False)


def test_a_plan_with_split_sequences(check: Any) -> None:
    """Matrices, sequences and the vocabulary split, as torchtitan does; then fully_shard."""
    for count, layout in ((2, "sequence:shard=1"), (4, "titan:tensor=2")):
        [parity] = check(count, layout, model=untied)
        assert getattr(parity, "status", parity) == "equal", parity


def test_tied_weights_split_apart(check: Any) -> None:
    """A plan makes two DTensors of one weight, in silence."""
    [parity] = check(2, "sequence:shard=1")
    assert parity.status == "different"
    assert parity.first_divergence == "update 0, gradient of embedding.weight (float64)"
    assert parity.cause.startswith("embedding.weight and head.weight are one tensor")


def test_norm_counted_twice(check: Any) -> None:
    """What all tensor ranks hold alike counts twice in the norm; clipped by each rank's own norm."""
    twice, here = check(4, "norm_twice:tensor=2", "norm_here:tensor=2")
    assert twice.status == here.status == "different"
    assert "over shard and tensor" in twice.cause
    assert "embedding.weight first" in twice.cause
    assert "counted 2 times" in twice.cause
    assert "each rank clips" in here.cause


def test_rowwise_taken_for_colwise(check: Any) -> None:
    """The layer is named, and what it has to be."""
    [message] = check(2, "wrong_plan:shard=1")
    assert "my_parallel.py:wrong_plan: blocks.0.feed.down (Linear) raised in forward" in message
    assert "24 features, and it gets 12" in message
    assert message.endswith("rowwise")
    assert "\n" not in message


def test_loss_not_divided_by_the_context_ranks(check: Any) -> None:
    """A gradient of the wrong scale, under AdamW and clipping, which hide it from the weights."""
    [parity] = check(2, "context_loss:data=1")
    assert parity.status == "different"
    assert parity.first_divergence == "update 0, gradient of embedding.weight (float64)"
    assert "2 times that of one device" in parity.cause
    assert "divide the loss by mesh['context'].size()" in parity.cause


def test_the_first_output_that_differs(check: Any) -> None:
    """What runs and is another model: one attention that sees its own rank's positions; batch norm of each rank."""
    [parity] = check(2, "context_alone:data=1")
    assert parity.status == "different"
    assert "blocks.2.attention.output (Linear), on rank 1" in parity.cause
    assert "in blocks.2.attention (Attention)" in parity.cause
    [parity] = check(2, "ddp", name="norm")
    assert "blocks.0.1 (BatchNorm1d), on rank 0, 1" in parity.cause
    assert "SyncBatchNorm" in parity.cause


def test_gradients_that_are_not_what_the_contract_says(check: Any) -> None:
    """A sum where it says mean, a mean where it says sum, and nothing reduced at all."""
    summed, not_reduced = check(2, "summed", "not_reduced")
    assert summed.status == not_reduced.status == "different"
    assert "2 times that of one device" in summed.cause
    assert "it is summed over" in summed.cause
    for part in (
        "different weights",
        "embedding.weight first",
        "ranks along data",
        "mean over data",
    ):
        assert part in not_reduced.cause


def test_what_cannot_be_put_together_is_said(check: Any) -> None:
    """A part that no DTensor tells the place of is not compared, aloud; its norm cannot be known."""
    [refused] = check(2, "parts")
    assert refused.status == "refused"
    assert refused.reason.startswith("my_parallel.py:parts: blocks.0.feed.down.weight")
    [parity] = check(2, "parts", clip_norm=None)
    assert parity.status == "equal"
    assert parity.scope == "6 updates; not compared: blocks.0.feed.down.weight"
    assert [text.endswith("not compared: blocks.0.feed.down.weight") for text in parity.checks] == [True] * 3


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("module.blocks.0.weight", "blocks.0.weight"),
        ("_orig_mod.module.head.weight", "head.weight"),
        ("blocks.0._orig_mod.norm.weight", "norm.weight"),
        ("blocks.1._checkpoint_wrapped_module.weight", "blocks.1.weight"),
    ],
)
def test_wrappers_leave_names(name: str, clean: str) -> None:
    """Whatever is wrapped around a module, its tensors are found again."""
    assert clean_name(name).endswith(clean)


def test_names_of_wrappers_that_are_the_models_own() -> None:
    """A model that has a `module` itself is compared, too."""
    from everyrank.parallel.custom import gatherable_tensors

    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert set(gatherable_tensors(nn.ModuleDict({"_orig_mod": model}), shapes)) == {"module.weight", "module.bias"}
    model["module"].weight = nn.Parameter(torch.zeros(1, 2))
    assert set(gatherable_tensors(model, shapes)) == {"module.bias"}
