"""Compares predictions with measured rows: errors of time and memory by source, coverage, regret, false verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from everyrank.plan.calibration import Calibration, fit_calibration, row_seconds
from everyrank.plan.configuration import make_configurations
from everyrank.plan.memory import predict_memory
from everyrank.plan.rows import Row

__all__ = ["validate_rows"]

_RESAMPLINGS = 10
_Rows = Sequence[Row]


def validate_rows(
    rows: _Rows,
    unreadable: Sequence[tuple[str, str]],
    calibration: Calibration,
    calibration_rows: _Rows = (),
) -> dict[str, Any]:
    """Return the table of errors; docs/plan.md describes its fields.

    `calibration_rows` are the rows of the calibration, if known: each of them is predicted by a fit without its part of
    the rows. Without them, rows that the calibration was fitted to are counted as in-sample.
    """
    timed = [row for row in rows if row.step_seconds]
    seconds = _seconds(timed, calibration, calibration_rows)
    known = _fingerprints(calibration_rows)
    in_sample = [row.source for row in timed if row.fingerprint in calibration.fitted_to - known]
    reasons: dict[str, int] = {}
    for _, reason in unreadable:
        reasons[reason] = reasons.get(reason, 0) + 1
    sources = sorted({row.source for row in rows})
    return {
        "validate": 1,
        "rows": len(rows) + len(unreadable),
        "read": len(rows),
        "unreadable": [{"reason": reason, "count": count} for reason, count in sorted(reasons.items())],
        "unreadable_ids": [{"id": name, "reason": reason} for name, reason in unreadable],
        "assumed": _assumed(rows),
        "left_out_of_fit": sum(row.fingerprint in known for row in timed),
        "in_sample": len(in_sample),
        "calibration": {
            "sources": list(calibration.sources),
            "fits": [
                {"gpu": gpu, "stack": stack, "rows": calibration.rows.get((gpu, stack), 0)}
                | {"matmul": fit.matmul, "stream": fit.stream, "launch": fit.launch}
                for (gpu, stack), fit in sorted(calibration.fits.items())
            ],
        },
        "time": [
            _time_of(source, timed, seconds, calibration, calibration_rows) | {"in_sample": in_sample.count(source)}
            for source in sources
            if _any(timed, source)
        ],
        "time_by_case": _by_case(timed, seconds, calibration),
        "memory": _memory(rows),
        "verdicts": _verdicts(rows),
        "choice": _choice(timed, seconds),
        "leave_one_source_out": _leave_one_out(timed),
        "resamplings": _resamplings(timed),
        "predictions": [
            {"id": row.id, "measured_seconds": row.step_seconds, "predicted_seconds": float(value)}
            for row, value in zip(timed, seconds, strict=True)
        ],
    }


def _fingerprints(rows: _Rows) -> frozenset[str]:
    return frozenset(row.fingerprint for row in rows if row.step_seconds)


def _any(rows: _Rows, source: str) -> bool:
    return any(row.source == source for row in rows)


def _assumed(rows: _Rows) -> list[dict[str, Any]]:
    counts: dict[str, int] = {}
    for row in rows:
        for text in row.assumed:
            name = text.partition("=")[0]
            counts[name] = counts.get(name, 0) + 1
    return [{"what": name, "count": count} for name, count in sorted(counts.items())]


def _seconds(timed: _Rows, calibration: Calibration, calibration_rows: _Rows, folds: int = 5) -> Any:
    """Return the predicted seconds; a row that is also in the calibration is predicted by a fit without it."""
    seconds = row_seconds(timed, calibration) if timed else np.zeros(0)
    calibration_fingerprints = _fingerprints(calibration_rows)
    shared = [index for index, row in enumerate(timed) if row.fingerprint in calibration_fingerprints]
    if not shared:
        return seconds
    order = np.random.default_rng(0).permutation(len(shared))
    for fold in range(folds):
        held_out_indices = [shared[i] for i in order[fold::folds]]
        held_out_fingerprints = _fingerprints([timed[i] for i in held_out_indices])
        training_rows = [row for row in calibration_rows if row.fingerprint not in held_out_fingerprints]
        if held_out_indices and any(row.step_seconds for row in training_rows):
            seconds[held_out_indices] = row_seconds(
                [timed[i] for i in held_out_indices], fit_calibration(training_rows, folds=10**9)
            )
    return seconds


def _errors(values: Any) -> dict[str, Any]:
    """Return count, mean, median and largest absolute error, bias, and the share within 10% of relative errors."""
    size = np.abs(values)
    if not len(size):
        return {"rows": 0}
    return {
        "rows": len(size),
        "mean_error": float(size.mean()),
        "median_error": float(np.median(size)),
        "largest_error": float(size.max()),
        "bias": float(values.mean()),
        "within_10_percent": float((size <= 0.1).mean()),
    }


def _measured(rows: _Rows) -> Any:
    return np.array([row.step_seconds for row in rows], dtype=float)


def _flops(rows: _Rows) -> Any:
    """Return the operations of an update over the peak of all GPUs, which is the seconds at a share of peak of 1."""
    return np.array(
        [
            row.degrees["replicate"] * row.degrees["shard"] * row.degrees["micro"] * row.degrees["accumulate"]
            * row.sizes.seq * row.sizes.flops_per_token / (row.gpu.flops * row.gpus)
            for row in rows
        ]
    )  # fmt: skip


def _time_of(
    source: str, timed: _Rows, seconds: Any, calibration: Calibration, calibration_rows: _Rows
) -> dict[str, Any]:
    """Return the errors of a source, and those of a constant share of peak: of the calibration rows, and its own."""
    index = [i for i, row in enumerate(timed) if row.source == source]
    rows, predicted = [timed[i] for i in index], seconds[index]
    measured, ideal = _measured(rows), _flops(rows)
    own_share = float(np.median(ideal / measured))
    timed_calibration_rows = [row for row in calibration_rows if row.step_seconds]
    calibration_share = (
        float(np.median(_flops(timed_calibration_rows) / _measured(timed_calibration_rows)))
        if timed_calibration_rows
        else None
    )
    factors = np.array([math.exp(calibration.half_width(*row.case)) for row in rows])
    ratio = measured / predicted
    covered = (ratio <= factors) & (ratio >= 1 / factors)
    cases = sorted({calibration.fitted(*row.case)[1] for row in rows})
    return {
        "source": source,
        "cases": cases,
        **_errors(predicted / measured - 1),
        "interval": 0.9,
        "coverage": float(covered.mean()),
        "median_factor": float(np.median(factors)),
        "own_share_of_peak": own_share,
        "own_share_error": _errors(ideal / own_share / measured - 1),
        "calibration_share_error": _errors(ideal / calibration_share / measured - 1) if calibration_share else None,
    }


def _by_case(timed: _Rows, seconds: Any, calibration: Calibration) -> list[dict[str, Any]]:
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(timed):
        groups.setdefault(calibration.fitted(*row.case)[1], []).append(index)
    result: list[dict[str, Any]] = []
    for case, index in sorted(groups.items()):
        rows = [timed[i] for i in index]
        measured = _measured(rows)
        factors = np.array([math.exp(calibration.half_width(*row.case)) for row in rows])
        ratio = measured / seconds[index]
        covered = float(((ratio <= factors) & (ratio >= 1 / factors)).mean())
        result.append({"case": case, **_errors(seconds[index] / measured - 1), "coverage": covered})
    return result


def _memory(rows: _Rows) -> list[dict[str, Any]]:
    """Return the errors of memory by source and kind of memory."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.memory_bytes:
            groups.setdefault((row.source, row.memory_kind), []).append(row)
    result: list[dict[str, Any]] = []
    for (source, kind), chosen in sorted(groups.items()):
        errors, above = [], 0
        for row in chosen:
            memory = predict_memory(make_configurations(row.sizes, row.stack, row.degrees))
            assert row.memory_bytes is not None
            predicted = {"allocated": memory.allocated, "reserved": memory.reserved, "device": memory.device}[kind]
            errors.append(float(predicted) / row.memory_bytes - 1)
            above += row.memory_bytes > float(memory.high)
        result.append({"source": source, "kind": kind, **_errors(np.array(errors)), "above_upper_end": above})
    return result


