"""Mistakes in a custom parallelize function are named by the module or the tensor; code that repairs a part is not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.data import TensorDataset

from everyrank import Layout, ParallelContract, Workload
from everyrank.errors import EveryrankError
from everyrank.layout import register_custom_parallelize
from everyrank.loop import open_data
from everyrank.parity import check_layout, gradient_case, parity_case
from everyrank.record import Parity
from everyrank.world import World

pytestmark = pytest.mark.integration

_COUNTER = itertools.count()
WORDS, LENGTH, WIDTH = 12, 8, 16


# --- collectives with a gradient; nothing is done where the group is None


def added_up(value: Tensor, dim: int, group: Any) -> Tensor:
    value = value.clone()
    dist.all_reduce(value, group=group)
    return value


def gathered(value: Tensor, dim: int, group: Any) -> Tensor:
    rows = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, value.contiguous(), group=group)
    return torch.cat(rows, dim)


def own_part(value: Tensor, dim: int, group: Any) -> Tensor:
    return value.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def own_sum(value: Tensor, dim: int, group: Any) -> Tensor:
    return own_part(added_up(value, dim, group), dim, group)


def unchanged(value: Tensor, dim: int, group: Any) -> Tensor:
    return value.clone()


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, how: Any, dim: int, group: Any) -> Tensor:
        ctx.how = how, dim, group
        return how[0](value, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (_, back), dim, group = ctx.how
        return back(gradients[0].contiguous(), dim, group), None, None, None


def mapped(forward: Any, backward: Any) -> Callable[..., Tensor]:
    def call(value: Tensor, group: Any, dim: int = 1) -> Tensor:
        return value if group is None else _Mapped.apply(value, (forward, backward), dim, group)  # type: ignore[return-value]

    return call


copy, reduce = mapped(unchanged, added_up), mapped(added_up, unchanged)
scatter, gather_part, gather_sum = mapped(own_part, gathered), mapped(gathered, own_part), mapped(gathered, own_sum)
reduce_scatter = mapped(own_sum, gathered)


# --- a model whose blocks add up their parts in functions


class Rms(nn.Module):
    """A norm; `is_wide` and in parts, it needs the mean over all ranks."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, value: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6) * weight


class Lin(nn.Linear):
    """A linear layer that computes with its local part."""

    def forward(self, value: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return F.linear(value, weight)


def put(module: Any, name: str, mesh: Any, dim: int) -> None:
    parameter = getattr(module, name)
    setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)])))


