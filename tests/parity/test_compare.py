"""The rules on traces made by hand: pure arithmetic, no ranks."""

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
from everyrank.parity.reference import Reference, make_reference, shorten_segments
from everyrank.parity.trace import _CHUNK_ELEMENTS, Trace, distance

GOOD = Trace([2.0, 1.0], [4.0, 4.0], {}, [{"weight": torch.ones(2)}], replicas_equal=True, moved=[{"weight": 0.5}])
UPDATES = [[Update(0, 0, 0), Update(1, 0, 1)]]


def reference(single: Trace, *perturbed: Trace, precision: str = "float64") -> Reference:
    return make_reference(single, perturbed or [single], UPDATES, precision)


@pytest.mark.parametrize("precision", ["float64", "bf16"])
@pytest.mark.parametrize("who", ["single", "perturbed"])
def test_no_band_without_numbers(precision: str, who: str) -> None:
    """A NaN in the reference would make the band infinite, and everything equal."""
    bad = dataclasses.replace(GOOD, losses=[2.0, math.nan])
    single, perturbed = (bad, GOOD) if who == "single" else (GOOD, bad)
    with pytest.raises(NotFiniteError, match="update 1"):
        reference(single, perturbed, precision=precision)


def test_a_run_that_became_nan_differs() -> None:
    """Against a good reference, a run without a number is different, not equal."""
    finding = compare(reference(GOOD, precision="bf16"), dataclasses.replace(GOOD, losses=[2.0, math.nan]), "bf16")
    assert not finding.is_equal
    assert finding.update == 1
    assert compare(reference(GOOD, precision="bf16"), GOOD, "bf16").is_equal


def with_weight(*values: float) -> Trace:
    return dataclasses.replace(GOOD, finals=[{"weight": torch.tensor(values, dtype=torch.float64)}])


def test_what_decided_is_told() -> None:
    """The table shows the tensor's own difference and tolerance, not those of a loss that was equal."""
    finding = compare(reference(with_weight(1.0, 1.0)), with_weight(1.0, 1.0 + 1e-6), "float64")
    assert not finding.is_equal
    assert finding.location == "update 1, tensor weight"
    assert finding.difference == pytest.approx(1e-6)
    assert finding.tolerance == pytest.approx(0.5e-7)  # a ten-millionth of how far it moved
    assert finding.loss_difference == 0.0


def test_a_gradient_that_is_zero_never_convicts() -> None:
    """What rounding leaves of a zero gradient moves an element anywhere; an element beside it is compared."""
    gradients = {"weight": torch.tensor([1.0, 1e-18]), "other": torch.tensor([3.0])}
    single = dataclasses.replace(with_weight(1.0, 1.0), gradients=gradients)
    assert compare(reference(single), with_weight(1.0, 1.3), "float64").is_equal
    assert not compare(reference(single), with_weight(1.3, 1.0), "float64").is_equal
    never = dataclasses.replace(single, gradients={**gradients, "weight": torch.tensor([1.0, 0.0])})
    assert not compare(reference(never), with_weight(1.0, 1.3), "float64").is_equal  # exactly zero is no rounding


def test_a_tensor_that_rounding_moves_is_not_compared() -> None:
    """Its perturbed runs are as far apart as it moved: nothing can be told from it, and the text says so."""
    finding = compare(reference(with_weight(1.0, 1.0), with_weight(1.0, 1.2)), with_weight(1.0, 4.0), "float64")
    assert finding.is_equal
    assert "only change by rounding, for example weight" in finding.text


def test_an_evaluation_after_rounding_has_grown() -> None:
    """What perturbed runs of single come to says how far the sums may be."""
    single = dataclasses.replace(GOOD, evaluation={"loss": (3.0, 10.0)})
    run = dataclasses.replace(GOOD, evaluation={"loss": (3.0 + 1e-6, 10.0)})
    near = dataclasses.replace(GOOD, evaluation={"loss": (3.0 + 1e-7, 10.0)})
    assert not compare(reference(single), run, "float64").is_equal
    assert compare(reference(single, near), run, "float64").is_equal


