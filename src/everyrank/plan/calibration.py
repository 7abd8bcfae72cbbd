"""Fit three numbers for each GPU kind and stack to measured rows, and give intervals that cover what they promise.

The fit is regularised: log-normal priors around `PRIOR`, because one table can be explained by absurd numbers that fail
on the next. The intervals are split-conformal (Vovk et al. 2005; Lei et al. 2018): the half-width is a quantile of the
errors on rows that were left out of the fit, by case: the same GPU and stack, another stack, or nothing fitted.
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
_SPREADS = (0.25, 0.25, 0.5)  # of the priors, in natural logarithms
_NOISE = 0.1
_FEWEST = 16  # rows below which a case's own interval is not trusted
_COVERAGE = 0.9
_WIDEST = 1.5  # of an interval's half-width, in natural logarithms, where no row is known


@dataclass(frozen=True)
class Calibration:
    """Fitted numbers by (GPU kind, stack), and errors of left-out rows, in natural logarithms.

    errors    by case, and those of the first case by `GPU kind stack`, too
    rows      how many rows each case has
    sources   the tables they are from
    largest   of each axis and size, the largest value in any row: the range that was measured
    fitted_to  the fingerprints of the rows: errors on them are in-sample
    """

    fits: Mapping[tuple[str, str], Fitted] = field(default_factory=dict[tuple[str, str], Fitted])
    rows: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    sources: tuple[str, ...] = ()
    largest: Mapping[str, float] = field(default_factory=dict[str, float])
    fitted_to: frozenset[str] = frozenset()

    def outside(self, c: Configurations, gpus: int) -> list[str]:
        """Return what of a configuration is larger than in any row: `context 8 (measured: 1)`."""
        values = {name: float(np.max(getattr(c, name))) for name in _AXES} | {"gpus": float(gpus)}
        known = self.largest
        return [
            f"{name} {value:g} (measured: {known[name]:g})"
            for name, value in values.items()
            if value > known.get(name, 1)
        ]

    def fitted(self, gpu: str, stack: str) -> tuple[Fitted, str]:
        """Return the numbers for a GPU kind and stack, and the case that their interval is of."""
        if (gpu, stack) in self.fits:
            return self.fits[gpu, stack], CASES[0]
        near = [fit for (_, name), fit in self.fits.items() if name == stack]
        near = near or [fit for (kind, _), fit in self.fits.items() if kind == gpu]
        if not near:
            return PRIOR, CASES[2]
        middle = [math.exp(float(np.mean([math.log(getattr(fit, name)) for fit in near]))) for name in _NAMES]
        return Fitted(*middle), CASES[1]

    def half_width(self, gpu: str, stack: str, coverage: float = _COVERAGE) -> float:
        """Return the half-width of the interval, in natural logarithms: seconds times exp(+-half_width)."""
        case = case_of(self, gpu, stack)
        order = CASES[CASES.index(case) :]
        if case == CASES[0] and self.rows.get((gpu, stack), 0) < _FEWEST:
            order = CASES[1:]
        names = [f"{gpu} {stack}", *order] if order[0] == CASES[0] else order
        widths = [_quantile(self.errors.get(name, ()), coverage) for name in names]
        if case == CASES[2]:  # never narrower than with numbers of another stack
            widths = [max((width for width in (*widths, self._other(coverage)) if width is not None), default=None)]
        known = [width for width in widths if width is not None]
        return known[0] if known else _WIDEST

    def _other(self, coverage: float) -> float | None:
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
    made: list[_Group] = []
    for (case, links), index in groups.items():
        chosen = [rows[i] for i in index]
        columns = {name: [row.degrees[name] for row in chosen] for name in chosen[0].degrees}
        columns["sequence"] = [row.degrees.get("sequence", 0) for row in chosen]
        configurations = make_configurations([row.sizes for row in chosen], [row.stack for row in chosen], columns)
        measured = np.array([row.step_seconds or np.nan for row in chosen])
        made.append(_Group(case, configurations, links, measured, index))
    return made


def row_seconds(rows: Sequence[Row], calibration: Calibration) -> Any:
    """Return the predicted seconds of each row, as a column."""
    seconds = np.zeros(len(rows))
    for group in _grouped(rows):
        seconds[group.index] = group.seconds(calibration.fitted(*group.case)[0])
    return seconds


def _fit(groups: Sequence[_Group]) -> Fitted:
    """Return the numbers that explain the rows of one case best, near the prior. Gauss-Newton on a robust loss.

    It starts from a fast and from a slow launch: where launches are hidden, their slope is zero.
    """
    fits = [_descend(groups, launch) for launch in (PRIOR.launch, 2.5 * PRIOR.launch)]
    return Fitted(*(float(value) for value in np.exp(min(fits, key=lambda one: one[0])[1])))


def _descend(groups: Sequence[_Group], launch: float) -> tuple[float, Any]:
    """Return (loss, the logarithms of the three numbers) from one start."""
    prior, spread = np.log([PRIOR.matmul, PRIOR.stream, PRIOR.launch]), 1 / np.array(_SPREADS) ** 2
    point = np.log([PRIOR.matmul, PRIOR.stream, launch])

    def errors(at: Any) -> Any:
        fitted = Fitted(*np.exp(at))
        return np.concatenate([np.log(group.seconds(fitted) / group.measured) for group in groups])

    for _ in range(12):
        here = errors(point)
        slopes = np.stack([(errors(point + step) - here) / 0.02 for step in 0.02 * np.eye(3)], axis=1)
        weight = 1 / np.maximum(np.abs(here) / _NOISE, 1.0) / _NOISE**2  # Huber
        matrix = slopes.T @ (slopes * weight[:, None]) + np.diag(spread)
        change = -np.linalg.solve(matrix, slopes.T @ (weight * here) + spread * (point - prior))
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
    and stack (each has its own interval, from 16 rows), all of a case for another stack, and the prior for nothing
    fitted.
    """
    timed = [row for row in rows if row.step_seconds]
    fits = _fits(timed)
    counts = {case: sum(row.case == case for row in timed) for case in fits}
    errors: dict[str, list[float]] = {name: [] for name in CASES}
    order = np.random.default_rng(seed).permutation(len(timed))
    parts = [set(order[fold::folds].tolist()) for fold in range(folds)] if len(timed) >= 2 * folds else []
    for part in parts:
        kept, left = [row for i, row in enumerate(timed) if i not in part], [timed[i] for i in sorted(part)]
        some = Calibration(_fits(kept))
        left = [row for row in left if row.case in some.fits]
        errors[CASES[0]] += (left_errors := _log_errors(left, some))
        for row, error in zip(left, left_errors, strict=True):
            errors.setdefault(f"{row.case[0]} {row.case[1]}", []).append(error)
    for case in fits:
        others = Calibration({name: fit for name, fit in fits.items() if name[1] != case[1] and name != case})
        errors[CASES[1]] += _log_errors([row for row in timed if row.case == case], others) if others.fits else []
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
    """Return the calibration of a file: measured rows, or what `write_calibration` wrote. Raises `UsageError`."""
    from everyrank.plan.rows import read_rows

    try:
        read: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, dict) and read.get("calibration") == 1:
        try:
            return _from_json(read)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: a calibration without {error}; write it again with plan --calibrate") from error
    rows, _ = read_rows(path)
    if not any(row.step_seconds for row in rows):
        raise UsageError(f"{path}: no row with a measured time; see docs/plan.md for the fields")
    return fit_calibration(rows)
