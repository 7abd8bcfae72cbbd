"""The rules of the comparison of traces. The traces are built by hand, so these tests need no ranks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from everyrank.data import Update
from everyrank.errors import LayoutError, NotFiniteError
from everyrank.layout import parse_layout
from everyrank.parallel.check_equal import _differences
from everyrank.parallel.zero1 import keep_owned_parameters
from everyrank.parity.compare import compare, largest
from everyrank.parity.reference import Reference, _has_no_updates, make_reference, shorten_segments
from everyrank.parity.trace import _CHUNK_ELEMENTS, Trace, distance, finite_change

GOOD = Trace([2.0, 1.0], [4.0, 4.0], {}, [{"weight": torch.ones(2)}], replicas_equal=True, moved=[{"weight": 0.5}])
UPDATES = [[Update(0, 0, 0), Update(1, 0, 1)]]


def reference(single: Trace, *perturbed: Trace, precision: str = "float64") -> Reference:
    """Return the reference of a run of `single` and its perturbed runs."""
    return make_reference(single, perturbed or [single], UPDATES, precision)


@pytest.mark.parametrize("precision", ["float64", "bf16"])
@pytest.mark.parametrize("nan_run", ["single", "perturbed"])
def test_reference_with_nan_is_refused(precision: str, nan_run: str) -> None:
    """A NaN in the reference would make the tolerance band infinite, and everything equal."""
    nan_trace = dataclasses.replace(GOOD, losses=[2.0, math.nan])
    single, perturbed = (nan_trace, GOOD) if nan_run == "single" else (GOOD, nan_trace)
    with pytest.raises(NotFiniteError, match="update 1"):
        reference(single, perturbed, precision=precision)


def test_run_with_nan_loss_is_different() -> None:
    """A run with a NaN loss is different from a finite reference."""
    finding = compare(reference(GOOD, precision="bf16"), dataclasses.replace(GOOD, losses=[2.0, math.nan]), "bf16")
    assert not finding.is_equal
    assert finding.update == 1
    assert compare(reference(GOOD, precision="bf16"), GOOD, "bf16").is_equal


def with_weight(*values: float) -> Trace:
    """Return a trace with these final weights."""
    return dataclasses.replace(GOOD, finals=[{"weight": torch.tensor(values, dtype=torch.float64)}])


def test_finding_reports_the_tensor_that_differs() -> None:
    """The finding has the difference and tolerance of the tensor. It does not have those of an equal loss."""
    finding = compare(reference(with_weight(1.0, 1.0)), with_weight(1.0, 1.0 + 1e-6), "float64")
    assert not finding.is_equal
    assert finding.location == "update 1, tensor weight"
    assert finding.difference == pytest.approx(1e-6)
    assert finding.tolerance == pytest.approx(0.5e-7)  # 1e-7 times the movement of the tensor
    assert finding.loss_difference == 0.0


def test_element_with_zero_gradient_is_not_compared() -> None:
    """Rounding of a zero gradient can move an element anywhere. The element next to it is still compared."""
    gradients = {"weight": torch.tensor([1.0, 1e-18]), "other": torch.tensor([3.0])}
    single = dataclasses.replace(with_weight(1.0, 1.0), gradients=gradients)
    assert compare(reference(single), with_weight(1.0, 1.3), "float64").is_equal
    assert not compare(reference(single), with_weight(1.3, 1.0), "float64").is_equal
    exactly_zero = dataclasses.replace(single, gradients={**gradients, "weight": torch.tensor([1.0, 0.0])})
    # an exact zero has no rounding error
    assert not compare(reference(exactly_zero), with_weight(1.0, 1.3), "float64").is_equal


def test_tensor_that_only_rounding_moves_is_not_compared() -> None:
    """The perturbed runs are as far apart as the tensor moved. The text reports that it is not compared."""
    finding = compare(reference(with_weight(1.0, 1.0), with_weight(1.0, 1.2)), with_weight(1.0, 4.0), "float64")
    assert finding.is_equal
    assert "only change by rounding, for example weight" in finding.text


def test_validation_tolerance_follows_the_perturbed_runs() -> None:
    """The differences between perturbed runs of `single` set the tolerance of the validation sums."""
    single = dataclasses.replace(GOOD, evaluation={"loss": (3.0, 10.0)})
    run = dataclasses.replace(GOOD, evaluation={"loss": (3.0 + 1e-6, 10.0)})
    perturbed = dataclasses.replace(GOOD, evaluation={"loss": (3.0 + 1e-7, 10.0)})
    assert not compare(reference(single), run, "float64").is_equal
    assert compare(reference(single, perturbed), run, "float64").is_equal


def test_loss_whose_terms_cancel_is_compared_relative_to_the_gradients() -> None:
    """The mean of (ratio * advantage) is rounding if the advantages have mean 0. The gradients are not."""
    gradients = {"weight": torch.tensor([0.2])}
    single = dataclasses.replace(GOOD, losses=[1e-17, -3e-17], gradients=gradients, evaluation={"loss": (4e-17, 4.0)})
    in_reverse = dataclasses.replace(single, losses=[-2e-17, 4e-17], evaluation={"loss": (-4e-17, 4.0)})
    assert compare(reference(single, in_reverse), in_reverse, "float64").is_equal
    wrong = dataclasses.replace(single, losses=[1e-17, 1e-6])
    assert compare(reference(single, in_reverse), wrong, "float64").location == "update 1, loss"
    draws_numbers = dataclasses.replace(single, losses=[1e-6, -3e-17])
    assert compare(reference(single, draws_numbers), single, "float64").category == "single"


def test_one_more_hit_of_a_metric_is_not_a_difference() -> None:
    """One more hit in a thousand is a tie that rounding broke. A hundred hits fewer are a difference."""
    single = dataclasses.replace(GOOD, evaluation={"loss": (3.0, 1000.0), "top1": (500.0, 1000.0)})
    for hits, is_equal in ((501.0, True), (400.0, False), (500.5, True)):
        run = dataclasses.replace(single, evaluation={"loss": (3.0, 1000.0), "top1": (hits, 1000.0)})
        assert compare(reference(single), run, "float64").is_equal is is_equal
    run = dataclasses.replace(single, evaluation={"loss": (3.1, 1000.0), "top1": (500.0, 1000.0)})
    assert not compare(reference(single), run, "float64").is_equal


def test_metric_computed_in_float32_has_float32_tolerance() -> None:
    """`(1.0 / rank).sum()` of an integer tensor is in float32, also in a float64 run."""
    single = dataclasses.replace(GOOD, evaluation={"loss": (3.0, 50.0), "mrr": (26.550000190734863, 50.0)})
    for total, is_equal in ((26.55000066757202, True), (26.5501, False)):
        run = dataclasses.replace(single, evaluation={"loss": (3.0, 50.0), "mrr": (total, 50.0)})
        assert compare(reference(single, single), run, "float64").is_equal is is_equal


def test_segments_are_shortened_to_the_comparable_steps() -> None:
    """Two parts stay. They are the first updates and those around the end of the epoch.

    The second part begins from the initial state again.
    """
    plan = [[*(Update(i, 0, i) for i in range(5)), *(Update(5 + i, 1, i) for i in range(5))]]
    assert shorten_segments(plan, 10) == plan
    assert [[update.step for update in segment] for segment in shorten_segments(plan, 3)] == [[0, 1, 2], [4, 5, 6]]
    assert [[update.step for update in segment] for segment in shorten_segments(plan, 7)] == [
        [0, 1, 2, 3, 4, 5, 6],
        [7, 8, 9],
    ]
    assert [[update.step for update in segment] for segment in shorten_segments(plan, 1)] == [[0], [4], [5]]


def test_state_of_parameters_that_are_not_owned_is_removed() -> None:
    """Adagrad has state for every parameter before its first step. Saving fails if such state stays."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.Adagrad(parameters)
    keep_owned_parameters(optimizer, {parameters[1]})
    assert list(optimizer.state) == [parameters[1]]
    assert len(optimizer.state_dict()["state"]) == 1