def test_a_tie_is_not_a_difference() -> None:
    """One hit more in a thousand is a tie that rounding broke; a tenth of them is not."""
    single = dataclasses.replace(GOOD, evaluation={"loss": (3.0, 1000.0), "top1": (500.0, 1000.0)})
    for hits, is_equal in ((501.0, True), (400.0, False), (500.5, True)):
        run = dataclasses.replace(single, evaluation={"loss": (3.0, 1000.0), "top1": (hits, 1000.0)})
        assert compare(reference(single), run, "float64").is_equal is is_equal
    run = dataclasses.replace(single, evaluation={"loss": (3.1, 1000.0), "top1": (500.0, 1000.0)})
    assert not compare(reference(single), run, "float64").is_equal


def test_a_metric_of_integers_is_float32() -> None:
    """`(1.0 / rank).sum()` is rounded to float32 in any run: as far as that goes it is no difference."""
    single = dataclasses.replace(GOOD, evaluation={"loss": (3.0, 50.0), "mrr": (26.550000190734863, 50.0)})
    for total, is_equal in ((26.55000066757202, True), (26.5501, False)):
        run = dataclasses.replace(single, evaluation={"loss": (3.0, 50.0), "mrr": (total, 50.0)})
        assert compare(reference(single, single), run, "float64").is_equal is is_equal


def test_what_cannot_be_compared_is_cut() -> None:
    """The first updates, and those from the end of the epoch on, which begin from the initial state again."""
    plan = [[*(Update(i, 0, i) for i in range(5)), *(Update(5 + i, 1, i) for i in range(5))]]
    assert shorten_segments(plan, 10) == plan
    assert [[update.step for update in segment] for segment in shorten_segments(plan, 3)] == [[0, 1, 2], [4, 5, 6]]
    assert [[update.step for update in segment] for segment in shorten_segments(plan, 7)] == [
        [0, 1, 2, 3, 4, 5, 6],
        [7, 8, 9],
    ]
    assert [[update.step for update in segment] for segment in shorten_segments(plan, 1)] == [[0], [4], [5]]


def test_prune_lets_go_of_state() -> None:
    """Adagrad has state for every parameter before the first step: what is not owned must go, or saving fails."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.Adagrad(parameters)
    keep_owned_parameters(optimizer, {parameters[1]})
    assert list(optimizer.state) == [parameters[1]]
    assert len(optimizer.state_dict()["state"]) == 1


def test_dataparallel_refuses_recompute() -> None:
    """Its copies of a model would all run the first one's blocks."""
    with pytest.raises(LayoutError, match="recompute"):
        parse_layout("dataparallel:recompute")


def test_distances_are_taken_in_pieces() -> None:
    """The largest difference wherever it lies, what is left out, and what is no number."""
    one = torch.randn(_CHUNK_ELEMENTS + 5, dtype=torch.float64).view(1, -1)
    for place in (0, _CHUNK_ELEMENTS - 1, _CHUNK_ELEMENTS, _CHUNK_ELEMENTS + 4):
        other = one.clone()
        other[0, place] += 0.5
        assert distance(one, other) == pytest.approx(0.5, rel=1e-12)
        left_out = torch.zeros_like(one, dtype=torch.bool)
        left_out[0, place] = True
        assert distance(one, other, left_out) == 0.0
        other[0, place] = math.nan
        assert distance(one, other) == math.inf
        assert math.isnan(largest(other))
        assert largest(-one * 2) == 2 * float(one.abs().max())


def test_the_rehearsal_compares_in_pieces() -> None:
    """Relative to the largest number; in the median, as for experts, the few are no matter."""
    expected = torch.linspace(-4.0, 2.0, 2 * _CHUNK_ELEMENTS + 3)
    found = expected.clone()
    found[-1] += 1.0
    assert _differences([found], [expected]) == [0.25]
    assert _differences([found], [expected], torch.median) == [0.0]
    assert _differences([found[:-1]], [expected]) == [math.inf]
