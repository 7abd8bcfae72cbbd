"""Synchronized BatchNorm over ranks equals BatchNorm of torch on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from everyrank.errors import WorkloadError
from everyrank.parallel.batch_norm import MicroBatchState, apply_batch_norm
from everyrank.world import World

SIZES = [3, 0, 2]  # real samples of each rank; rank 1 has only a dummy sample


def inputs(shape: tuple[int, ...]) -> torch.Tensor:
    # with this large mean, a variance computed from sums of squares would be lost in float32
    return torch.randn(5, *shape, dtype=torch.float32, generator=torch.Generator().manual_seed(4)) + 1000.0


def run_batch_norm(world: World, shape: tuple[int, ...], affine: bool) -> Any:
    """Return output, input gradient, parameter gradients, running statistics and loss weights of this rank."""
    state = MicroBatchState()
    norm = nn.BatchNorm2d(shape[0], affine=affine) if len(shape) == 3 else nn.BatchNorm1d(shape[0], affine=affine)
    model = nn.Sequential(norm)
    keys = list(model.state_dict())
    apply_batch_norm(model, state, world)
    assert list(model.state_dict()) == keys
    start = sum(SIZES[: world.rank])
    state.is_padding = SIZES[world.rank] == 0
    local_input = inputs(shape)[start : start + max(1, SIZES[world.rank])].clone().requires_grad_()
    weight = torch.linspace(0.5, 1.5, local_input.numel()).reshape(local_input.shape)
    output = model(local_input)
    (output * weight * (0.0 if state.is_padding else 1.0)).sum().backward()
    assert local_input.grad is not None
    grads = [parameter.grad for parameter in model.parameters()]
    return output.detach(), local_input.grad, grads, norm.running_mean, norm.running_var, weight


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 2)])
def test_equals_torch_on_the_whole_batch(ranks: Any, shape: tuple[int, ...], affine: bool) -> None:
    """Outputs, gradients and running statistics are equal. The dummy sample of rank 1 has no effect."""
    results = ranks(3, run_batch_norm, shape, affine)
    norm = nn.BatchNorm2d(4, affine=affine) if len(shape) == 3 else nn.BatchNorm1d(4, affine=affine)
    norm = norm.double()
    whole_batch = inputs(shape).double().requires_grad_()
    output = norm(whole_batch)
    weight = torch.cat([results[0][5], results[2][5]]).double()
    (output * weight).sum().backward()
    assert whole_batch.grad is not None
    torch.testing.assert_close(torch.cat([results[0][0], results[2][0]]).double(), output.detach(), rtol=0, atol=2e-3)
    torch.testing.assert_close(torch.cat([results[0][1], results[2][1]]).double(), whole_batch.grad, rtol=0, atol=2e-3)
    assert results[1][1].abs().max() == 0
    for rank in range(3):
        torch.testing.assert_close(results[rank][3].double(), norm.running_mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[rank][4].double(), norm.running_var, rtol=1e-3, atol=1e-4)
        assert torch.equal(results[rank][3], results[0][3])
    if affine:
        total = sum(results[rank][2][0] for rank in range(3))
        torch.testing.assert_close(total.double(), norm.weight.grad, rtol=1e-3, atol=2e-2)


class CustomBatchNorm(nn.BatchNorm1d):
    """A subclass of BatchNorm1d with a custom forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * 2


class SiblingOfBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm that is not a subclass of BatchNorm1d to BatchNorm3d."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        pass


@pytest.mark.parametrize("kind", [CustomBatchNorm, SiblingOfBatchNorm])
def test_subclass_of_batch_norm_is_refused(ranks: Any, kind: type[nn.Module]) -> None:
    """Replacing its class would silently drop its custom forward; leaving it would keep the statistics of one rank."""
    assert "batch norm of its own kind" in ranks(1, error_for_custom_batch_norm, kind)[0]


def error_for_custom_batch_norm(world: World, kind: Any) -> str:
    try:
        apply_batch_norm(nn.Sequential(kind(3)), MicroBatchState(), world)
    except WorkloadError as error:
        return str(error)
    return ""