def test_dataparallel_refuses_recompute() -> None:
    """The replicas of a model would all run the blocks of the first replica."""
    with pytest.raises(LayoutError, match="recompute"):
        parse_layout("dataparallel:recompute")


def test_distance_over_several_chunks() -> None:
    """The largest difference can be in any chunk. Excluded elements and NaN are tested, too."""
    first = torch.randn(_CHUNK_ELEMENTS + 5, dtype=torch.float64).view(1, -1)
    for index in (0, _CHUNK_ELEMENTS - 1, _CHUNK_ELEMENTS, _CHUNK_ELEMENTS + 4):
        second = first.clone()
        second[0, index] += 0.5
        assert distance(first, second) == pytest.approx(0.5, rel=1e-12)
        excluded = torch.zeros_like(first, dtype=torch.bool)
        excluded[0, index] = True
        assert distance(first, second, excluded) == 0.0
        second[0, index] = math.nan
        assert distance(first, second) == math.inf
        assert math.isfinite(largest(second))
        assert largest(-first * 2) == 2 * float(first.abs().max())


def test_infinite_elements_hide_no_difference() -> None:
    """A buffer may have infinite elements, as a causal mask or the smallest value so far."""
    first = torch.tensor([-math.inf, 2.0, math.inf], dtype=torch.float64)
    assert distance(first, first.clone()) == 0.0
    assert distance(first, torch.tensor([-math.inf, 2.5, math.inf])) == 0.5
    assert distance(first, torch.tensor([-math.inf, 2.0, -math.inf])) == math.inf
    assert distance(first, torch.tensor([-math.inf, 2.0, math.nan])) == math.inf
    assert largest(first) == 2.0
    assert largest(torch.tensor([math.inf])) == 1e-300