class Mlp(nn.Module):
    group: Any = None
    way = ""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = Rms(), Lin(WIDTH, 32, bias=False), Lin(32, WIDTH, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Tensor:
        if self.way == "sequence" and self.group is not None:  # sequence parallel: dropout on a part of the positions
            value = copy(self.norm(value), self.group)
            part = reduce_scatter(self.down(F.gelu(self.up(value))), self.group)
            return gather_part(self.drop(part), self.group)
        value = copy(self.norm(value), self.group)
        return self.drop(reduce(self.down(F.gelu(self.up(value))), self.group))

    def split(self, mesh: Any) -> None:
        put(self.up, "weight", mesh, 0)
        put(self.down, "weight", mesh, 1)
        self.group = mesh.get_group()


class Attention(nn.Module):
    """Heads of four features; q is normed over its whole width."""

    group: Any = None
    sequence: Any = None
    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_norm = Rms(), Rms()
        self.q, self.k, self.v, self.o = (Lin(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        value = copy(self.norm(value), self.group)
        rows = [self.q_norm(self.q(value)), self.k(value), self.v(value)]
        query, key, held = (row.unflatten(-1, (-1, 4)).transpose(1, 2) for row in rows)
        back = gather_part if self.way == "stale" else gather_sum
        key, held = back(key, self.sequence, 2), gather_sum(held, self.sequence, 2)
        places, here = self.places(key.shape[2])
        scores = query @ key.transpose(-1, -2) / 2.0
        scores = scores.masked_fill(places[None] > here[:, None], -torch.inf)
        return reduce(self.o((scores.softmax(-1) @ held).transpose(1, 2).flatten(-2)), self.group)

    def places(self, length: int) -> tuple[Tensor, Tensor]:
        if self.sequence is None:
            return torch.arange(length), torch.arange(length)
        size, rank = dist.get_world_size(self.sequence), dist.get_rank(self.sequence)
        order = torch.tensor([chunk for one in range(size) for chunk in (one, 2 * size - 1 - one)])
        chunk = length // (2 * size)
        whole = (order[:, None] * chunk + torch.arange(chunk)).flatten()
        if self.way in ("", "stale"):
            whole = torch.arange(length)
        here = whole.chunk(size)[rank]
        return (torch.arange(length) if self.way == "contiguous keys" else whole), here


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(blocks)
        self.norm, self.head = Rms(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        value = self.embedding(tokens)
        for block in self.blocks:
            value = value + block(value)
        return self.head(self.norm(value))


class Whole(nn.Module):
    """A plain block whose matrices a plan can split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(value)))


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def data() -> TensorDataset:
    tokens = torch.randint(0, WORDS, (8, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def workload(model: Any, **changes: Any) -> Workload:
    made = Workload(
        name="mine",
        model=model,
        train_data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0),
        global_batch=8,
        steps=1,
        sequence_dim=1,
    )
    return dataclasses.replace(made, **changes)


def check(world: World, key: str, made: Workload, function: Any, mesh: Mapping[str, int], contract: Any) -> Any:
    layout = Layout(f"{key}.py:{getattr(function, '__name__', 'mine')}", degrees=dict(mesh))
    register_custom_parallelize(layout.strategy, function, contract)
    case = parity_case(made, *open_data(made, world), 1, is_quick=True)
    try:
        return check_layout(case if made.clip_norm else gradient_case(case), layout, world, key)[0]
    except EveryrankError as error:
        return error


@pytest.fixture
def compared(ranks: Any) -> Callable[..., Any]:
    """`compared(model, parallelize, {"tensor": 2})`: the parity of one update's gradients."""

    def call(model: Any, function: Any, mesh: Mapping[str, int], contract: Any = None, **changes: Any) -> Any:
        count = 1
        for size in mesh.values():
            count *= size
        arguments = (f"where/{next(_COUNTER)}", workload(model, **changes), function, mesh, contract)
        found = ranks(count, check, *arguments)
        assert len({getattr(one, "status", str(one)) for one in found}) == 1
        return found[0]

    return call


def cause(found: Any) -> str:
    assert isinstance(found, Parity), found
    assert found.status == "different", found
    return found.cause or ""


# --- forward


def split_all(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        block.split(mesh["tensor"])
    return model


def split_norm(model: Any, mesh: Any) -> Any:
    """The second block's norm over the whole width sees a part of it; the first block adds up its parts outside."""
    model.blocks[0].split(mesh["tensor"])
    attention = model.blocks[1]
    attention.group = mesh["tensor"].get_group()
    for layer in (attention.q, attention.k, attention.v, attention.q_norm):
        put(layer, "weight", mesh["tensor"], 0)
    put(attention.o, "weight", mesh["tensor"], 1)
    return model


def doubled_norm(model: Any, mesh: Any) -> Any:
    """Parts of a sum that are added up are right; the last norm is not."""
    split_all(model, mesh).norm.register_forward_hook(lambda module, args, output: output * 2)
    return model


def not_added_up(model: Any, mesh: Any) -> Any:
    split_all(model, mesh).blocks[1].forward = functools.partial(without_sum, model.blocks[1])
    return model


def without_sum(block: Any, value: Tensor) -> Tensor:
    return block.down(F.gelu(block.up(copy(block.norm(value), block.group))))


def of_sequence(model: Any, mesh: Any) -> Any:
    for block in split_all(model, mesh).blocks:
        block.way = "sequence"
    return model


def test_parts_that_are_added_up_are_not_accused(compared: Any) -> None:
    """The module in which it goes wrong is named, behind one whose parts a function adds up."""
    assert compared(lambda: Model(Mlp(), Mlp()), split_all, {"tensor": 2}).status == "equal"
    found = cause(compared(lambda: Model(Mlp(), Attention()), split_norm, {"tensor": 2}))
    assert "blocks.1.q_norm (Rms), on rank 0, 1" in found
    found = cause(compared(lambda: Model(Mlp(), Mlp()), doubled_norm, {"tensor": 2}))
    assert "that of norm (Rms), on rank 0, 1" in found
    assert "2 times" in found
    found = cause(compared(lambda: Model(Mlp(), Mlp()), not_added_up, {"tensor": 2}))
    assert "blocks.1.down (Lin), on rank 0, 1" in found
    assert "each rank has a part" in found


def test_masks_of_a_plain_part(compared: Any) -> None:
    """Dropout on a part that no DTensor describes: as docs/dropout.md says, the masks are named."""
    found = cause(compared(lambda: Model(Mlp(0.25)), of_sequence, {"tensor": 2}))
    assert "blocks.0.drop (Dropout), on rank 1" in found
    assert "masks" in found


# --- sequences, in backward, and in another order


def in_sequence(model: Any, mesh: Any, way: str = "") -> Any:
    for block in model.blocks:
        block.sequence, block.way = mesh["context"].get_group(), way
    return model


def add_up(model: Any, mesh: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


CONTEXT = ParallelContract(axes={"context": "sequence"}, gradients="sum", after_backward=add_up)


def test_where_backward_goes_wrong(compared: Any) -> None:
    """The gradient of gathered keys is not added up: named is the attention, and the keys."""
    mesh = {"context": 2}
    assert compared(lambda: Model(Attention(), Attention()), in_sequence, mesh, CONTEXT).status == "equal"
    wrong = functools.partial(in_sequence, way="stale")
    parity = compared(lambda: Model(Attention()), wrong, mesh, CONTEXT)
    found = cause(parity)
    assert "in backward" in found
    assert "output of blocks.0.k (Lin), in blocks.0 " in found
    assert "not summed" not in found
    assert "embedding" not in (parity.first_divergence or "")


def test_zigzag(compared: Any) -> None:
    """Positions in another order: everyrank cuts them so, and rows in that order are no difference."""
    contract = dataclasses.replace(CONTEXT, positions="zigzag")
    right = functools.partial(in_sequence, way="zigzag")
    for made in (contract, dataclasses.replace(contract, positions=lambda length, ranks: [0, 1, 6, 7, 2, 3, 4, 5])):
        assert compared(lambda: Model(Attention(), Attention()), right, {"context": 2}, made).status == "equal"
    wrong = functools.partial(in_sequence, way="contiguous keys")
    found = cause(compared(lambda: Model(Attention()), wrong, {"context": 2}, contract))
    assert "blocks.0.o (Lin)" in found
    assert "in blocks.0 (Attention)" in found
    bad = dataclasses.replace(contract, positions=lambda length, ranks: [0] * length)
    assert "positions 0 to 7 once" in str(compared(lambda: Model(Attention()), right, {"context": 2}, bad))


# --- what parallelize changes before the first update


def frozen_first() -> nn.Module:
    model = Model(Mlp(), Mlp())
    model.blocks[0].up.weight.requires_grad_(False)
    return model


def ddp(model: Any, mesh: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group())


def freezes(model: Any, mesh: Any) -> Any:
    model.blocks[0].up.weight.requires_grad_(False)
    return ddp(model, mesh)


def fills_again(model: Any, mesh: Any) -> Any:
    split_all(model, mesh)
    torch.manual_seed(7 + dist.get_rank())
    nn.init.xavier_normal_(model.blocks[0].down.weight.to_local().detach())
    return model


def fills_copies(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0, 0.1)
    return model


def permutes(model: Any, mesh: Any) -> Any:
    """The rows of a split matrix in another order, and the columns behind it: the same function, other places."""
    block, order = model.blocks[0], torch.arange(32).view(2, 8, 2).transpose(0, 1).flatten()
    with torch.no_grad():
        block.up.weight.copy_(block.up.weight[order].clone())
        block.down.weight.copy_(block.down.weight[:, order].clone())
    return split_all(model, mesh)


def put_back(model: Any, mesh: Any) -> dict[str, Tensor]:
    block, back = model.blocks[0], torch.arange(32).view(2, 8, 2).transpose(0, 1).flatten().argsort()
    up, down = block.up.weight.full_tensor(), block.down.weight.full_tensor()
    return {"blocks.0.up.weight": up[back], "blocks.0.down.weight": down[:, back]}


def casts(model: Any, mesh: Any) -> Any:
    model.norm.weight.data = model.norm.weight.data.to(torch.bfloat16)
    return ddp(model, mesh)


def test_what_parallelize_changes(compared: Any) -> None:
    """requires_grad both ways, weights, copies, dtypes, and an order that the contract puts right."""
    two = {"data": 2}
    parity = compared(lambda: Model(Mlp(), Mlp()), freezes, two)
    assert parity.first_divergence == "update 0, gradient of blocks.0.up.weight (float64)"
    assert "frozen (requires_grad=False)" in cause(parity)
    parity = compared(frozen_first, split_all, {"tensor": 2})
    assert parity.first_divergence == "update 0, gradient of blocks.0.up.weight (float64)"
    assert "trainable (requires_grad=True)" in cause(parity)
    parity = compared(lambda: Model(Mlp()), fills_again, {"tensor": 2})
    assert parity.first_divergence == "before any update, blocks.0.down.weight (float64)"
    assert "changes the values of blocks.0.down.weight" in cause(parity)
    found = cause(compared(lambda: Model(Mlp()), casts, two))
    assert "norm.weight: float64 in the model as built, but bfloat16" in found


def test_copies_that_differ(compared: Any) -> None:
    found = cause(compared(lambda: Model(Whole()), fills_copies, {"replicate": 2, "shard": 2}))
    assert "different copies of embedding.weight" in found


def test_another_order(compared: Any) -> None:
    """It is named, and equal where the contract puts the tensors together."""
    found = cause(compared(lambda: Model(Mlp()), permutes, {"tensor": 2}))
    assert "the same rows in a different order" in found
    contract = ParallelContract(axes={"tensor": "same"}, gather=put_back)
    assert compared(lambda: Model(Mlp()), permutes, {"tensor": 2}, contract).status == "equal"


# --- parts that no DTensor describes


class Flat(nn.Module):
    """FSDP by hand: the parameters of a block as one flat part."""

    def __init__(self, inner: nn.Module, mesh: Any, is_right: bool) -> None:
        super().__init__()
        self.shapes = [
            (module, name, parameter.shape)
            for module in inner.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        flat = torch.cat([parameter.detach().flatten() for parameter in inner.parameters()])
        self.group, self.gathers = mesh.get_group(), gather_sum if is_right else gather_part
        size = mesh.size()
        flat = F.pad(flat, (0, -flat.numel() % size))
        self.flat = nn.Parameter(flat.chunk(size)[mesh.get_local_rank()].clone())
        for module, name, _ in self.shapes:
            del module._parameters[name]
        object.__setattr__(self, "inner", inner)

    def forward(self, value: Tensor) -> Tensor:
        for (module, name, _), part in zip(self.shapes, self.parts(), strict=True):
            object.__setattr__(module, name, part)
        return self.inner(value)

    def parts(self) -> list[Tensor]:
        whole, found, start = self.gathers(self.flat, self.group, 0), [], 0
        for _, _, shape in self.shapes:
            found.append(whole[start : start + shape.numel()].view(shape))
            start += shape.numel()
        return found


def flattened(model: Any, mesh: Any, is_right: bool = True) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Flat(block, mesh["shard"], is_right)
    return model


def add_up_others(model: Any, mesh: Any) -> None:
    for name, parameter in model.named_parameters():
        if not name.endswith("flat"):
            dist.all_reduce(parameter.grad)


def together(model: Any, mesh: Any) -> dict[str, Tensor]:
    names = ["norm.weight", "up.weight", "down.weight"]
    return {
        f"blocks.{index}.{name}": part
        for index, block in enumerate(model.blocks)
        for name, part in zip(names, block.parts(), strict=True)
    }


FLAT = ParallelContract(axes={"shard": "batch"}, gradients="sum", after_backward=add_up_others)


def test_flat_parts_by_hand(compared: Any) -> None:
    """Without gather the names are in the result; with it a gradient that nobody adds up is found."""
    build, mesh = lambda: Model(Mlp(), Mlp()), {"shard": 2}
    parity = compared(build, flattened, mesh, FLAT)
    assert parity.status == "equal"
    assert parity.not_compared == [f"blocks.{i}.{n}.weight" for i in (0, 1) for n in ("norm", "up", "down")]
    contract = dataclasses.replace(FLAT, gather=together)
    parity = compared(build, flattened, mesh, contract)
    assert (parity.status, parity.not_compared) == ("equal", [])
    wrong = functools.partial(flattened, is_right=False)
    assert compared(build, wrong, mesh, FLAT).status == "equal"  # the hole that gather closes
    parity = compared(build, wrong, mesh, contract)
    assert parity.status == "different"
    assert parity.first_divergence == "update 0, gradient of blocks.1.down.weight (float64)"


@pytest.mark.parametrize(
    ("gather", "words"),
    [
        (lambda model, mesh: {"nothing.weight": torch.zeros(1)}, "gather returned nothing.weight"),
        (lambda model, mesh: {"norm.weight": torch.zeros(3)}, "gather returned norm.weight of shape (3,)"),
        (lambda model, mesh: [1], "gather returned list"),
    ],
)
def test_a_wrong_gather(compared: Any, gather: Any, words: str) -> None:
    contract = ParallelContract(axes={"data": "batch"}, gather=gather)
    assert words in str(compared(lambda: Model(Mlp()), ddp, {"data": 2}, contract))


# --- precision, contexts, asynchronous calls


def in_bf16(model: Any, mesh: Any) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["shard"], mp_policy=policy)


def test_mixed_precision_is_left_out(compared: Any) -> None:
    """The policy of fully_shard is no mistake in float64; the result names it."""
    parity = compared(lambda: Model(Whole()), in_bf16, {"shard": 2}, clip_norm=0.1)
    assert parity.status == "equal", parity
    assert any("param_dtype=bfloat16, reduce_dtype=float32" in line for line in parity.checks)


def in_vocabulary(model: Any, mesh: Any) -> Any:
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    plan = {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel(), "head": head}
    return parallelize_module(model, mesh["tensor"], plan)


def loss_of_parts(output: Any, target: Tensor) -> tuple[Any, int]:
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total.full_tensor() if isinstance(total, DTensor) else total, target.numel()


@contextlib.contextmanager
def shortened(model: Any, mesh: Any, batch: Any) -> Any:
    """As torch's context_parallel: the tensors of the batch are cut in place, and put back."""
    size, rank = mesh["context"].size(), mesh["context"].get_local_rank()
    whole = [tensor.clone() for tensor in batch]
    for tensor in batch:
        part = tensor.chunk(size, 1)[rank].clone()
        tensor.resize_(part.shape).copy_(part)
    yield
    for tensor, before in zip(batch, whole, strict=True):
        tensor.resize_(before.shape).copy_(before)


def test_contexts(compared: Any) -> None:
    """loss_parallel has to be open in backward, too; a context may cut the sequences itself."""
    contract = ParallelContract(axes={"tensor": "same"}, context=lambda model, mesh, batch: loss_parallel())
    build = lambda: Model(Whole())  # noqa: E731
    assert compared(build, in_vocabulary, {"tensor": 2}, contract, loss=loss_of_parts).status == "equal"
    cuts = dataclasses.replace(CONTEXT, context=shortened, cut_by_context=True)
    assert compared(lambda: Model(Attention()), in_sequence, {"context": 2}, cuts).status == "equal"


def gathered_early(value: Tensor, dim: int, group: Any, waits: bool) -> Tensor:
    rows = [torch.zeros_like(value) for _ in range(dist.get_world_size(group))]
    work: Any = dist.all_gather(rows, value.contiguous(), group=group, async_op=True)
    if waits:
        work.wait()
    whole = torch.cat(rows, dim)
    work.wait()
    return whole


def asynchronous(model: Any, mesh: Any, waits: bool = True) -> Any:
    """Sequence parallel: each rank norms its positions, and gathers them asynchronously."""
    group = mesh["tensor"].get_group()
    gather = mapped(functools.partial(gathered_early, waits=waits), own_sum)

    def forward(block: Any, value: Tensor) -> Tensor:
        part = F.rms_norm(scatter(value, group), (WIDTH,), eps=1e-6) * copy(block.norm.weight, group)
        return reduce(block.down(F.gelu(block.up(gather(part, group)))), group)

    for block in split_all(model, mesh).blocks:
        block.forward = functools.partial(forward, block)
    return model


def asynchronous_backward(model: Any, mesh: Any, waits: bool = True) -> Any:
    works: list[Any] = []

    def start(parameter: Any) -> None:
        work: Any = dist.all_reduce(parameter.grad, group=mesh["data"].get_group(), async_op=True)
        works.append(work)
        if waits:
            work.wait()
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)
    return model


def test_read_before_wait(compared: Any) -> None:
    """Each time, in forward and in backward, with the line; waiting is right."""
    for function, mesh, words in (
        (asynchronous, {"tensor": 2}, "the result of all_gather, which test_where_it_goes_wrong.py:"),
        (asynchronous_backward, {"data": 2}, "the result of all_reduce, which test_where_it_goes_wrong.py:"),
    ):
        right, wrong = functools.partial(function, waits=True), functools.partial(function, waits=False)
        build = lambda: Model(Mlp())  # noqa: E731
        assert compared(build, right, mesh).status == "equal"
        found = cause(compared(build, wrong, mesh))
        assert words in found
        assert "is read before work.wait()" in found