def names_of_undecayed_parameters(world: World) -> list[str]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm2d(2))
    apply_batch_norm(model, MicroBatchState(), world)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm1d)]
    return [*norms, *(type(module).__name__ for module in model)]


def test_a_batch_norm_stays_an_instance_of_its_class(ranks: Any) -> None:
    """An optimizer may leave `nn.BatchNorm1d` out of the weight decay."""
    assert ranks(1, names_of_undecayed_parameters) == [["1", "Linear", "BatchNorm1d", "BatchNorm2d"]]


def statistics_of_a_frozen_norm(world: World) -> Any:
    norm = nn.BatchNorm1d(4)
    norm.track_running_stats = False
    apply_batch_norm(nn.Sequential(norm), MicroBatchState(), world)
    norm(inputs((4,)))
    return norm.running_mean, norm.num_batches_tracked


def test_track_running_stats_can_be_turned_off_later(ranks: Any) -> None:
    """As in torch, the statistics of the batch are used and the running ones stay."""
    ((mean, seen),) = ranks(1, statistics_of_a_frozen_norm)
    assert not mean.any()
    assert int(seen) == 0


def check_in_place_relu(world: World, affine: bool) -> bool:
    norm = nn.BatchNorm2d(3, affine=affine, momentum=None)
    model = nn.Sequential(norm, nn.ReLU(inplace=True)).double()
    reference = nn.Sequential(nn.BatchNorm2d(3, affine=affine, momentum=None), nn.ReLU(inplace=True)).double()
    apply_batch_norm(model, MicroBatchState(), world)
    values = torch.randn(6, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        values_of_model, values_of_reference = (values.clone().requires_grad_() for _ in range(2))
        (model(values_of_model) * values).sum().backward()
        (reference(values_of_reference) * values).sum().backward()
        assert values_of_model.grad is not None
        assert values_of_reference.grad is not None
        torch.testing.assert_close(values_of_model.grad, values_of_reference.grad)
    # every rank has the same values, so the statistics equal those of one rank
    torch.testing.assert_close(norm.running_mean, reference[0].running_mean)
    return True


@pytest.mark.parametrize("affine", [True, False])
def test_in_place_relu_after_batch_norm(ranks: Any, affine: bool) -> None:
    """`ReLU(inplace=True)` overwrites the output, which backward needs if affine is False. Also tests momentum=None."""
    assert ranks(1, check_in_place_relu, affine) == [True]


def error_of_second_derivative(world: World) -> str:
    model = nn.Sequential(nn.BatchNorm1d(2))
    apply_batch_norm(model, MicroBatchState(), world)
    local_input = torch.randn(4, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(model(local_input).square().sum(), local_input, create_graph=True)
    try:
        grad.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_second_derivatives_are_refused(ranks: Any) -> None:
    """They would silently leave out terms of the other ranks."""
    assert "once_differentiable" in ranks(2, error_of_second_derivative)[0]


def normalise_locally(world: World) -> Any:
    """Compare normalization of a single rank with torch: the outputs, and the running statistics.

    It runs twice. The second run, as in recomputation, must not update the statistics.
    """
    norm, local_norm = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    values = inputs((4, 2, 2))
    expected = norm(values)
    apply_batch_norm(nn.Sequential(local_norm), MicroBatchState(), world)
    norm_with_state: Any = local_norm
    outputs = [
        norm_with_state._normalise_locally(values, moves_statistics=updates_statistics)
        for updates_statistics in (True, False)
    ]
    outputs_are_equal = [torch.equal(output, expected) for output in outputs]
    return outputs_are_equal, [
        torch.equal(local_norm.state_dict()[name], value) for name, value in norm.state_dict().items()
    ]


def test_single_rank_equals_torch_batch_norm(ranks: Any) -> None:
    """With local statistics, the rank uses the operator of torch. Recomputation does not update running statistics."""
    outputs_are_equal, statistics_are_equal = ranks(1, normalise_locally)[0]
    assert outputs_are_equal == [True, True]
    assert len(statistics_are_equal) == 5
    assert all(statistics_are_equal)
