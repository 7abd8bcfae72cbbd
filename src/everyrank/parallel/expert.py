"""Expert parallel: each rank of an axis holds some of the experts, and tokens are sent to the experts they choose.

             rank 0: experts 0, 1           rank 1: experts 2, 3
    tokens   a   b   c   d                  e   f   g   h           each rank has different tokens
    choose   1   2   0   3                  3   2   2   1
    sorted   c   a | b   d                  h | f   g   e           by expert, and so by rank
                   ╰───╳────────────────────╯                       all-to-all with different sizes
    compute  c   a   h                      b   d   f   g   e
                   ╰───╳────────────────────╯                       all-to-all back; unsort; multiply by weights

Memory         some of the experts, with their gradients and optimizer state; all other layers in full
Communication  per micro-batch and mixture: an all-to-all of one number for each expert; in forward two all-to-alls of a
               row for each token and chosen expert, to the expert and back; in backward two of their gradients; none of
               these overlaps with computation. Per update one all-reduce of the gradients outside the experts, in
               buckets, overlapped with backward, with (sum, count) of the loss as two more elements; with clip_norm one
               of the sum of squares. Before the first update the whole model is gathered once and compared
Use when       the experts of a mixture do not fit on one device, and the network between devices is fast
Exact          yes
Source         Shazeer et al. 2017; Lepikhin et al. 2021 (GShard); Gale et al. 2023 (no capacity)

Keys: those of ddp. `Workload.experts` names the modules with experts, whose number has to be a multiple of the ranks.
ddp:expert=N replicates experts, fsdp:expert=N shards them.

No token is dropped or padded, even if the choices are uneven: the ranks first exchange the numbers of rows, in another
all-to-all. The backward of an all-to-all is an all-to-all with the two lists of numbers swapped. A rank whose experts
have no tokens computes one row of zeros, so that it takes part in backward and the others do not wait for it.

Gradients. Each rank starts backward from the sum of its local losses. For a replicated weight, each rank has the
gradient of its own samples, and these are averaged over all n data ranks: (g_0 + g_1 + ...) / n. The tokens of an
expert come from all ranks of the axis, so its rank already has the sum of their gradients. This sum is divided by the
number of ranks of the axis and averaged over the ranks that hold the same expert, which also gives
(g_0 + g_1 + ...) / n. The global count of loss terms turns both into the gradient of the mean, as for any layout.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.layout.options import TensorOptions
from everyrank.parallel.mesh import Mesh, local_tensor
from everyrank.workload import Workload

__all__ = ["apply_expert_parallel", "expert_pattern"]


def apply_expert_parallel(model: nn.Module, workload: Workload, layout: Layout, mesh: Mesh) -> list[nn.Module]:
    """Split the experts over the expert axis, in place. Returns the modules with experts; [] without such an axis.

    Raises `UnsupportedLayoutError` for a workload without experts, or a number of experts that does not divide.
    """
    if workload.experts is not None and layout.read(TensorOptions).sequence:
        raise UnsupportedLayoutError(
            f"layout {layout}: experts take tokens that are whole on every rank of the tensor axis; leave out sequence"
        )
    degree = mesh.size("expert")
    if degree == 1:
        return []
    expert_modules = _find_experts(model, workload, layout)
    for name, module in expert_modules.items():
        _check_experts(name, module, layout, degree)
    group = mesh.group("expert")
    assert group is not None
    for module in expert_modules.values():
        _split(module, mesh, group)
    return list(expert_modules.values())


def _find_experts(model: nn.Module, workload: Workload, layout: Layout) -> dict[str, nn.Module]:
    """Return name -> module for the pattern in `Workload.experts`."""
    if workload.experts is None:
        raise UnsupportedLayoutError(
            f"layout {layout}: workload {workload.name} has no experts to lay out over ranks: text has, with "
            "--set experts=4; for your own model, set Workload.experts to their modules ('layers.*.experts')"
        )
    pattern = expert_pattern(workload.experts)
    modules = {name: module for name, module in model.named_modules() if pattern.fullmatch(name)}
    if not modules:
        raise UnsupportedLayoutError(f"experts={workload.experts!r} matches no module of the model")
    return modules


def expert_pattern(experts: str) -> re.Pattern[str]:
    """Compile the pattern of `Workload.experts`: `*` matches one component of a module name."""
    return re.compile(re.escape(experts).replace(r"\*", r"[^.]+"))


def _check_experts(name: str, module: nn.Module, layout: Layout, degree: int) -> None:
    counts = {tuple(parameter.shape[:1]) for parameter in module.parameters()}
    if len(counts) != 1 or () in counts:
        raise UnsupportedLayoutError(
            f"experts: the parameters of {name} have no first dimension in common; stack them by expert: (experts, ...)"
        )
    if len(inspect.signature(module.forward).parameters) < 3:
        raise UnsupportedLayoutError(
            f"experts: {name} is to be called as (tokens, chosen experts, weights), and its forward takes less; "
            "name the module that holds only the experts"
        )
    ((count,),) = counts
    if degree > count:
        raise UnsupportedLayoutError(
            f"layout {layout}: {name} has {count} experts, too few for {degree} ranks; give expert={count} at most, "
            "beside another axis (ddp:expert=2, fsdp:expert=2)"
        )
    if count % degree:
        raise UnsupportedLayoutError(
            f"layout {layout}: {name} has {count} experts, which expert={degree} does not divide; "
            f"take a degree that divides {count}"
        )


def _split(module: nn.Module, mesh: Mesh, group: dist.ProcessGroup) -> None:
    """Keep only this rank's experts, and exchange tokens in forward. The parameters become DTensors."""
    degree, index = mesh.size("expert"), mesh.coordinate["expert"]
    devices = mesh.expert_device_mesh("expert")
    owners = [(owner, name) for owner in module.modules() for name, _ in owner.named_parameters(recurse=False)]
    whole = {owner_and_name: owner_and_name[0].get_parameter(owner_and_name[1]) for owner_and_name in owners}
    num_own = next(iter(whole.values())).shape[0] // degree
    for (owner, name), parameter in whole.items():
        local = parameter.detach()[index * num_own : (index + 1) * num_own].clone()
        setattr(owner, name, nn.Parameter(local, requires_grad=parameter.requires_grad))
    tensors = [*module.parameters(), *module.buffers()]
    on_meta = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors}
    on_meta |= {id(p): nn.Parameter(on_meta[id(p)], requires_grad=p.requires_grad) for p in module.parameters()}
    shell: Any = copy.deepcopy(module, dict(on_meta))  # computes with the weights that it is called with
    if hasattr(shell, "num_experts"):  # the name in transformers
        shell.num_experts = num_own
    for (owner, name), parameter in whole.items():
        sharded = DTensor.from_local(owner.get_parameter(name).detach(), devices, [Shard(0)], run_check=False)
        setattr(owner, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    compute = functools.partial(_compute, module, shell, degree)
    module.forward = functools.partial(_forward, compute, degree, num_own, group)


@torch.compiler.disable  # the number of rows is known only at run time
def _forward(
    compute: Any, degree: int, num_own: int, group: dist.ProcessGroup, tokens: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Compute the output of the module with all experts: (N, D), (N, K), (N, K) -> (N, D)."""
    chosen = chosen.reshape(len(tokens), -1)
    order = chosen.flatten().argsort(stable=True)  # sorts pairs of token and choice by expert, and so by rank
    sends = _count(chosen.flatten(), degree * num_own)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends, group=group)
    # the only synchronisation of the layer on CUDA: the host has to know the size of the received rows
    num_sent, num_received = torch.stack([sends, receives]).view(2, degree, num_own).sum(2).tolist()
    arrived = _AllToAll.apply(tokens[order // chosen.shape[1]], num_sent, num_received, group)
    expert = (
        torch.arange(num_own, device=tokens.device)
        .repeat(degree)
        .repeat_interleave(receives, output_size=sum(num_received))
    )
    is_empty = not len(expert)
    if is_empty:
        arrived, expert = F.pad(arrived, (0, 0, 0, 1)), F.pad(expert, (0, 1))
    computed = compute(arrived, expert[:, None], arrived.new_ones(len(expert), 1))
    returned = _AllToAll.apply(computed[:-1] if is_empty else computed, num_received, num_sent, group)
    by_token = returned[order.argsort()].view(*chosen.shape, tokens.shape[-1])
    return (by_token * weights.reshape(chosen.shape)[:, :, None]).sum(1).to(tokens.dtype)


def _count(numbers: Tensor, kinds: int) -> Tensor:
    """Count the values 0 ... kinds - 1: shape (kinds,). On CUDA `bincount` would synchronise to find the maximum."""
    return numbers.new_zeros(kinds).scatter_add_(0, numbers, torch.ones_like(numbers))


def _compute(module: nn.Module, shell: Any, degree: int, *arguments: Tensor) -> Any:
    """Compute the outputs of this rank's experts with the module's current weights."""
    weights = {name: _Divided.apply(local_tensor(p), degree) for name, p in module.named_parameters()}
    shell.train(module.training)
    return torch.func.functional_call(shell, {**weights, **dict(module.named_buffers())}, arguments)


class _AllToAll(torch.autograd.Function):
    """Exchange rows with all ranks of the group, different numbers with each: (N, D) -> (M, D)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits = num_sent, num_received, group
        return _exchange(rows, num_sent, num_received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        num_sent, num_received, group = ctx.splits
        return _exchange(gradients[0], num_received, num_sent, group), None, None, None


def _exchange(rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(num_received), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(num_received), list(num_sent), group=group)
    return received


class _Divided(torch.autograd.Function):
    """Identity in forward; divides the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, degree: int) -> Tensor:
        ctx.degree = degree
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.degree, None
