"""Parity names the module or tensor of each mistake in a custom parallelize function. Correct code is not accused."""

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
from everyrank.layout import CustomParallelize, register_custom_parallelize
from everyrank.loop import open_data
from everyrank.parity import check_layout, gradient_case, parity_case
from everyrank.parity.custom_gradients import _axis_cause
from everyrank.parity.outputs import _misplaced_features
from everyrank.record import Parity
from everyrank.world import World

pytestmark = pytest.mark.integration

_COUNTER = itertools.count()
VOCABULARY, LENGTH, WIDTH = 12, 8, 16


# --- collectives with a gradient; they return their argument if the group is None


def all_reduced(value: Tensor, dim: int, group: Any) -> Tensor:
    value = value.clone()
    dist.all_reduce(value, group=group)
    return value


def all_gathered(value: Tensor, dim: int, group: Any) -> Tensor:
    chunks = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(chunks, value.contiguous(), group=group)
    return torch.cat(chunks, dim)


def local_chunk(value: Tensor, dim: int, group: Any) -> Tensor:
    return value.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def reduce_scattered(value: Tensor, dim: int, group: Any) -> Tensor:
    return local_chunk(all_reduced(value, dim, group), dim, group)


def unchanged(value: Tensor, dim: int, group: Any) -> Tensor:
    return value.clone()


class _Collective(torch.autograd.Function):
    """Apply the first function in forward, and the second one to the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, functions: Any, dim: int, group: Any) -> Tensor:
        ctx.saved_args = functions, dim, group
        return functions[0](value, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (_, backward_function), dim, group = ctx.saved_args
        return backward_function(gradients[0].contiguous(), dim, group), None, None, None


def collective_with_gradient(forward: Any, backward: Any) -> Callable[..., Tensor]:
    """Return `call(value, group, dim)`, which applies these functions in forward and in backward."""

    def call(value: Tensor, group: Any, dim: int = 1) -> Tensor:
        return value if group is None else _Collective.apply(value, (forward, backward), dim, group)  # type: ignore[return-value]

    return call


copy, reduce = collective_with_gradient(unchanged, all_reduced), collective_with_gradient(all_reduced, unchanged)
scatter = collective_with_gradient(local_chunk, all_gathered)
gather_part = collective_with_gradient(all_gathered, local_chunk)
gather_sum = collective_with_gradient(all_gathered, reduce_scattered)
reduce_scatter = collective_with_gradient(reduce_scattered, all_gathered)


# --- a model whose blocks all-reduce partial sums in functions


class Rms(nn.Module):
    """RMS norm. If its input is split along the width, it would need the mean over all ranks."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, value: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6) * weight


class Lin(nn.Linear):
    """A linear layer that uses its local shard."""

    def forward(self, value: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return F.linear(value, weight)


def shard_parameter(module: Any, name: str, mesh: Any, dim: int) -> None:
    """Replace a parameter by a DTensor that is split along `dim`."""
    parameter = getattr(module, name)
    setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)])))


