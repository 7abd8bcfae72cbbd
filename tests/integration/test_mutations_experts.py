"""Parity must detect each mutation of expert parallelism: of sending tokens to experts and of gradients of experts.

`not_divided` is the bug of Megatron-LM#5956. Frameworks that average each gradient over all data ranks have the bug of
`averaged_over_the_axis`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import everyrank.parallel.expert as expert_module
import everyrank.parallel.gradients as norm_module
import everyrank.strategies.ddp as ddp_module
from everyrank.layout import DATA_AXES
from everyrank.parallel.mesh import Mesh, local_tensor
from everyrank.record import Parity
from integration.test_mutations_model_parallel import Patch, check

_COUNTER = iter(range(10**9))


def not_divided() -> Patch:
    """The gradient of an expert is the sum over the ranks that sent tokens, not the mean."""
    return mock.patch.object(expert_module._Divided, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def divided_twice() -> Patch:
    """The gradient of an expert is divided twice by the number of ranks of the axis."""
    return mock.patch.object(
        expert_module._Divided, "backward", staticmethod(lambda ctx, gradient: (gradient / ctx.degree**2, None))
    )


def averaged_over_the_axis() -> Patch:
    """Ranks average the gradients of different experts."""

    def all_reduce_grads(parameters: Any, mesh: Mesh) -> None:
        for parameter in parameters:
            gradient = local_tensor(parameter.grad)
            dist.all_reduce(gradient, group=mesh.group(*DATA_AXES))
            gradient /= mesh.size(*DATA_AXES)

    return mock.patch.object(ddp_module, "all_reduce_grads", all_reduce_grads)


def replicas_not_averaged() -> Patch:
    """Ranks with the same experts do not average their gradients."""
    return mock.patch.object(ddp_module, "all_reduce_grads")


def router_without_gradient() -> Patch:
    """The weights of the chosen experts are detached, so the router has no gradient."""
    original = expert_module._forward

    def forward(*arguments: Any) -> Tensor:
        *other_arguments, weights = arguments
        return original(*other_arguments, weights.detach())

    return mock.patch.object(expert_module, "_forward", forward)


def _change_received(change: Callable[..., Tensor]) -> Patch:
    """Change the rows that experts send back. Each second all-to-all sends them; the first one sends tokens."""
    original = expert_module._AllToAll.apply
    calls = iter(range(10**9))

    def apply(*arguments: Any) -> Tensor:
        rows = original(*arguments)
        return change(rows) if next(calls) % 2 else rows

    return mock.patch.object(expert_module._AllToAll, "apply", apply)


def combined_out_of_order() -> Patch:
    """The rows that experts send back are assigned to tokens in reverse order."""
    return _change_received(lambda rows: rows.flip(0))


def wrong_split() -> Patch:
    """A rank reverses the numbers of rows that it receives for its experts."""
    original = dist.all_to_all_single

    def exchange(output: Tensor, input_tensor: Tensor, *splits: Any, group: Any) -> None:
        original(output, input_tensor, *splits, group=group)
        if output.dtype == torch.int64:
            output.copy_(output.view(group.size(), -1).flip(1).flatten())

    return mock.patch.object(dist, "all_to_all_single", exchange)


def gradients_of_rows_stay() -> Patch:
    """The backward pass of an all-to-all loses the gradients that come from other ranks."""

    def backward(ctx: Any, gradient: Tensor) -> Any:
        num_sent, num_received, group = ctx.splits
        received = expert_module._exchange(gradient, num_received, num_sent, group)
        start = sum(num_sent[: group.rank()])
        received[:start] = 0
        received[start + num_sent[group.rank()] :] = 0
        return received, None, None, None

    return mock.patch.object(expert_module._AllToAll, "backward", staticmethod(backward))


def replicas_in_norm() -> Patch:
    """The norm counts a replicated gradient once for each rank that has it."""
    return mock.patch.object(norm_module, "is_norm_param", return_value=True)


def experts_of_one_rank_in_norm() -> Patch:
    """The norm counts only the experts of the first rank of the axis."""
    return mock.patch.object(norm_module, "is_norm_param", lambda parameter, mesh, _: mesh.is_first(*mesh.sizes))


def clipped_by_own_norm() -> Patch:
    """Each rank clips with the norm of its local gradients."""
    original = ddp_module.make_trainable

    def make_trainable(*arguments: Any) -> Any:
        trainable = original(*arguments)
        step = trainable.optimizer_step
        trainable.optimizer_step = lambda total, num_averaged, _: step(total, num_averaged)
        return trainable

    return mock.patch.object(ddp_module, "make_trainable", make_trainable)


# mutation, layout, trait, number of ranks, fragment of the cause; after "!" a fragment of an error message
CASES: list[tuple[Callable[[], Patch], str, str, int, str]] = [
    (not_divided, "expert", "experts", 2, "only the experts differ, and their update is 1.97 times"),
    (not_divided, "fsdp:expert=2", "experts", 4, "summed over the 2 ranks of the expert axis"),
    (divided_twice, "fsdp:expert=2", "experts", 2, "divided by the 2 ranks of the expert axis once too often"),
    (averaged_over_the_axis, "expert", "experts", 2, "averaged over the expert axis, whose ranks hold other experts"),
    (replicas_not_averaged, "ddp:expert=2", "experts", 4, "only the experts differ"),
    (router_without_gradient, "expert", "experts", 2, "!router.weight took no part in the loss"),
    (router_without_gradient, "fsdp:expert=2", "experts", 2, "gradients at the optimizer step do not"),
    (combined_out_of_order, "expert", "experts", 2, "loss differs before"),
    (wrong_split, "fsdp:expert=2", "experts", 2, "loss differs before"),
    (gradients_of_rows_stay, "expert", "experts", 2, "gradients at the optimizer step do not"),
    (replicas_in_norm, "expert", "experts, clip", 2, ""),
    (replicas_in_norm, "ddp:expert=2", "experts, clip", 4, ""),
    (experts_of_one_rank_in_norm, "expert", "experts, clip", 2, ""),
    (clipped_by_own_norm, "expert", "experts, clip", 2, ""),
]


@pytest.mark.parametrize(
    ("mutation", "text", "trait", "count", "fragment"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in CASES],
)
def test_mutation_is_detected(
    ranks: Any, mutation: Callable[[], Patch], text: str, trait: str, count: int, fragment: str
) -> None:
    """Parity reports a difference, and its cause if it can tell."""
    parity = ranks(count, check, mutation, text, trait, "sgd", f"mutation-ep/{next(_COUNTER)}")[0]
    if fragment.startswith("!"):
        assert isinstance(parity, str), parity
        assert fragment[1:] in parity
        return
    assert isinstance(parity, Parity), parity
    assert parity.status == "different"
    assert parity.first_divergence
    assert fragment in (parity.cause or ""), parity


@pytest.mark.parametrize("name", ["combined_out_of_order", "wrong_split"])
def test_check_before_the_first_update_refuses_a_mutation(ranks: Any, name: str) -> None:
    """A split model that computes different values than the full model does not train."""
    mutation, text, trait, count, _ = next(case for case in CASES if case[0].__name__ == name)
    for message in ranks(count, check, mutation, text, trait, "sgd", f"mutation-ep/{next(_COUNTER)}", True):
        assert isinstance(message, str), message
        assert "in parts" in message


@pytest.mark.parametrize("count", [2, 4])
def test_layouts_are_equal_without_a_mutation(ranks: Any, count: int) -> None:
    """Layouts and workloads are those of the mutations."""
    for text, trait in dict.fromkeys((case[1], case[2]) for case in CASES if case[3] == count):
        parity = ranks(count, check, None, text, trait, "sgd", f"mutation-ep/{next(_COUNTER)}")[0]
        assert isinstance(parity, Parity), parity
        assert parity.status == "equal", (text, trait, parity)
