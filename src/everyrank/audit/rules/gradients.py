"""Checks that the gradient of an optimizer step is a multiple of the sum over all backwards and ranks.

g = c * sum of g(rank, backward) must hold, with the same c for all. Least squares over samples of the tensors
(`watch/gradients.py`) gives the factors. This needs no knowledge of the script, and dropout, batch norm and low
precision do not matter.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.events import Backward, DiscardedGradients, NoSync, OptimizerStep
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings, short_location
from everyrank.audit.rules.loss_terms import BackwardKey, check_loss_terms

__all__ = ["check_gradients"]

_HALF_PRECISION_RESIDUAL = 1e-2  # relative residual of a gradient that the script rounds to half precision
_EXTRA_ZERO_SHARE, _MIN_NONZERO = 0.3, 32  # of compressed gradients: share of zeros, and elements that tell
_TOLERANCE, _SCALED_TOLERANCE = 1e-4, 2e-3  # relative residual; the second with a loss scale (float16)


@dataclasses.dataclass(frozen=True)
class _Fit:
    """The factors of a least-squares fit, one for each column, and the residual relative to the gradient."""

    factors: list[float]
    residual: float


@dataclasses.dataclass
class _Update:
    """The gradients of one update, and the names of the parameters that all ranks update."""

    number: int
    line: str
    names: list[str]
    backwards: dict[BackwardKey, dict[str, NDArray[np.float64]]]
    step_gradients: dict[int, dict[str, NDArray[np.float64]]]  # before clipping
    carried: dict[int, dict[str, NDArray[np.float64]]]
    tolerance: float

    @property
    def has_carried(self) -> bool:
        return any(
            float(np.abs(value).sum()) > 0 for gradients in self.carried.values() for value in gradients.values()
        )

    def fit(self, names: Sequence[str], rank: int, columns: Sequence[Sequence[BackwardKey]]) -> _Fit:
        """Fit the gradient of a rank by sums of backwards (one for each column) and the previous update's gradient."""
        target = np.concatenate([self.step_gradients[rank][name] for name in names])
        sums = [
            np.concatenate(
                [sum((self._backward_gradient(key, name) for key in column), 0.0 * target[:1]) for name in names]
            )
            for column in columns
        ]
        if self.has_carried and self.carried[rank]:
            zeros = {name: np.zeros_like(self.step_gradients[rank][name]) for name in names}
            sums.append(np.concatenate([self.carried[rank].get(name, zeros[name]) for name in names]))
        matrix = np.stack(sums, 1)
        if not np.linalg.norm(target) or not np.linalg.norm(matrix):
            return _Fit([0.0] * matrix.shape[1], float(np.linalg.norm(target) > 0 or np.linalg.norm(matrix) > 0))
        scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
        factors = np.linalg.lstsq(matrix / scale, target, rcond=None)[0] / scale
        residual = float(np.linalg.norm(matrix @ factors - target) / np.linalg.norm(target))
        return _Fit([float(factor) for factor in factors], residual)

    def _backward_gradient(self, key: BackwardKey, name: str) -> NDArray[np.float64]:
        gradient = self.backwards[key].get(name)
        return np.zeros_like(self.step_gradients[key[0]][name]) if gradient is None else gradient


