"""Check one layout: run it, compare it, and say where and why it differs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from everyrank.errors import CannotRunError, UnfitError
from everyrank.layout import Layout
from everyrank.parity.compare import Finding, compare
from everyrank.parity.diagnose import locate
from everyrank.parity.trace import Subject, Trace, references, trace_in_place
from everyrank.record import Parity
from everyrank.world import World, from_rank_0

__all__ = ["check_layout"]


def check_layout(
    subject: Subject, layout: Layout, world: World, key: str, by_name: bool = True
) -> tuple[Parity, list[float]]:
    """Compare `layout` with `single`: the outcome on every rank, and the losses in the layout's own precision.

    `key` is a name used once; the losses of a layout of one process are on rank 0 alone. A layout that cannot run
    here is `not_verified`, with the reason, and so is one that nobody asked for `by_name` and that the workload cannot
    have. A collective.
    """
    checks = list(subject.notes)
    findings: list[Finding] = []
    losses: list[float] = []
    for precision in dict.fromkeys(["float64", layout.precision]):
        variant = dataclasses.replace(layout, precision=precision)
        here = f"{key}/{precision}"
        try:
            run = trace_in_place(subject, variant, world, here)
        except (CannotRunError, UnfitError) as error:
            if by_name and isinstance(error, UnfitError):
                raise
            return Parity("not_verified", reason=str(error), checks=checks), []
        losses = run.losses if run is not None else []
        finding = Finding(
            **from_rank_0(world, f"{here}/compare", functools.partial(_compare, subject, variant, world, run))
        )
        findings.append(finding)
        if not finding.is_equal:
            first, cause = locate(subject, variant, world, here, finding)
            return _different(finding, f"{first} ({precision})", cause, checks), losses
        checks.append(f"{precision}: {finding.text}")
    in_float64 = findings[0]
    parity = Parity(
        "equal",
        bitwise=in_float64.loss_difference == 0.0,
        max_relative_difference=in_float64.loss_difference,
        tolerance=in_float64.loss_tolerance,
        checks=checks,
    )
    return parity, losses


def _compare(subject: Subject, layout: Layout, world: World, run: Trace | None) -> dict[str, Any]:
    assert run is not None, "rank 0 takes part in every run"
    single, *perturbed = references(subject, layout, world)
    return dataclasses.asdict(compare(single, perturbed, run, layout.precision))


def _different(finding: Finding, first: str, cause: str | None, checks: list[str]) -> Parity:
    return Parity(
        "different",
        bitwise=False,
        max_relative_difference=finding.loss_difference,
        tolerance=finding.loss_tolerance,
        first_divergence=first,
        cause=cause,
        checks=checks,
    )
