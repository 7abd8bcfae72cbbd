"""A step with the learning rate of the recorded ranks leaves the script's own learning rate unchanged."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everyrank.rerun.inside.steps import _Steps


@pytest.fixture
def steps() -> _Steps:
    """Return the hooks of a run that takes the learning rate 0.5 in each update."""
    settings = {"by_rows": False, "num_detailed": 0, "max_elements": 0}
    updates = [{"rates": [0.5], "momenta": [{}]}] * 3
    session: Any = SimpleNamespace(
        is_active=True, settings=settings, imposed=[{"updates": updates}], parameters=[], updates=[], update=0,
        num_batches=0, num_backwards=0, quiet=contextlib.nullcontext, is_last=lambda: False,
    )  # fmt: skip
    modules: Any = SimpleNamespace(parameters=dict)
    return _Steps(session, modules)


def sgd(learning_rate: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=learning_rate)


def test_tensor_stays_the_same_object(steps: _Steps) -> None:
    learning_rate = torch.tensor(0.1)
    optimizer = sgd(learning_rate)
    steps.before_step(optimizer, (), {})
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    steps.after_step(optimizer, (), {})
    assert optimizer.param_groups[0]["lr"] is learning_rate


def test_group_without_a_learning_rate_stays_without(steps: _Steps) -> None:
    optimizer = sgd(0.1)
    del optimizer.param_groups[0]["lr"]
    steps.before_step(optimizer, (), {})
    steps.after_step(optimizer, (), {})
    assert "lr" not in optimizer.param_groups[0]


def test_learning_rate_of_none_stays_none(steps: _Steps) -> None:
    """Adafactor of transformers has no learning rate if it uses relative steps."""
    optimizer = sgd(0.1)
    optimizer.param_groups[0]["lr"] = None
    steps.before_step(optimizer, (), {})
    assert optimizer.param_groups[0]["lr"] is None


def test_both_of_nested_optimizers_are_restored(steps: _Steps) -> None:
    """The step of ZeroRedundancyOptimizer calls that of an inner optimizer. They count as one update."""
    outer, inner = sgd(0.1), sgd(0.2)
    steps.before_step(outer, (), {})
    steps.before_step(inner, (), {})
    steps.after_step(inner, (), {})
    steps.after_step(outer, (), {})
    assert (outer.param_groups[0]["lr"], inner.param_groups[0]["lr"]) == (0.1, 0.2)
    assert steps.session.update == 1


def test_step_after_a_failed_step_begins_with_the_learning_rate_of_the_script(steps: _Steps) -> None:
    """The script catches the error of a step, so nothing is called after that step."""
    optimizer = sgd(0.1)
    steps.before_step(optimizer, (), {})
    steps.before_step(optimizer, (), {})
    steps.after_step(optimizer, (), {})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert steps.session.updates[0]["rates"] == [0.1]
