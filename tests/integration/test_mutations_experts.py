"""Each mistake in sending tokens to experts, and in the gradients of those, must turn parity red.

The first two are those of Megatron-LM#5956 and of frameworks that average every gradient over all data ranks.
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
    """The gradient of an expert stays the sum over the ranks whose tokens came."""
    return mock.patch.object(expert_module._Divided, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def divided_twice() -> Patch:
    """It is divided by the ranks of the axis once more."""
    return mock.patch.object(
        expert_module._Divided, "backward", staticmethod(lambda ctx, gradient: (gradient / ctx.degree**2, None))
    )


def averaged_over_the_axis() -> Patch:
    """Ranks that hold other experts average their gradients as if they held the same."""

    def all_reduce_grads(parameters: Any, mesh: Mesh) -> None:
        for parameter in parameters:
            gradient = local_tensor(parameter.grad)
            dist.all_reduce(gradient, group=mesh.group(*DATA_AXES))
            gradient /= mesh.size(*DATA_AXES)

    return mock.patch.object(ddp_module, "all_reduce_grads", all_reduce_grads)


def replicas_not_averaged() -> Patch:
    """Ranks that hold the same experts each step on the tokens of their own group."""
    return mock.patch.object(ddp_module, "all_reduce_grads")


def router_without_gradient() -> Patch:
    """The weights of the chosen experts are taken as constants."""
    original = expert_module._forward

    def forward(*arguments: Any) -> Tensor:
        *before, weights = arguments
        return original(*before, weights.detach())

    return mock.patch.object(expert_module, "_forward", forward)


def _rows(change: Callable[..., Tensor]) -> Patch:
    """The rows that come back, changed; those that go are left alone: they are followed by the others."""
    original = expert_module._AllToAll.apply
    calls = iter(range(10**9))

    def apply(*arguments: Any) -> Tensor:
        rows = original(*arguments)
        return change(rows) if next(calls) % 2 else rows

    return mock.patch.object(expert_module._AllToAll, "apply", apply)


def combined_out_of_order() -> Patch:
    """What comes back is taken for the tokens in another order."""
    return _rows(lambda rows: rows.flip(0))


def wrong_split() -> Patch:
    """A rank takes the rows for its first expert for those of its last one, and the other way round."""
    original = dist.all_to_all_single

    def exchange(output: Tensor, own: Tensor, *splits: Any, group: Any) -> None:
        original(output, own, *splits, group=group)
        if output.dtype == torch.int64:
            output.copy_(output.view(group.size(), -1).flip(1).flatten())

    return mock.patch.object(dist, "all_to_all_single", exchange)


def gradients_of_rows_stay() -> Patch:
    """Backward of an all-to-all sends nothing: what the experts of other ranks say of a token is lost."""

    def backward(ctx: Any, gradient: Tensor) -> Any:
        to, of, group = ctx.splits
        found = expert_module._exchange(gradient, of, to, group)
        start = sum(to[: group.rank()])
        found[:start] = 0
        found[start + to[group.rank()] :] = 0
        return found, None, None, None

    return mock.patch.object(expert_module._AllToAll, "backward", staticmethod(backward))


def replicas_in_norm() -> Patch:
    """What several ranks hold is counted by each: experts by all of their replicas, all else by all ranks."""
    return mock.patch.object(norm_module, "is_norm_param", return_value=True)


def experts_of_one_rank_in_norm() -> Patch:
    """The first rank of the axis counts its experts, and nobody those of the others."""
    return mock.patch.object(norm_module, "is_norm_param", lambda parameter, mesh, _: mesh.is_first(*mesh.sizes))


def clipped_by_own_norm() -> Patch:
    """Each rank clips by the norm of what it holds."""
    original = ddp_module.make_trainable

    def make_trainable(*arguments: Any) -> Any:
        trainable = original(*arguments)
        step = trainable.optimizer_step
        trainable.optimizer_step = lambda total, num_averaged, _: step(total, num_averaged)
        return trainable

    return mock.patch.object(ddp_module, "make_trainable", make_trainable)


# mutation, layout, trait, ranks, words of the cause; "!" before those of a refusal
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
    ("mutation", "text", "trait", "count", "words"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in CASES],
)
def test_mutation_is_red(
    ranks: Any, mutation: Callable[[], Patch], text: str, trait: str, count: int, words: str
) -> None:
    """The mistake is found, and its cause named where it can be told."""
    parity = ranks(count, check, mutation, text, trait, "sgd", f"mutation-ep/{next(_COUNTER)}")[0]
    if words.startswith("!"):
        assert isinstance(parity, str), parity
        assert words[1:] in parity
        return
    assert isinstance(parity, Parity), parity
    assert parity.status == "different"
    assert parity.first_divergence
    assert words in (parity.cause or ""), parity


@pytest.mark.parametrize("name", ["combined_out_of_order", "wrong_split"])
def test_check_equal_refuses(ranks: Any, name: str) -> None:
    """What computes something else in parts than as a whole does not train at all."""
    mutation, text, trait, count, _ = next(case for case in CASES if case[0].__name__ == name)
    for found in ranks(count, check, mutation, text, trait, "sgd", f"mutation-ep/{next(_COUNTER)}", True):
        assert isinstance(found, str), found
        assert "in parts" in found


@pytest.mark.parametrize("count", [2, 4])
def test_equal_without_mutation(ranks: Any, count: int) -> None:
    """The same layouts on the same workloads, as they are."""
    for text, trait in dict.fromkeys((case[1], case[2]) for case in CASES if case[3] == count):
        parity = ranks(count, check, None, text, trait, "sgd", f"mutation-ep/{next(_COUNTER)}")[0]
        assert isinstance(parity, Parity), parity
        assert parity.status == "equal", (text, trait, parity)