def test_elements_that_are_nan_in_both_runs_hide_no_difference() -> None:
    """A buffer may begin with NaN or -inf, such as the largest value so far. Its other elements are compared."""
    initial = torch.tensor([math.nan, -math.inf, 0.0], dtype=torch.float64)
    final = torch.tensor([math.nan, 2.0, 0.5], dtype=torch.float64)
    assert distance(final, final.clone()) == 0.0
    assert finite_change(initial, final) == 0.5
    assert finite_change(None, final) == finite_change(initial[:1], final) == 0.0
    single = dataclasses.replace(GOOD, finals=[{"seen": final}], moved=[{"seen": finite_change(initial, final)}])
    assert compare(reference(single), single, "float64").is_equal
    for other in ([math.nan, 2.0, 0.6], [math.nan, 2.5, 0.5], [0.0, 2.0, 0.5]):
        run = dataclasses.replace(single, finals=[{"seen": torch.tensor(other, dtype=torch.float64)}])
        finding = compare(reference(single), run, "float64")
        assert finding.location == "update 1, tensor seen"
        assert not math.isnan(finding.difference or math.nan)


def test_parameters_have_other_names_in_the_state_dict() -> None:
    """Hooks may rename entries of the state_dict. Whether a parameter moves is then read from the entries."""
    single = dataclasses.replace(GOOD, gradients={"wrapped.weight": torch.ones(2)})
    singles = {"single": parse_layout("single:precision=float64")}
    assert not _has_no_updates({"single": reference(single)}, singles)
    still = dataclasses.replace(single, moved=[{"weight": 0.0}])
    assert _has_no_updates({"single": reference(still)}, singles)


def test_differences_over_several_chunks() -> None:
    """Differences are relative to the largest value. With the median, which experts use, a few of them do not count."""
    expected = torch.linspace(-4.0, 2.0, 2 * _CHUNK_ELEMENTS + 3)
    actual = expected.clone()
    actual[-1] += 1.0
    assert _differences([actual], [expected]) == [0.25]
    assert _differences([actual], [expected], torch.median) == [0.0]
    assert _differences([actual[:-1]], [expected]) == [math.inf]