def _verdicts(rows: _Rows) -> dict[str, int]:
    """Count the verdicts on rows that ran, and on rows that ran out of memory (there `fits` is false)."""
    counts = {"ran_fits": 0, "ran_may_not_fit": 0, "false_does_not_fit": 0}
    counts |= {"ran_out_does_not_fit": 0, "ran_out_may_not_fit": 0, "false_fits": 0}
    for row in rows:
        if not (row.ran_out or row.step_seconds or row.memory_bytes):
            continue
        memory = predict_memory(make_configurations(row.sizes, row.stack, row.degrees))
        fits, cannot = float(memory.high) <= row.gpu.memory, float(memory.low) > row.gpu.memory
        if row.ran_out:
            counts["false_fits" if fits else "ran_out_does_not_fit" if cannot else "ran_out_may_not_fit"] += 1
        else:
            counts["ran_fits" if fits else "false_does_not_fit" if cannot else "ran_may_not_fit"] += 1
    return counts


def _choice(timed: _Rows, seconds: Any) -> list[dict[str, Any]]:
    """Return regret and rank correlation by source, for models with several rows on the same GPUs."""
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(timed):
        groups.setdefault((row.source, row.sizes, row.gpu.name, row.gpus), []).append(index)
    by_source: dict[str, list[tuple[float, float, float, int]]] = {}
    for (source, sizes, _, gpus), index in groups.items():
        if len(index) < 3:
            continue
        tokens = np.array([_samples(timed[i]) * sizes.seq / gpus for i in index])
        measured, predicted = tokens / _measured([timed[i] for i in index]), tokens / seconds[index]
        best = measured.max()
        best_three = np.argsort(-predicted)[:3]
        regret_of_first, regret_of_three = best / measured[best_three[0]] - 1, best / measured[best_three].max() - 1
        by_source.setdefault(source, []).append(
            (regret_of_first, regret_of_three, _spearman(measured, predicted), len(index))
        )
    return [
        {
            "source": source,
            "models": len(values),
            "rows": sum(value[3] for value in values),
            "regret_of_favourite": float(np.mean([value[0] for value in values])),
            "regret_of_best_of_three": float(np.mean([value[1] for value in values])),
            "rank_correlation": float(np.mean([value[2] for value in values])),
        }
        for source, values in sorted(by_source.items())
    ]