class Mlp(nn.Module):
    group: Any = None
    mode = ""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = Rms(), Lin(WIDTH, 32, bias=False), Lin(32, WIDTH, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Tensor:
        if self.mode == "sequence" and self.group is not None:
            # sequence parallel: dropout applies to the local positions
            value = copy(self.norm(value), self.group)
            part = reduce_scatter(self.down(F.gelu(self.up(value))), self.group)
            return gather_part(self.drop(part), self.group)
        value = copy(self.norm(value), self.group)
        return self.drop(reduce(self.down(F.gelu(self.up(value))), self.group))

    def split(self, mesh: Any) -> None:
        shard_parameter(self.up, "weight", mesh, 0)
        shard_parameter(self.down, "weight", mesh, 1)
        self.group = mesh.get_group()


class Attention(nn.Module):
    """Attention with heads of four features. The norm of q covers the whole width."""

    group: Any = None
    sequence: Any = None
    mode = ""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_norm = Rms(), Rms()
        self.q, self.k, self.v, self.o = (Lin(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        value = copy(self.norm(value), self.group)
        projections = [self.q_norm(self.q(value)), self.k(value), self.v(value)]
        query, key, head_values = (projection.unflatten(-1, (-1, 4)).transpose(1, 2) for projection in projections)
        gather_keys = gather_part if self.mode == "stale" else gather_sum
        key, head_values = gather_keys(key, self.sequence, 2), gather_sum(head_values, self.sequence, 2)
        key_positions, query_positions = self.key_and_query_positions(key.shape[2])
        scores = query @ key.transpose(-1, -2) / 2.0
        scores = scores.masked_fill(key_positions[None] > query_positions[:, None], -torch.inf)
        return reduce(self.o((scores.softmax(-1) @ head_values).transpose(1, 2).flatten(-2)), self.group)

    def key_and_query_positions(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the positions of the gathered keys and of the local queries."""
        if self.sequence is None:
            return torch.arange(length), torch.arange(length)
        size, rank = dist.get_world_size(self.sequence), dist.get_rank(self.sequence)
        zigzag_order = torch.tensor([chunk for index in range(size) for chunk in (index, 2 * size - 1 - index)])
        chunk_length = length // (2 * size)
        all_positions = (zigzag_order[:, None] * chunk_length + torch.arange(chunk_length)).flatten()
        if self.mode in ("", "stale"):
            all_positions = torch.arange(length)
        local_positions = all_positions.chunk(size)[rank]
        return (torch.arange(length) if self.mode == "contiguous keys" else all_positions), local_positions


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(blocks)
        self.norm, self.head = Rms(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        value = self.embedding(tokens)
        for block in self.blocks:
            value = value + block(value)
        return self.head(self.norm(value))


class PlainBlock(nn.Module):
    """A plain block whose matrices a plan can split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(value)))


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def token_data() -> TensorDataset:
    tokens = torch.randint(0, VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def workload(model: Any, **changes: Any) -> Workload:
    base_workload = Workload(
        name="mine",
        model=model,
        train_data=token_data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0
        ),
        global_batch=8,
        steps=1,
        sequence_dim=1,
    )
    return dataclasses.replace(base_workload, **changes)


def check(
    world: World, key: str, checked_workload: Workload, function: Any, mesh: Mapping[str, int], contract: Any
) -> Any:
    """Return the parity of one update under this parallelize function, or the error."""
    layout = Layout(f"{key}.py:{getattr(function, '__name__', 'mine')}", degrees=dict(mesh))
    register_custom_parallelize(layout.strategy, function, contract)
    case = parity_case(checked_workload, *open_data(checked_workload, world), 1, is_quick=True)
    try:
        return check_layout(case if checked_workload.clip_norm else gradient_case(case), layout, world, key)[0]
    except EveryrankError as error:
        return error


@pytest.fixture
def compare(ranks: Any) -> Callable[..., Any]:
    """`compare(model, parallelize, {"tensor": 2})` returns the parity of the gradients of one update."""

    def call(model: Any, function: Any, mesh: Mapping[str, int], contract: Any = None, **changes: Any) -> Any:
        count = 1
        for size in mesh.values():
            count *= size
        args = (f"where/{next(_COUNTER)}", workload(model, **changes), function, mesh, contract)
        rank_results = ranks(count, check, *args)
        assert len({getattr(result, "status", str(result)) for result in rank_results}) == 1
        return rank_results[0]

    return call


def cause_of(parity: Any) -> str:
    """Assert that the status is different, and return the cause."""
    assert isinstance(parity, Parity), parity
    assert parity.status == "different", parity
    return parity.cause or ""


# --- forward


def split_all(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        block.split(mesh["tensor"])
    return model


def split_norm(model: Any, mesh: Any) -> Any:
    """The norm of q in the second block covers only a part of the width. The first block all-reduces its output."""
    model.blocks[0].split(mesh["tensor"])
    attention = model.blocks[1]
    attention.group = mesh["tensor"].get_group()
    for layer in (attention.q, attention.k, attention.v, attention.q_norm):
        shard_parameter(layer, "weight", mesh["tensor"], 0)
    shard_parameter(attention.o, "weight", mesh["tensor"], 1)
    return model


def doubled_norm(model: Any, mesh: Any) -> Any:
    """Partial sums are all-reduced correctly. The output of the last norm is doubled."""
    split_all(model, mesh).norm.register_forward_hook(lambda module, args, output: output * 2)
    return model


def without_all_reduce(model: Any, mesh: Any) -> Any:
    split_all(model, mesh).blocks[1].forward = functools.partial(mlp_without_all_reduce, model.blocks[1])
    return model


def mlp_without_all_reduce(block: Any, value: Tensor) -> Tensor:
    return block.down(F.gelu(block.up(copy(block.norm(value), block.group))))


def sequence_parallel(model: Any, mesh: Any) -> Any:
    for block in split_all(model, mesh).blocks:
        block.mode = "sequence"
    return model


def test_wrong_module_is_named_instead_of_partial_sums(compare: Any) -> None:
    """Blocks before it have different local outputs, which a function all-reduces. They are not named."""
    assert compare(lambda: Model(Mlp(), Mlp()), split_all, {"tensor": 2}).status == "equal"
    cause = cause_of(compare(lambda: Model(Mlp(), Attention()), split_norm, {"tensor": 2}))
    assert "blocks.1.q_norm (Rms), on rank 0, 1" in cause
    cause = cause_of(compare(lambda: Model(Mlp(), Mlp()), doubled_norm, {"tensor": 2}))
    assert "that of norm (Rms), on rank 0, 1" in cause
    assert "2 times" in cause
    cause = cause_of(compare(lambda: Model(Mlp(), Mlp()), without_all_reduce, {"tensor": 2}))
    assert "blocks.1.down (Lin), on rank 0, 1" in cause
    assert "each rank has a part" in cause


def test_dropout_of_a_plain_shard_is_named(compare: Any) -> None:
    """No DTensor describes the shard that drops. As docs/dropout.md documents, the masks are named."""
    cause = cause_of(compare(lambda: Model(Mlp(0.25)), sequence_parallel, {"tensor": 2}))
    assert "blocks.0.drop (Dropout), on rank 1" in cause
    assert "masks" in cause


# --- context parallelism: backward and the order of positions


def context_parallel(model: Any, mesh: Any, mode: str = "") -> Any:
    for block in model.blocks:
        block.sequence, block.mode = mesh["context"].get_group(), mode
    return model


def all_reduce_gradients(model: Any, mesh: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


CONTEXT_CONTRACT = ParallelContract(axes={"context": "sequence"}, gradients="sum", after_backward=all_reduce_gradients)


def test_missing_sum_in_backward_is_named(compare: Any) -> None:
    """The gradient of the gathered keys is not reduced. The attention and its keys are named."""
    mesh = {"context": 2}
    assert compare(lambda: Model(Attention(), Attention()), context_parallel, mesh, CONTEXT_CONTRACT).status == "equal"
    wrong = functools.partial(context_parallel, mode="stale")
    parity = compare(lambda: Model(Attention()), wrong, mesh, CONTEXT_CONTRACT)
    cause = cause_of(parity)
    assert "in backward" in cause
    assert "output of blocks.0.k (Lin), in blocks.0 " in cause
    assert "not summed" not in cause
    assert "embedding" not in (parity.first_divergence or "")


def test_zigzag_positions(compare: Any) -> None:
    """everyrank splits sequences in the order of the contract, so rows in that order are not a difference."""
    contract = dataclasses.replace(CONTEXT_CONTRACT, positions="zigzag")
    correct = functools.partial(context_parallel, mode="zigzag")
    for zigzag_contract in (
        contract,
        dataclasses.replace(contract, positions=lambda length, ranks: [0, 1, 6, 7, 2, 3, 4, 5]),
    ):
        assert (
            compare(lambda: Model(Attention(), Attention()), correct, {"context": 2}, zigzag_contract).status == "equal"
        )
    wrong = functools.partial(context_parallel, mode="contiguous keys")
    cause = cause_of(compare(lambda: Model(Attention()), wrong, {"context": 2}, contract))
    assert "blocks.0.o (Lin)" in cause
    assert "in blocks.0 (Attention)" in cause
    invalid_contract = dataclasses.replace(contract, positions=lambda length, ranks: [0] * length)
    assert "positions 0 to 7 once" in str(
        compare(lambda: Model(Attention()), correct, {"context": 2}, invalid_contract)
    )


# --- what parallelize changes before the first update


def model_with_frozen_weight() -> nn.Module:
    """Return a model with a frozen weight in the first block."""
    model = Model(Mlp(), Mlp())
    model.blocks[0].up.weight.requires_grad_(False)
    return model


def ddp(model: Any, mesh: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group())


def freezes(model: Any, mesh: Any) -> Any:
    model.blocks[0].up.weight.requires_grad_(False)
    return ddp(model, mesh)


def initializes_again(model: Any, mesh: Any) -> Any:
    split_all(model, mesh)
    torch.manual_seed(7 + dist.get_rank())
    nn.init.xavier_normal_(model.blocks[0].down.weight.to_local().detach())
    return model


def initializes_copies_differently(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0, 0.1)
    return model


def permutes(model: Any, mesh: Any) -> Any:
    """Permute the rows of a split matrix and the columns of the next one. The model is the same function."""
    block, row_order = model.blocks[0], torch.arange(32).view(2, 8, 2).transpose(0, 1).flatten()
    with torch.no_grad():
        block.up.weight.copy_(block.up.weight[row_order].clone())
        block.down.weight.copy_(block.down.weight[:, row_order].clone())
    return split_all(model, mesh)


def restore_order(model: Any, mesh: Any) -> dict[str, Tensor]:
    """Return the permuted tensors in their original order. The contract uses this as `gather`."""
    block, inverse_order = model.blocks[0], torch.arange(32).view(2, 8, 2).transpose(0, 1).flatten().argsort()
    up, down = block.up.weight.full_tensor(), block.down.weight.full_tensor()
    return {"blocks.0.up.weight": up[inverse_order], "blocks.0.down.weight": down[:, inverse_order]}


def casts(model: Any, mesh: Any) -> Any:
    model.norm.weight.data = model.norm.weight.data.to(torch.bfloat16)
    return ddp(model, mesh)


def changes_buffer(model: Any, mesh: Any) -> Any:
    model.blocks[0].get_buffer("scale").add_(1.0)
    return ddp(model, mesh)


def model_with_buffer() -> nn.Module:
    """Return a model with a buffer in the first block."""
    model = Model(Mlp())
    model.blocks[0].register_buffer("scale", torch.ones(1))
    return model


def test_changes_of_parameters_by_parallelize_are_named(compare: Any) -> None:
    """Parallelize changes requires_grad, initial values or the dtype of a parameter, or a buffer."""
    mesh = {"data": 2}
    parity = compare(lambda: Model(Mlp(), Mlp()), freezes, mesh)
    assert parity.first_divergence == "update 0, gradient of blocks.0.up.weight (float64)"
    assert "frozen (requires_grad=False)" in cause_of(parity)
    parity = compare(model_with_frozen_weight, split_all, {"tensor": 2})
    assert parity.first_divergence == "update 0, gradient of blocks.0.up.weight (float64)"
    assert "trainable (requires_grad=True)" in cause_of(parity)
    parity = compare(lambda: Model(Mlp()), initializes_again, {"tensor": 2})
    assert parity.first_divergence == "before any update, blocks.0.down.weight (float64)"
    assert "changes the values of blocks.0.down.weight" in cause_of(parity)
    cause = cause_of(compare(lambda: Model(Mlp()), casts, mesh))
    assert "norm.weight: float64 in the model as built, but bfloat16" in cause
    cause = cause_of(compare(model_with_buffer, changes_buffer, mesh))
    assert cause.endswith("changes the buffer blocks.0.scale")
    assert "random numbers" not in cause


def test_different_replicas_are_named(compare: Any) -> None:
    cause = cause_of(compare(lambda: Model(PlainBlock()), initializes_copies_differently, {"replicate": 2, "shard": 2}))
    assert "different copies of embedding.weight" in cause


def test_permuted_rows_are_named_or_restored_by_gather(compare: Any) -> None:
    """Without `gather`, the cause is the order of rows. With `gather`, the tensors are equal."""
    cause = cause_of(compare(lambda: Model(Mlp()), permutes, {"tensor": 2}))
    assert "the same rows in a different order" in cause
    contract = ParallelContract(axes={"tensor": "same"}, gather=restore_order)
    assert compare(lambda: Model(Mlp()), permutes, {"tensor": 2}, contract).status == "equal"


# --- shards that no DTensor describes


class Flat(nn.Module):
    """A custom FSDP that keeps a flat shard of the parameters of a block."""

    def __init__(self, inner: nn.Module, mesh: Any, sums_gradients: bool) -> None:
        super().__init__()
        self.shapes = [
            (module, name, parameter.shape)
            for module in inner.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        flat = torch.cat([parameter.detach().flatten() for parameter in inner.parameters()])
        self.group, self.gathers = mesh.get_group(), gather_sum if sums_gradients else gather_part
        size = mesh.size()
        flat = F.pad(flat, (0, -flat.numel() % size))
        self.flat = nn.Parameter(flat.chunk(size)[mesh.get_local_rank()].clone())
        for module, name, _ in self.shapes:
            del module._parameters[name]
        object.__setattr__(self, "inner", inner)

    def forward(self, value: Tensor) -> Tensor:
        for (module, name, _), tensor in zip(self.shapes, self.full_tensors(), strict=True):
            object.__setattr__(module, name, tensor)
        return self.inner(value)

    def full_tensors(self) -> list[Tensor]:
        flat, tensors, start = self.gathers(self.flat, self.group, 0), [], 0
        for _, _, shape in self.shapes:
            tensors.append(flat[start : start + shape.numel()].view(shape))
            start += shape.numel()
        return tensors


def shard_flat(model: Any, mesh: Any, sums_gradients: bool = True) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Flat(block, mesh["shard"], sums_gradients)
    return model


def all_reduce_other_gradients(model: Any, mesh: Any) -> None:
    for name, parameter in model.named_parameters():
        if not name.endswith("flat"):
            dist.all_reduce(parameter.grad)


def gather_flat_parameters(model: Any, mesh: Any) -> dict[str, Tensor]:
    """Return the full parameters of each block by name. The contract uses this as `gather`."""
    names = ["norm.weight", "up.weight", "down.weight"]
    return {
        f"blocks.{index}.{name}": tensor
        for index, block in enumerate(model.blocks)
        for name, tensor in zip(names, block.full_tensors(), strict=True)
    }


FLAT_CONTRACT = ParallelContract(axes={"shard": "batch"}, gradients="sum", after_backward=all_reduce_other_gradients)


def test_flat_shards_are_compared_with_gather(compare: Any) -> None:
    """Without `gather`, the result lists the parameters as not compared.

    With `gather`, a gradient that is not reduced is detected.
    """
    build_model, mesh = lambda: Model(Mlp(), Mlp()), {"shard": 2}
    parity = compare(build_model, shard_flat, mesh, FLAT_CONTRACT)
    assert parity.status == "equal"
    assert parity.not_compared == [f"blocks.{i}.{n}.weight" for i in (0, 1) for n in ("norm", "up", "down")]
    contract = dataclasses.replace(FLAT_CONTRACT, gather=gather_flat_parameters)
    parity = compare(build_model, shard_flat, mesh, contract)
    assert (parity.status, parity.not_compared) == ("equal", [])
    wrong = functools.partial(shard_flat, sums_gradients=False)
    # without gather, the mistake is not detected
    assert compare(build_model, wrong, mesh, FLAT_CONTRACT).status == "equal"
    parity = compare(build_model, wrong, mesh, contract)
    assert parity.status == "different"
    assert parity.first_divergence == "update 0, gradient of blocks.1.down.weight (float64)"


@pytest.mark.parametrize(
    ("gather", "expected_text"),
    [
        (lambda model, mesh: {"nothing.weight": torch.zeros(1)}, "gather returned nothing.weight"),
        (lambda model, mesh: {"norm.weight": torch.zeros(3)}, "gather returned norm.weight of shape (3,)"),
        (lambda model, mesh: [1], "gather returned list"),
    ],
)
def test_wrong_result_of_gather_is_refused(compare: Any, gather: Any, expected_text: str) -> None:
    contract = ParallelContract(axes={"data": "batch"}, gather=gather)
    assert expected_text in str(compare(lambda: Model(Mlp()), ddp, {"data": 2}, contract))


# --- precision, contexts, asynchronous calls


def fully_shard_in_bf16(model: Any, mesh: Any) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["shard"], mp_policy=policy)


def test_mixed_precision_policy_is_ignored_in_float64(compare: Any) -> None:
    """The policy of fully_shard is not a mistake in float64. The result lists the policy."""
    parity = compare(lambda: Model(PlainBlock()), fully_shard_in_bf16, {"shard": 2}, clip_norm=0.1)
    assert parity.status == "equal", parity
    assert any("param_dtype=bfloat16, reduce_dtype=float32" in line for line in parity.checks)


def split_vocabulary(model: Any, mesh: Any) -> Any:
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    plan = {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel(), "head": head}
    return parallelize_module(model, mesh["tensor"], plan)


def vocabulary_parallel_loss(output: Any, target: Tensor) -> tuple[Any, int]:
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total.full_tensor() if isinstance(total, DTensor) else total, target.numel()


@contextlib.contextmanager
def cut_batch(model: Any, mesh: Any, batch: Any) -> Any:
    """Cut the tensors of the batch in place, and restore them, as torch's context_parallel does."""
    size, rank = mesh["context"].size(), mesh["context"].get_local_rank()
    originals = [tensor.clone() for tensor in batch]
    for tensor in batch:
        part = tensor.chunk(size, 1)[rank].clone()
        tensor.resize_(part.shape).copy_(part)
    yield
    for tensor, original in zip(batch, originals, strict=True):
        tensor.resize_(original.shape).copy_(original)


def test_context_of_the_contract_is_open(compare: Any) -> None:
    """loss_parallel has to be open in backward, too. A context may also cut the sequences itself."""
    contract = ParallelContract(axes={"tensor": "same"}, context=lambda model, mesh, batch: loss_parallel())
    build_model = lambda: Model(PlainBlock())  # noqa: E731
    parity = compare(build_model, split_vocabulary, {"tensor": 2}, contract, loss=vocabulary_parallel_loss)
    assert parity.status == "equal"
    cutting_contract = dataclasses.replace(CONTEXT_CONTRACT, context=cut_batch, cut_by_context=True)
    assert compare(lambda: Model(Attention()), context_parallel, {"context": 2}, cutting_contract).status == "equal"


def gather_asynchronously(value: Tensor, dim: int, group: Any, waits: bool) -> Tensor:
    """Gather asynchronously. Without `waits`, the result is read before work.wait()."""
    chunks = [torch.zeros_like(value) for _ in range(dist.get_world_size(group))]
    work: Any = dist.all_gather(chunks, value.contiguous(), group=group, async_op=True)
    if waits:
        work.wait()
    gathered_value = torch.cat(chunks, dim)
    work.wait()
    return gathered_value


def asynchronous_forward(model: Any, mesh: Any, waits: bool = True) -> Any:
    """Sequence parallel. Each rank normalizes its positions, and gathers them asynchronously."""
    group = mesh["tensor"].get_group()
    gather = collective_with_gradient(functools.partial(gather_asynchronously, waits=waits), reduce_scattered)

    def forward(block: Any, value: Tensor) -> Tensor:
        part = F.rms_norm(scatter(value, group), (WIDTH,), eps=1e-6) * copy(block.norm.weight, group)
        return reduce(block.down(F.gelu(block.up(gather(part, group)))), group)

    for block in split_all(model, mesh).blocks:
        block.forward = functools.partial(forward, block)
    return model


def asynchronous_backward(model: Any, mesh: Any, waits: bool = True) -> Any:
    """Each gradient is all-reduced asynchronously. Without `waits`, it is read before work.wait()."""
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


def test_read_before_wait_is_named(compare: Any) -> None:
    """The cause has the collective and its line, in forward and in backward. With work.wait() it is equal."""
    for function, mesh, expected_text in (
        (asynchronous_forward, {"tensor": 2}, "the result of all_gather, which test_where_it_goes_wrong.py:"),
        (asynchronous_backward, {"data": 2}, "the result of all_reduce, which test_where_it_goes_wrong.py:"),
    ):
        correct, wrong = functools.partial(function, waits=True), functools.partial(function, waits=False)
        build_model = lambda: Model(Mlp())  # noqa: E731
        assert compare(build_model, correct, mesh).status == "equal"
        cause = cause_of(compare(build_model, wrong, mesh))
        assert expected_text in cause
        assert "is read before work.wait()" in cause


@pytest.mark.parametrize(
    ("reads", "gradients", "ratio", "expected"),
    [
        ("same", "mean", 2.0, ", the number of ranks along axis, which read the same samples: it is counted once on"),
        ("same", "mean", 0.5, ", 1 / the number of ranks along axis, which read the same samples: it is the part of"),
        ("batch", "mean", 2.0, ", the number of ranks along axis: it is summed over them"),
        ("batch", "mean", 0.5, "it is divided by them once too often"),
        ("batch", "sum", 0.5, "declare mean"),
        ("batch", "sum", 2.0, "it is multiplied by their number once too often"),
        ("batch", "mean", 3.0, ""),
    ],
)
def test_ratio_of_gradients_is_explained(reads: str, gradients: str, ratio: float, expected: str) -> None:
    """A gradient that is too large is not explained like one that is too small."""
    contract = ParallelContract(axes={"axis": reads}, gradients=gradients)
    cause = _axis_cause(CustomParallelize("mine.py:parallelize", lambda model, _: model, contract, {"axis": 2}), ratio)
    assert expected in cause
    assert bool(cause) == bool(expected)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(0, 2), "features 2 to 3 of the same samples on one device: the parts of the ranks are in a different"),
        (slice(2, 4), "features 2 to 3 of samples 2 to 3, but this rank has samples 0 to 1: gathered over a different"),
    ],
)
def test_misplaced_features_are_explained(rows: slice, expected: str) -> None:
    """The rank has samples 0 and 1. Its two groups of features are in the wrong order, or those of other samples."""
    whole = torch.arange(16.0).reshape(4, 4)
    local = whole[rows].roll(2, dims=1)
    assert expected in _misplaced_features(local, whole, range(2))
