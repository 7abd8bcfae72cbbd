"""Check one layout: run it, compare it, and report where and why it differs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import torch

from everyrank.backends.async_buffers import nan_until_wait
from everyrank.errors import CannotRunError, LayoutError, NotFiniteError, UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.parallel.custom_precision import full_precision
from everyrank.parity.async_reads import read_before_wait
from everyrank.parity.case import ParityCase, single_like
from everyrank.parity.compare import Comparison, compare
from everyrank.parity.custom_gradients import OPTIMIZER_DIFFERS, cause_after_gradients, gradient_case
from everyrank.parity.diagnose import GRADIENTS_DIFFER, locate
from everyrank.parity.reference import ensure_references
from everyrank.parity.trace import Trace, trace_on_its_ranks
from everyrank.record import Parity
from everyrank.world import World, from_rank_0

__all__ = ["check_layout"]


def check_layout(
    case: ParityCase, layout: Layout, world: World, key: str, explicit: bool = True
) -> tuple[Parity, list[float]]:
    """Compare `layout` with its reference run, usually `single`.

    Returns the outcome on every rank, and the losses in the layout's own precision; only rank 0 has those of a layout
    of one process. `key` must be unique for each call. A layout that cannot run here is `not_verified`, with the
    reason. One that the workload does not allow is `refused` if the user named it (`explicit`), else
    `not_verified`.

    A collective.
    """
    with _without_tf32(), full_precision() as casts, nan_until_wait():
        parity, losses = _check_layout(case, layout, world, key, explicit)
    if casts and not case.compares_gradients:
        text = f"mixed precision of fully_shard was disabled for the comparison ({'; '.join(sorted(casts))})"
        parity = dataclasses.replace(parity, checks=[text, *parity.checks])
    if case.reference is not None and parity.reference is None and parity.scope is not None:
        scope = f"{parity.scope}, compared with {case.reference}"
        parity = dataclasses.replace(parity, scope=scope, reference=str(case.reference))
    return parity, losses


@contextlib.contextmanager
def _without_tf32() -> Generator[None]:
    """Disable TF32: by default cuDNN rounds the inputs of convolutions to ten bits, which may look like a mistake."""
    saved_flags = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = saved_flags


def _check_layout(
    case: ParityCase, layout: Layout, world: World, key: str, explicit: bool
) -> tuple[Parity, list[float]]:
    gradient_parity: Parity | None = None
    if layout.row.any_axes and not case.compares_gradients:
        gradient_parity, _ = check_layout(gradient_case(case), layout, world, f"{key}/gradients", explicit)
        if gradient_parity.status != "equal":
            return gradient_parity, []
    try:
        ensure_references(case, layout, world, key)
    except (CannotRunError, UnsupportedLayoutError, LayoutError) as error:
        # The reference cannot run this workload, so there is nothing to compare the layout with.
        return _parity_not_checked(error, explicit), []
    checks = [*case.notes, *([f"compared as {layout.repeatable()}"] if layout.repeatable() != layout else [])]
    checks += [f"gradients, {text}" for text in gradient_parity.checks] if gradient_parity is not None else []
    decisive: Comparison | None = None
    losses: list[float] = []
    not_compared: list[str] = []
    for precision in case.precisions(layout):
        variant = dataclasses.replace(layout.repeatable(), precision=precision)
        reference_key = str(single_like(case, layout, precision, world.size))
        run_key = f"{key}/{precision}"
        try:
            run = trace_on_its_ranks(
                case, variant, world, run_key, case.segments[reference_key], evaluates=precision == "float64"
            )
        except (CannotRunError, UnsupportedLayoutError, LayoutError) as error:
            user_error = type(error)(str(error).replace(str(variant), str(layout)))
            return _parity_not_checked(user_error, explicit), []
        except NotFiniteError as error:
            return _not_a_number(error, case, variant, world, checks), []
        losses = run.losses if run is not None else []
        compare_run = functools.partial(_compare, case, reference_key, precision, run)
        comparison = Comparison(**from_rank_0(world, f"{run_key}/compare", compare_run))
        not_compared = list(run.not_compared) if run is not None else []
        # repeat the reference before reporting a difference from a cached run
        if not comparison.is_equal and case.forget_cached(reference_key):
            return check_layout(case, layout, world, f"{key}/rerun", explicit)
        if not comparison.is_equal:
            return _parity_with_cause(comparison, case, variant, world, run_key, gradient_parity, checks), losses
        checks.append(f"{precision}, {comparison.scope}: {comparison.text}")
        decisive = decisive or comparison  # float64 is reported; the layout's own precision only adds a check
    assert decisive is not None
    if not layout.is_exact:
        scope = f"{decisive.scope}, compared with its simulation in one process"
        decisive = dataclasses.replace(decisive, scope=scope)
    return dataclasses.replace(_parity_equal(decisive, case, checks), not_compared=not_compared), losses


def _parity_equal(comparison: Comparison, case: ParityCase, checks: list[str]) -> Parity:
    return Parity(
        "equal",
        bitwise=comparison.loss_difference == 0.0,
        max_relative_difference=comparison.difference,
        tolerance=comparison.tolerance,
        scope="only the gradients" if case.compares_gradients else comparison.scope,
        checks=checks,
    )


def _parity_not_checked(error: CannotRunError | UnsupportedLayoutError | LayoutError, explicit: bool) -> Parity:
    if explicit and isinstance(error, LayoutError):
        raise error
    is_refused = explicit and isinstance(error, UnsupportedLayoutError)
    return Parity("refused" if is_refused else "not_verified", reason=str(error))


def _compare(case: ParityCase, reference_key: str, precision: str, run: Trace | None) -> dict[str, Any]:
    assert run is not None, "rank 0 takes part in every run"
    return dataclasses.asdict(compare(case.references[reference_key], run, precision))


def _not_a_number(error: NotFiniteError, case: ParityCase, layout: Layout, world: World, checks: list[str]) -> Parity:
    """Return the parity of a layout whose loss is NaN or infinite while the reference's is finite. A collective."""
    reference_key = str(single_like(case, layout, layout.precision, world.size))
    cause, location = read_before_wait(case, layout, world, case.segments[reference_key][0][0]), "update 0, loss (NaN)"
    if not cause:
        where = "in one process" if case.reference is None else f"under {case.reference}"
        update, _, reason = str(error).partition(": ")
        location, cause = f"{update}, loss ({layout.precision})", f"{reason}; {where} the loss is finite"
    return Parity("different", bitwise=False, first_divergence=location, cause=cause, checks=checks)


def _parity_with_cause(
    comparison: Comparison,
    case: ParityCase,
    layout: Layout,
    world: World,
    key: str,
    gradient_parity: Parity | None,
    checks: list[str],
) -> Parity:
    """Return the parity of a layout that differs, with the location and the likely cause. A collective."""
    location, cause = locate(case, layout, world, key, comparison)
    if gradient_parity is not None and layout.precision == "float64" and ", tensor " in location:
        cause = cause_after_gradients(case, layout, world, gradient_parity.not_compared)
    if cause == GRADIENTS_DIFFER and not case.compares_gradients:
        gradient_result, _ = check_layout(gradient_case(case), layout, world, f"{key}/gradients")
        cause = OPTIMIZER_DIFFERS if gradient_result.status == "equal" else cause
    return _parity_different(comparison, f"{location} ({layout.precision})", cause, checks)


def _parity_different(comparison: Comparison, location: str, cause: str | None, checks: list[str]) -> Parity:
    return Parity(
        "different",
        bitwise=False,
        max_relative_difference=comparison.difference,
        tolerance=comparison.tolerance,
        scope=comparison.scope,
        first_divergence=location,
        cause=cause,
        checks=checks,
    )