def check_gradients(evidence: Evidence, findings: Findings) -> None:
    """Check the gradient of each recorded update, and report what cannot be checked."""
    judged = 0
    are_zero = [steps[evidence.ranks[0]].is_zero for steps in evidence.steps.values()]
    if are_zero and all(are_zero):
        line = next(iter(evidence.steps.values()))[evidence.ranks[0]].line
        text = f"all gradients are exactly zero in all {len(are_zero)} updates: nothing is trained"
        fix = "check whether the loss is constant, or has a single class"
        findings.add("FAIL", "gradient.zero", line, text, fix)
        return
    if evidence.is_opaque:
        return  # `check_replicas` reports it
    _check_gathered_features(evidence, findings)
    if evidence.is_split:
        findings.add_unchecked("gradients: layers are split over ranks (tensor or pipeline parallelism)")
        return
    for number in sorted(evidence.steps.keys() - evidence.incomplete_updates):
        update = _read_update(evidence, number)
        if update is not None:
            judged += 1
            _judge_update(evidence, update, findings)
    if not judged:
        findings.add_unchecked("gradients: no update was recorded in which all ranks update the same tensors")
    discarded = evidence.all_of(DiscardedGradients)
    num_backwards = Counter((event.rank, event.update) for event in evidence.all_of(Backward))
    usual_count = Counter(num_backwards.values()).most_common(1)[0][0] if num_backwards else 0
    for event in discarded[:1]:
        # a custom loss scaler may skip a step: at most half of the events, on two ranks
        is_skipped = usual_count == event.num_backwards == 1 and len(discarded) <= len(evidence.steps)
        findings.add(
            "NOTE" if is_skipped else "WARN",
            "gradient.thrown-away",
            event.line,
            f"zero_grad clears the gradient of {event.num_backwards} backwards before any optimizer step",
            "call zero_grad after the step, or before the first backward of an update",
            _step_lines(evidence),
        )


def _step_lines(evidence: Evidence) -> tuple[str, ...]:
    """The lines of the optimizer steps."""
    return tuple(dict.fromkeys(step.line for step in evidence.of(evidence.ranks[0], OptimizerStep)))


def _check_gathered_features(evidence: Evidence, findings: Findings) -> None:
    """Find losses of features from all_gather, through which no gradient flows back.

    If all ranks compute the same loss from all features, each rank still gets the whole gradient of its own features.
    """
    for events in zip(*(evidence.of(rank, Backward) for rank in evidence.ranks), strict=False):
        losses = [event.gathered_loss for event in events if event.gathered_loss is not None]
        if len(losses) < len(events) or max(losses) - min(losses) <= _TOLERANCE * max(map(abs, losses)):
            continue
        if events[0].is_detached:
            findings.add_unchecked(
                f"the gradient of the features gathered at {short_location(events[0].gathered_at)}: they are detached "
                "first (detach, no_grad), which may be intended"
            )
        else:
            findings.add(
                "WARN",
                "gradient.lost",
                events[0].gathered_at,
                "features go into the loss through all_gather, which has no backward: the gradient of the other ranks' "
                "losses with respect to this rank's features is lost",
                "use torch.distributed.nn.functional.all_gather, whose backward sums the gradients of all ranks",
                (events[0].line,),
            )  # not refuted by a comparison: one rank loses the gradient of its own features, too
            return


def _read_update(evidence: Evidence, number: int) -> _Update | None:
    """The gradients of an update, with shards combined; None unless all ranks have recorded the same tensors."""
    samples_by_rank = {rank: evidence.gradient_samples(rank, number) for rank in evidence.ranks}
    known_samples = {rank: samples for rank, samples in samples_by_rank.items() if samples is not None}
    if len(known_samples) < len(samples_by_rank) or not any(samples.backwards for samples in known_samples.values()):
        return None
    steps = evidence.steps[number]
    step_gradients = {rank: {**samples.steps, **samples.clipped} for rank, samples in known_samples.items()}
    carried = {rank: samples.carried for rank, samples in known_samples.items()}
    if any(step.is_sharded for step in steps.values()):
        step_gradients = dict.fromkeys(step_gradients, _combine_shards(list(step_gradients.values())))
        carried = dict.fromkeys(carried, _combine_shards(list(carried.values())))
    names = [
        name
        for name in step_gradients[evidence.ranks[0]]
        if all(name in gradients for gradients in step_gradients.values())
    ]
    backwards = {
        (rank, micro): gradients
        for rank, samples in known_samples.items()
        for micro, gradients in samples.backwards.items()
    }
    all_gradients = [*step_gradients.values(), *backwards.values()]
    if not names or any(
        len({gradients[name].shape for gradients in all_gradients if name in gradients}) > 1 for name in names
    ):
        return None
    first = steps[evidence.ranks[0]]
    return _Update(
        first.backward_update,
        first.line,
        names,
        backwards,
        step_gradients,
        {rank: {name: value for name, value in of_rank.items() if name in names} for rank, of_rank in carried.items()},
        _TOLERANCE if first.loss_scale == 1.0 else _SCALED_TOLERANCE,
    )


