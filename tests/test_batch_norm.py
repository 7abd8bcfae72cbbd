"""Synchronised batch norm against torch's own on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from everyrank.errors import WorkloadError
from everyrank.parallel.batch_norm import MicroBatchState, apply_batch_norm
from everyrank.world import World

SIZES = [3, 0, 2]  # real samples of each rank; the second borrows one


def inputs(shape: tuple[int, ...]) -> torch.Tensor:
    # a large mean: sums of squares would lose the variance in float32
    return torch.randn(5, *shape, dtype=torch.float32, generator=torch.Generator().manual_seed(4)) + 1000.0


def in_ranks(world: World, shape: tuple[int, ...], affine: bool) -> Any:
    state = MicroBatchState()
    norm = nn.BatchNorm2d(shape[0], affine=affine) if len(shape) == 3 else nn.BatchNorm1d(shape[0], affine=affine)
    model = nn.Sequential(norm)
    keys = list(model.state_dict())
    apply_batch_norm(model, state, world)
    assert list(model.state_dict()) == keys
    start = sum(SIZES[: world.rank])
    state.is_padding = SIZES[world.rank] == 0
    own = inputs(shape)[start : start + max(1, SIZES[world.rank])].clone().requires_grad_()
    weight = torch.linspace(0.5, 1.5, own.numel()).reshape(own.shape)
    output = model(own)
    (output * weight * (0.0 if state.is_padding else 1.0)).sum().backward()
    assert own.grad is not None
    grads = [parameter.grad for parameter in model.parameters()]
    return output.detach(), own.grad, grads, norm.running_mean, norm.running_var, weight


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 2)])
def test_equals_torch_on_the_whole_batch(ranks: Any, shape: tuple[int, ...], affine: bool) -> None:
    """Outputs, gradients and running statistics; one rank borrows a sample, which takes no part."""
    found = ranks(3, in_ranks, shape, affine)
    norm = nn.BatchNorm2d(4, affine=affine) if len(shape) == 3 else nn.BatchNorm1d(4, affine=affine)
    norm = norm.double()
    whole = inputs(shape).double().requires_grad_()
    output = norm(whole)
    weight = torch.cat([found[0][5], found[2][5]]).double()
    (output * weight).sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([found[0][0], found[2][0]]).double(), output.detach(), rtol=0, atol=2e-3)
    torch.testing.assert_close(torch.cat([found[0][1], found[2][1]]).double(), whole.grad, rtol=0, atol=2e-3)
    assert found[1][1].abs().max() == 0
    for rank in range(3):
        torch.testing.assert_close(found[rank][3].double(), norm.running_mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[rank][4].double(), norm.running_var, rtol=1e-3, atol=1e-4)
        assert torch.equal(found[rank][3], found[0][3])
    if affine:
        total = sum(found[rank][2][0] for rank in range(3))
        torch.testing.assert_close(total.double(), norm.weight.grad, rtol=1e-3, atol=2e-2)


class OwnNorm(nn.BatchNorm1d):
    """A batch norm with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * 2


def test_unknown_kind_is_refused(ranks: Any) -> None:
    """A subclass may compute something else, which class swapping would silently drop."""
    assert "batch norm of its own kind" in ranks(1, refuse)[0]


def refuse(world: World) -> str:
    try:
        apply_batch_norm(nn.Sequential(OwnNorm(3)), MicroBatchState(), world)
    except WorkloadError as error:
        return str(error)
    return ""


def followed_by_in_place(world: World, affine: bool) -> bool:
    norm = nn.BatchNorm2d(3, affine=affine, momentum=None)
    model = nn.Sequential(norm, nn.ReLU(inplace=True)).double()
    reference = nn.Sequential(nn.BatchNorm2d(3, affine=affine, momentum=None), nn.ReLU(inplace=True)).double()
    apply_batch_norm(model, MicroBatchState(), world)
    values = torch.randn(6, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        own, whole = (values.clone().requires_grad_() for _ in range(2))
        (model(own) * values).sum().backward()
        (reference(whole) * values).sum().backward()
        assert own.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(own.grad, whole.grad)
    # on every rank the same values: as many of each kind as in one
    torch.testing.assert_close(norm.running_mean, reference[0].running_mean)
    return True


@pytest.mark.parametrize("affine", [True, False])
def test_what_follows_may_work_in_place(ranks: Any, affine: bool) -> None:
    """ReLU(inplace=True) writes over the output, which without weights is what backward needs. (momentum=None, too.)"""
    assert ranks(1, followed_by_in_place, affine) == [True]


def second_derivative(world: World) -> str:
    model = nn.Sequential(nn.BatchNorm1d(2))
    apply_batch_norm(model, MicroBatchState(), world)
    own = torch.randn(4, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(model(own).square().sum(), own, create_graph=True)
    try:
        grad.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_second_derivatives_are_refused(ranks: Any) -> None:
    """They would leave out what came from the other ranks, without a word."""
    assert "once_differentiable" in ranks(2, second_derivative)[0]


def alone(world: World) -> Any:
    """What a lone rank computes on CUDA, here on CPU: output and running statistics, after one look and one more."""
    norm, own = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    values = inputs((4, 2, 2))
    expected = norm(values)
    apply_batch_norm(nn.Sequential(own), MicroBatchState(), world)
    found: Any = own
    outputs = [found._normalise_locally(values, moves_statistics=moves) for moves in (True, False)]
    same = [torch.equal(output, expected) for output in outputs]
    return same, [torch.equal(own.state_dict()[name], value) for name, value in norm.state_dict().items()]


def test_alone_as_torch(ranks: Any) -> None:
    """A rank whose statistics are its own takes torch's operator; what runs again moves no statistics."""
    same, statistics = ranks(1, alone)[0]
    assert same == [True, True]
    assert len(statistics) == 5
    assert all(statistics)