def _samples(row: Row) -> float:
    return row.degrees["replicate"] * row.degrees["shard"] * row.degrees["micro"] * row.degrees["accumulate"]


def _spearman(first: Any, second: Any) -> float:
    """Return Spearman's rank correlation; 0 if one of them is constant."""

    def ranks(values: Any) -> Any:
        return np.array([(values < value).sum() + ((values == value).sum() - 1) / 2 for value in values])

    left, right = ranks(first), ranks(second)
    if left.std() == 0 or right.std() == 0:
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])


def _leave_one_out(timed: _Rows) -> list[dict[str, Any]]:
    """Return the errors of each source by a calibration of all other sources."""
    sources = sorted({row.source for row in timed})
    result: list[dict[str, Any]] = []
    for source in sources if len(sources) > 1 else []:
        others = fit_calibration([row for row in timed if row.source != source], folds=10**9)
        rows = [row for row in timed if row.source == source]
        result.append({"source": source, **_errors(row_seconds(rows, others) / _measured(rows) - 1)})
    return result


def _resamplings(timed: _Rows) -> dict[str, Any] | None:
    """Return the median and worst errors of ten fits to a random half of the rows, each predicting the other half."""
    if len(timed) < 16:
        return None
    errors_by_source: dict[str, list[dict[str, Any]]] = {}
    total: list[dict[str, Any]] = []
    fits: dict[str, list[float]] = {}
    for seed in range(_RESAMPLINGS):
        half = np.random.default_rng(seed).random(len(timed)) < 0.5
        chosen = [row for row, is_in in zip(timed, half, strict=True) if is_in]
        held_out = [row for row, is_in in zip(timed, half, strict=True) if not is_in]
        if not chosen or not held_out:
            continue
        calibration = fit_calibration(chosen, folds=10**9)
        for (gpu, stack), fit in calibration.fits.items():
            fits.setdefault(f"{gpu} {stack}", []).append(fit.matmul)
        errors = row_seconds(held_out, calibration) / _measured(held_out) - 1
        total.append(_errors(errors))
        for source in {row.source for row in held_out}:
            mask = np.array([row.source == source for row in held_out])
            errors_by_source.setdefault(source, []).append(_errors(errors[mask]))

    def median_and_worst(values: Callable[[dict[str, Any]], float], many: list[dict[str, Any]]) -> dict[str, float]:
        numbers = [values(errors_of_draw) for errors_of_draw in many]
        return {"median": float(np.median(numbers)), "worst": max(numbers)}

    return {
        "draws": len(total),
        "mean_error": median_and_worst(lambda errors_of_draw: errors_of_draw["mean_error"], total),
        "by_source": [
            {
                "source": source,
                "mean_error": median_and_worst(lambda errors_of_draw: errors_of_draw["mean_error"], many),
            }
            for source, many in sorted(errors_by_source.items())
        ],
        "matmul": [{"case": case, "least": min(values), "most": max(values)} for case, values in sorted(fits.items())],
    }