def _combine_shards(shards: list[dict[str, NDArray[np.float64]]]) -> dict[str, NDArray[np.float64]]:
    """Combine samples of shards, which are NaN for elements of other ranks, into samples of whole tensors.

    Leaves out tensors that have no gradient on some rank.
    """
    whole: dict[str, NDArray[np.float64]] = {}
    for shard in shards:
        for name, value in shard.items():
            if any(name not in other for other in shards):
                continue
            whole[name] = np.where(np.isnan(whole[name]), value, whole[name]) if name in whole else value
    return whole


def _judge_update(evidence: Evidence, update: _Update, findings: Findings) -> None:
    ranks, names = evidence.ranks, update.names
    if any(
        not np.isfinite(value).all() for gradients in update.step_gradients.values() for value in gradients.values()
    ):
        text = f"update {update.number}: the gradient is not finite"
        findings.add(
            "FAIL",
            "gradient.nan",
            update.line,
            text,
            "check for a division by zero, or for a loss scale that is too large",
        )
        return
    if not any(
        float(np.abs(value).sum()) for gradients in update.step_gradients.values() for value in gradients.values()
    ):
        return
    all_backwards = sorted(update.backwards)
    rank_fits = {rank: update.fit(names, rank, [all_backwards]) for rank in ranks}
    if update.has_carried and all(abs(fit.factors[-1]) > 0.5 for fit in rank_fits.values() if len(fit.factors) > 1):
        findings.add(
            "FAIL",
            "gradient.carried",
            update.line,
            f"update {update.number} still contains the gradient of the previous update",
            "call optimizer.zero_grad() before the first backward of each update",
            (*_zero_grad_line(evidence, update), *evidence.scaling_lines(update.number)[:1]),
        )
    if all(fit.residual < update.tolerance for fit in rank_fits.values()):
        check_loss_terms(evidence, update.number, rank_fits[ranks[0]].factors[0], all_backwards, findings)
        return
    _explain_mismatch(evidence, update, all_backwards, findings)


def _zero_grad_line(evidence: Evidence, update: _Update) -> tuple[str, ...]:
    """The line of the last zero_grad before an update."""
    step = next((step for step in evidence.of(evidence.ranks[0], OptimizerStep) if step.update == update.number), None)
    return (step.zeroed_at,) if step is not None and step.zeroed_at else ()


