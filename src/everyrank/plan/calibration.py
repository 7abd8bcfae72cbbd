"""Fit three numbers for each GPU kind and stack to measured rows, and give intervals with the stated coverage.

The fit is regularised: log-normal priors around `PRIOR`, because absurd numbers may explain one table and fail on the
next. The intervals are split-conformal (Vovk et al. 2005; Lei et al. 2018): the half-width is a quantile of the
errors on rows that were left out of the fit, by case: the same GPU and stack, a different stack, or no fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from everyrank.errors import UsageError
from everyrank.plan.configuration import Configurations, make_configurations
from everyrank.plan.hardware import Link, find_gpu
from everyrank.plan.rows import Row
from everyrank.plan.step_time import PRIOR, Fitted, predict_step

__all__ = [
    "CASES",
    "Calibration",
    "case_of",
    "fit_calibration",
    "read_calibration",
    "row_seconds",
    "shipped_calibration",
    "write_calibration",
]

CASES = ("same GPU and stack", "other stack or GPU", "nothing fitted")
_SPREADS = (0.25, 0.25, 0.5)  # standard deviations of the priors, in natural logarithms
_NOISE = 0.1
_MIN_ROWS = 16  # with fewer rows, the interval of a case is not used
_COVERAGE = 0.9
_WIDEST = 1.5  # half-width of the interval in natural logarithms, if there are no rows


@dataclass(frozen=True)
class Calibration:
    """Fitted numbers by (GPU kind, stack), and errors of left-out rows, in natural logarithms.

    errors    by case; those of the first case also by `GPU kind stack`
    rows      number of rows of each case
    sources   the tables of the rows
    largest   for each axis and size, the largest value in any row: the range that was measured
    fitted_to  the fingerprints of the rows, whose errors are in-sample
    """

    fits: Mapping[tuple[str, str], Fitted] = field(default_factory=dict[tuple[str, str], Fitted])
    rows: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    sources: tuple[str, ...] = ()
    largest: Mapping[str, float] = field(default_factory=dict[str, float])
    fitted_to: frozenset[str] = frozenset()

    def outside(self, configuration: Configurations, gpus: int) -> list[str]:
        """Return the values of a configuration that are larger than in any row: `context 8 (measured: 1)`."""
        values = {name: float(np.max(getattr(configuration, name))) for name in _AXES} | {"gpus": float(gpus)}
        largest = self.largest
        return [
            f"{name} {value:g} (measured: {largest[name]:g})"
            for name, value in values.items()
            if value > largest.get(name, 1)
        ]

    def fitted(self, gpu: str, stack: str) -> tuple[Fitted, str]:
        """Return the fitted numbers for a GPU kind and stack, and the case of their interval."""
        if (gpu, stack) in self.fits:
            return self.fits[gpu, stack], CASES[0]
        similar_fits = [fit for (_, name), fit in self.fits.items() if name == stack]
        similar_fits = similar_fits or [fit for (kind, _), fit in self.fits.items() if kind == gpu]
        if not similar_fits:
            return PRIOR, CASES[2]
        means = [math.exp(float(np.mean([math.log(getattr(fit, name)) for fit in similar_fits]))) for name in _NAMES]
        return Fitted(*means), CASES[1]

    def half_width(self, gpu: str, stack: str, coverage: float = _COVERAGE) -> float:
        """Return the half-width of the interval, in natural logarithms: seconds times exp(+-half_width)."""
        case = case_of(self, gpu, stack)
        order = CASES[CASES.index(case) :]
        if case == CASES[0] and self.rows.get((gpu, stack), 0) < _MIN_ROWS:
            order = CASES[1:]
        names = [f"{gpu} {stack}", *order] if order[0] == CASES[0] else order
        widths = [_quantile(self.errors.get(name, ()), coverage) for name in names]
        if case == CASES[2]:  # never narrower than with the numbers of a different stack
            widths = [
                max(
                    (width for width in (*widths, self._half_width_of_other_stack(coverage)) if width is not None),
                    default=None,
                )
            ]
        known = [width for width in widths if width is not None]
        return known[0] if known else _WIDEST

    def _half_width_of_other_stack(self, coverage: float) -> float | None:
        return _quantile(self.errors.get(CASES[1], ()), coverage)


def case_of(calibration: Calibration, gpu: str, stack: str) -> str:
    """Return which of `CASES` a prediction belongs to."""
    return calibration.fitted(gpu, stack)[1]


def _quantile(errors: Sequence[float], coverage: float) -> float | None:
    """Return the split-conformal quantile; None for too few errors."""
    rank = math.ceil((len(errors) + 1) * coverage)
    return float(sorted(errors)[rank - 1]) if len(errors) >= 8 and rank <= len(errors) else None


_NAMES = ("matmul", "stream", "launch")
_AXES = ("tensor", "pipeline", "replicate", "shard", "context", "hidden", "layers", "seq")


@dataclass(frozen=True)
class _Group:
    """Rows of one case with the same links, as columns."""

    case: tuple[str, str]
    configurations: Configurations
    links: tuple[Link, Link]
    measured: Any
    index: list[int]

    def seconds(self, fitted: Fitted) -> Any:
        gpu = find_gpu(self.case[0])
        return np.atleast_1d(predict_step(self.configurations, gpu, *self.links, fitted).total)


def _grouped(rows: Sequence[Row]) -> list[_Group]:
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault((row.case, (row.inside, row.across)), []).append(index)
    grouped: list[_Group] = []
    for (case, links), index in groups.items():
        group_rows = [rows[i] for i in index]
        columns = {name: [row.degrees[name] for row in group_rows] for name in group_rows[0].degrees}
        columns["sequence"] = [row.degrees.get("sequence", 0) for row in group_rows]
        configurations = make_configurations(
            [row.sizes for row in group_rows], [row.stack for row in group_rows], columns
        )
        measured = np.array([row.step_seconds or np.nan for row in group_rows])
        grouped.append(_Group(case, configurations, links, measured, index))
    return grouped


def row_seconds(rows: Sequence[Row], calibration: Calibration) -> Any:
    """Return the predicted seconds of each row, as a column."""
    seconds = np.zeros(len(rows))
    for group in _grouped(rows):
        seconds[group.index] = group.seconds(calibration.fitted(*group.case)[0])
    return seconds


def _fit(groups: Sequence[_Group]) -> Fitted:
    """Fit the numbers to the rows of one case, near the prior, by Gauss-Newton on a robust loss.

    It starts from a fast and a slow launch, because the slope is zero if launches are hidden.
    """
    fits = [_descend(groups, launch) for launch in (PRIOR.launch, 2.5 * PRIOR.launch)]
    return Fitted(*(float(value) for value in np.exp(min(fits, key=lambda loss_and_point: loss_and_point[0])[1])))


def _descend(groups: Sequence[_Group], launch: float) -> tuple[float, Any]:
    """Return (loss, the logarithms of the three numbers) from one start."""
    prior, spread = np.log([PRIOR.matmul, PRIOR.stream, PRIOR.launch]), 1 / np.array(_SPREADS) ** 2
    point = np.log([PRIOR.matmul, PRIOR.stream, launch])

    def errors(position: Any) -> Any:
        fitted = Fitted(*np.exp(position))
        return np.concatenate([np.log(group.seconds(fitted) / group.measured) for group in groups])

    for _ in range(12):
        current_errors = errors(point)
        slopes = np.stack([(errors(point + step) - current_errors) / 0.02 for step in 0.02 * np.eye(3)], axis=1)
        weight = 1 / np.maximum(np.abs(current_errors) / _NOISE, 1.0) / _NOISE**2  # Huber
        matrix = slopes.T @ (slopes * weight[:, None]) + np.diag(spread)
        change = -np.linalg.solve(matrix, slopes.T @ (weight * current_errors) + spread * (point - prior))
        point = np.clip(point + np.clip(change, -0.3, 0.3), np.log([0.1, 0.1, 1e-6]), np.log([1.0, 1.0, 1e-4]))
        if np.abs(change).max() < 1e-4:
            break
    size = np.abs(errors(point)) / _NOISE
    loss = np.where(size <= 1, size**2 / 2, size - 0.5).sum() + (spread * (point - prior) ** 2).sum() / 2
    return float(loss), point


def _fits(rows: Sequence[Row]) -> dict[tuple[str, str], Fitted]:
    by_case: dict[tuple[str, str], list[_Group]] = {}
    for group in _grouped(rows):
        by_case.setdefault(group.case, []).append(group)
    return {case: _fit(groups) for case, groups in by_case.items()}


def fit_calibration(rows: Sequence[Row], folds: int = 5, seed: int = 0) -> Calibration:
    """Return the calibration of measured rows; those without a time are left out.

    Errors for the intervals come from rows that the fit has not seen: one of `folds` parts at a time for the same GPU
    and stack (each has its own interval, from 16 rows), all rows of a case for a different stack, and all rows for the
    prior.
    """
    timed = [row for row in rows if row.step_seconds]
    fits = _fits(timed)
    counts = {case: sum(row.case == case for row in timed) for case in fits}
    errors: dict[str, list[float]] = {name: [] for name in CASES}
    order = np.random.default_rng(seed).permutation(len(timed))
    held_out_parts = [set(order[fold::folds].tolist()) for fold in range(folds)] if len(timed) >= 2 * folds else []
    for held_out in held_out_parts:
        training_rows, held_out_rows = (
            [row for i, row in enumerate(timed) if i not in held_out],
            [timed[i] for i in sorted(held_out)],
        )
        partial_fit = Calibration(_fits(training_rows))
        held_out_rows = [row for row in held_out_rows if row.case in partial_fit.fits]
        errors[CASES[0]] += (held_out_errors := _log_errors(held_out_rows, partial_fit))
        for row, error in zip(held_out_rows, held_out_errors, strict=True):
            errors.setdefault(f"{row.case[0]} {row.case[1]}", []).append(error)
    for case in fits:
        other_fits = Calibration({name: fit for name, fit in fits.items() if name[1] != case[1] and name != case})
        errors[CASES[1]] += (
            _log_errors([row for row in timed if row.case == case], other_fits) if other_fits.fits else []
        )
    errors[CASES[2]] = _log_errors(timed, Calibration())
    largest = {name: max(float(row.degrees[name]) for row in timed) for name in _AXES[:5]} if timed else {}
    if timed:
        largest |= {name: max(float(getattr(row.sizes, name)) for row in timed) for name in _AXES[5:]}
        largest["gpus"] = float(max(row.gpus for row in timed))
    sources, fitted_to = tuple(sorted({row.source for row in timed})), frozenset(row.fingerprint for row in timed)
    return Calibration(fits, counts, errors, sources, largest, fitted_to)


def _log_errors(rows: Sequence[Row], calibration: Calibration) -> list[float]:
    if not rows:
        return []
    measured = np.array([row.step_seconds for row in rows], dtype=float)
    return [float(error) for error in np.abs(np.log(row_seconds(rows, calibration) / measured))]


def write_calibration(calibration: Calibration) -> str:
    """Return the calibration as JSON text, which `read_calibration` reads."""
    fits = [
        {"gpu": gpu, "stack": stack, "rows": calibration.rows.get((gpu, stack), 0)}
        | {name: round(getattr(fit, name), 9) for name in _NAMES}
        for (gpu, stack), fit in sorted(calibration.fits.items())
    ]
    errors = {case: sorted(round(error, 4) for error in values) for case, values in calibration.errors.items()}
    written = {"calibration": 1, "fits": fits, "errors": errors, "sources": list(calibration.sources)}
    written |= {"largest": dict(calibration.largest), "fitted_to": " ".join(sorted(calibration.fitted_to))}
    return json.dumps(written, indent=1) + "\n"


def _from_json(read: Mapping[str, Any]) -> Calibration:
    fits = {(fit["gpu"], fit["stack"]): Fitted(*(float(fit[name]) for name in _NAMES)) for fit in read["fits"]}
    rows = {(fit["gpu"], fit["stack"]): int(fit["rows"]) for fit in read["fits"]}
    largest = {name: float(value) for name, value in read.get("largest", {}).items()}
    fitted_to = frozenset(str(read.get("fitted_to", "")).split())
    return Calibration(fits, rows, read.get("errors", {}), tuple(read.get("sources", ())), largest, fitted_to)


def shipped_calibration() -> Calibration:
    """Return the calibration in this package, fitted to published tables."""
    text = resources.files("everyrank.plan").joinpath("fitted.json").read_text(encoding="utf-8")
    return _from_json(json.loads(text))


def read_calibration(path: Path) -> Calibration:
    """Return the calibration of a file of measured rows, or one of `write_calibration`. Raises `UsageError`."""
    from everyrank.plan.rows import read_rows

    try:
        read: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, dict) and read.get("calibration") == 1:
        try:
            return _from_json(read)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}: {error} is missing in this calibration; write it again with plan --write-calibration"
            ) from error
    rows, _ = read_rows(path)
    if not any(row.step_seconds for row in rows):
        raise UsageError(f"{path}: no row has a measured time; see docs/plan.md for the fields")
    return fit_calibration(rows)
