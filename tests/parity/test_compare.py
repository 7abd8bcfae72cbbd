"""The rules on traces made by hand: pure arithmetic, no ranks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from everyrank.errors import LayoutError, NotFiniteError
from everyrank.layout import parse_layout
from everyrank.parallel.partition import prune
from everyrank.parity.compare import compare
from everyrank.parity.trace import Trace

GOOD = Trace([2.0, 1.0], [4.0, 4.0], {}, {"weight": torch.ones(2)}, replicas_equal=True, states=[])


@pytest.mark.parametrize("precision", ["float64", "bf16"])
@pytest.mark.parametrize("who", ["single", "perturbed"])
def test_no_band_without_numbers(precision: str, who: str) -> None:
    """A NaN in the reference would make the band infinite, and everything equal."""
    bad = dataclasses.replace(GOOD, losses=[2.0, math.nan])
    single, perturbed = (bad, GOOD) if who == "single" else (GOOD, bad)
    with pytest.raises(NotFiniteError, match="update 1"):
        compare(single, [perturbed], bad, precision)


def test_a_run_that_became_nan_differs() -> None:
    """Against a good reference, a run without a number is different, not equal."""
    finding = compare(GOOD, [GOOD], dataclasses.replace(GOOD, losses=[2.0, math.nan]), "bf16")
    assert not finding.is_equal
    assert finding.update == 1
    assert compare(GOOD, [GOOD], GOOD, "bf16").is_equal


def test_prune_lets_go_of_state() -> None:
    """Adagrad has state for every parameter before the first step: what is not owned must go, or saving fails."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.Adagrad(parameters)
    prune(optimizer, {parameters[1]})
    assert list(optimizer.state) == [parameters[1]]
    assert len(optimizer.state_dict()["state"]) == 1


def test_dataparallel_refuses_recompute() -> None:
    """Its copies of a model would all run the first one's blocks."""
    with pytest.raises(LayoutError, match="recompute"):
        parse_layout("dataparallel:recompute")