def _explain_mismatch(
    evidence: Evidence, update: _Update, all_backwards: list[BackwardKey], findings: Findings
) -> None:
    """Report what a gradient is if it is not a multiple of the sum over all ranks and backwards."""
    ranks, names, tolerance = evidence.ranks, update.names, update.tolerance
    local = {rank: [[key for key in all_backwards if key[0] == rank]] for rank in ranks}
    mismatched = {name for name in names if any(_does_not_fit(update, name, rank, [all_backwards]) for rank in ranks)}
    unsynced = {
        name for name in mismatched if not any(_does_not_fit(update, name, rank, local[rank]) for rank in ranks)
    }
    single_fits = {rank: update.fit(names, rank, [[key] for key in all_backwards]) for rank in ranks}
    residual = max(fit.residual for fit in single_fits.values())
    refuted_if_equal_to_one_rank = len(ranks) > 1 and update.number == 0
    if len(ranks) > 1 and all(update.fit(names, rank, local[rank]).residual < tolerance for rank in ranks):
        rule, text = "local", "each rank steps with its local gradient: no gradient is averaged over the ranks"
        fix = "wrap the model in DistributedDataParallel, and call the last backward outside no_sync()"
    elif len(ranks) > 1 and unsynced and unsynced == mismatched and len(unsynced) < len(names):
        shown_names = ", ".join(sorted(unsynced)[:4])
        rule, text = (
            "unsynced",
            f"{len(unsynced)} of {len(names)} parameters are not averaged over the ranks: {shown_names}",
        )
        fix = "wrap the model after all its parameters are there, and ignore none that is trained"
    elif residual < tolerance:
        factors = [0.0 if abs(factor) < tolerance else factor for factor in single_fits[ranks[0]].factors]
        weights = ", ".join(
            f"{factor:.3g} x (rank {rank}, backward {micro})"
            for factor, (rank, micro) in zip(factors, all_backwards, strict=False)
        )
        rule, text = "weights", f"the gradient is not the mean of the ranks' gradients; on rank 0 it is {weights}"
        fix = "all-reduce only in the last backward of an update, and use no_sync() for the others"
        if _is_same_on_ranks(factors, all_backwards, tolerance):
            refuted_if_equal_to_one_rank = False
            fix = "add up the gradients of all backwards of an update, with the same weight"
    elif not mismatched and residual > _HALF_PRECISION_RESIDUAL:
        text = "each tensor's gradient has a different factor: the tensors are clipped one by one, or set to zero"
        rule = "scaled"
        fix = ""
    else:
        shown_names = ", ".join(sorted(mismatched)[:3])
        rule, text = (
            "unexplained",
            (
                f"the gradient of the step is not a combination of the backwards' gradients: it is changed in between, "
                f"e.g. {shown_names} (residual {residual:.2g})"
            ),
        )
        fix = "find the code that changes .grad between backward and step"
    is_rounded = rule == "unexplained" and (residual < _HALF_PRECISION_RESIDUAL or _is_compressed(update))
    is_averaged = evidence.averages_parameters or (rule == "local" and evidence.averages_each_update)
    level = "NOTE" if is_averaged or is_rounded or rule == "scaled" else "WARN" if rule == "unexplained" else "FAIL"
    no_sync_lines = tuple(dict.fromkeys(event.line for event in evidence.of(ranks[0], NoSync)))
    text = f"update {update.number}: {text}"
    findings.add(
        level,
        f"gradient.{rule}",
        update.line,
        text,
        fix,
        no_sync_lines,
        refuted_if_equal_to_one_rank=refuted_if_equal_to_one_rank,
    )


def _is_same_on_ranks(factors: list[float], all_backwards: list[BackwardKey], tolerance: float) -> bool:
    """Whether factors differ between backwards, but not between ranks, so that one rank has the same factors."""
    by_backward: dict[int, list[float]] = {}
    for factor, (_, micro) in zip(factors, all_backwards, strict=False):
        by_backward.setdefault(micro, []).append(factor)
    spread = max(max(factors_of_ranks) - min(factors_of_ranks) for factors_of_ranks in by_backward.values())
    return len(by_backward) > 1 and spread < tolerance * max(map(abs, factors))


def _is_compressed(update: _Update) -> bool:
    """Whether the ranks send a compressed gradient: it has few values, or zeros that the backwards do not have."""
    step_gradients = next(iter(update.step_gradients.values()))
    names = [name for name in update.names if all(name in gradients for gradients in update.backwards.values())]
    if not names or not update.backwards:
        return False
    steps = np.concatenate([step_gradients[name] for name in names])
    sums = np.concatenate(
        [np.sum([gradients[name] for gradients in update.backwards.values()], axis=0) for name in names]
    )
    nonzero = steps[steps != 0]
    has_few_values = len(nonzero) >= _MIN_NONZERO and 4 * len(np.unique(np.abs(nonzero))) < len(nonzero)
    return bool(np.mean(steps == 0) > _EXTRA_ZERO_SHARE + np.mean(sums == 0) or has_few_values)


def _does_not_fit(update: _Update, name: str, rank: int, columns: Sequence[Sequence[BackwardKey]]) -> bool:
    """Whether the gradient of a tensor is not a combination of the sums in `columns`."""
    has_gradient = float(np.linalg.norm(update.step_gradients[rank][name])) > 0
    return has_gradient and update.fit([name], rank, columns).residual > 10 * update.tolerance
