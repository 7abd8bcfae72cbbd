"""The gradient that steps, as a sum over the gradients of all backwards and ranks: with which factors?

g = c * sum of g(rank, backward) must hold, with the same c for all. The factors come from least squares over samples
of the tensors (`watch/gradients.py`), so nothing need be known of the script, and dropout, batch norm and low precision
do not matter.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.events import Backward, DiscardedGradients, NoSync, OptimizerStep
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings, short_place
from everyrank.audit.rules.loss_terms import Piece, check_loss_terms

__all__ = ["check_gradients"]

_ROUNDED = 1e-2  # relative residual of a gradient that the script rounds to half precision
_SPARSE, _MANY = 0.3, 32  # of compressed gradients: share of zeros, and elements that tell
_TOLERANCE, _SCALED_TOLERANCE = 1e-4, 2e-3  # relative residual; the second with a loss scale (float16)


@dataclasses.dataclass(frozen=True)
class _Fit:
    """A factor for each column, and the residual relative to the gradient."""

    factors: list[float]
    residual: float


@dataclasses.dataclass
class _Update:
    """The gradients of one update, and the names of the parameters that all ranks step."""

    number: int
    line: str
    names: list[str]
    pieces: dict[Piece, dict[str, NDArray[np.float64]]]
    stepping: dict[int, dict[str, NDArray[np.float64]]]  # before clipping
    carried: dict[int, dict[str, NDArray[np.float64]]]
    tolerance: float

    @property
    def has_carried(self) -> bool:
        return any(
            float(np.abs(value).sum()) > 0 for gradients in self.carried.values() for value in gradients.values()
        )

    def fit(self, names: Sequence[str], rank: int, columns: Sequence[Sequence[Piece]]) -> _Fit:
        """Fit the gradient of a rank by sums of pieces (a column each) and by the gradient from the update before."""
        target = np.concatenate([self.stepping[rank][name] for name in names])
        sums = [
            np.concatenate([sum((self._piece(piece, name) for piece in column), 0.0 * target[:1]) for name in names])
            for column in columns
        ]
        if self.has_carried and self.carried[rank]:
            zeros = {name: np.zeros_like(self.stepping[rank][name]) for name in names}
            sums.append(np.concatenate([self.carried[rank].get(name, zeros[name]) for name in names]))
        matrix = np.stack(sums, 1)
        if not np.linalg.norm(target) or not np.linalg.norm(matrix):
            return _Fit([0.0] * matrix.shape[1], float(np.linalg.norm(target) > 0 or np.linalg.norm(matrix) > 0))
        scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
        factors = np.linalg.lstsq(matrix / scale, target, rcond=None)[0] / scale
        residual = float(np.linalg.norm(matrix @ factors - target) / np.linalg.norm(target))
        return _Fit([float(factor) for factor in factors], residual)

    def _piece(self, piece: Piece, name: str) -> NDArray[np.float64]:
        gradient = self.pieces[piece].get(name)
        return np.zeros_like(self.stepping[piece[0]][name]) if gradient is None else gradient


def check_gradients(evidence: Evidence, findings: Findings) -> None:
    """Judge each recorded update, and report what cannot be judged."""
    judged = 0
    zeros = [steps[evidence.ranks[0]].is_zero for steps in evidence.steps.values()]
    if zeros and all(zeros):
        line = next(iter(evidence.steps.values()))[evidence.ranks[0]].line
        text = f"all gradients are exactly zero in all {len(zeros)} updates: nothing is trained"
        findings.add("FAIL", "gradient.zero", line, text, "check the loss: is it constant, or over one class only?")
        return
    if evidence.is_opaque:
        return  # `check_replicas` reports it
    _check_lost(evidence, findings)
    if evidence.is_split:
        findings.not_checked("gradients: layers are split over ranks (tensor or pipeline parallelism)")
        return
    for number in sorted(evidence.steps.keys() - evidence.incomplete_updates):
        update = _read(evidence, number)
        if update is not None:
            judged += 1
            _judge(evidence, update, findings)
    if not judged:
        findings.not_checked("gradients: no update was recorded in which all ranks step the same tensors")
    lost = evidence.all_of(DiscardedGradients)
    num_backwards = Counter((event.rank, event.update) for event in evidence.all_of(Backward))
    usual = Counter(num_backwards.values()).most_common(1)[0][0] if num_backwards else 0
    for event in lost[:1]:
        # a custom loss scaler may skip a step: at most half of the events, on two ranks
        is_skipped = usual == event.num_backwards == 1 and len(lost) <= len(evidence.steps)
        findings.add(
            "NOTE" if is_skipped else "WARN",  # a custom loss scaler skips steps
            "gradient.thrown-away",
            event.line,
            f"zero_grad clears the gradient of {event.num_backwards} backwards before any optimizer step",
            "call zero_grad after the step, or before the first backward of an update",
            _stepped_at(evidence),
        )


def _stepped_at(evidence: Evidence) -> tuple[str, ...]:
    """The lines of the optimizer steps."""
    return tuple(dict.fromkeys(step.line for step in evidence.of(evidence.ranks[0], OptimizerStep)))


def _check_lost(evidence: Evidence, findings: Findings) -> None:
    """Find losses of features from all_gather, through which no gradient flows.

    If all ranks compute the same loss from all features, each rank still gets the whole gradient of its own features.
    """
    for events in zip(*(evidence.of(rank, Backward) for rank in evidence.ranks), strict=False):
        losses = [event.gathered_loss for event in events if event.gathered_loss is not None]
        if len(losses) < len(events) or max(losses) - min(losses) <= _TOLERANCE * max(map(abs, losses)):
            continue
        if events[0].is_detached:
            findings.not_checked(
                f"the gradient of the features gathered at {short_place(events[0].gathered_at)}: they are detached "
                "before (detach, no_grad), which may be intended"
            )
        else:
            findings.add(
                "WARN",
                "gradient.lost",
                events[0].gathered_at,
                "features go into the loss through all_gather, which has no backward: the gradient of the other ranks' "
                "losses by this rank's features is lost",
                "use torch.distributed.nn.functional.all_gather, whose backward sums the gradients of all ranks",
                (events[0].line,),
            )  # not refuted by a comparison: one rank loses the gradient of its own features, too
            return


def _read(evidence: Evidence, number: int) -> _Update | None:
    """The gradients of an update, with shards combined; None unless all ranks have recorded the same tensors."""
    recorded = {rank: evidence.samples(rank, number) for rank in evidence.ranks}
    by_rank = {rank: samples for rank, samples in recorded.items() if samples is not None}
    if len(by_rank) < len(recorded) or not any(samples.pieces for samples in by_rank.values()):
        return None
    steps = evidence.steps[number]
    stepping = {rank: {**samples.steps, **samples.clipped} for rank, samples in by_rank.items()}
    carried = {rank: samples.carried for rank, samples in by_rank.items()}
    if any(step.is_sharded for step in steps.values()):
        stepping = dict.fromkeys(stepping, _put_together(list(stepping.values())))
        carried = dict.fromkeys(carried, _put_together(list(carried.values())))
    names = [name for name in stepping[evidence.ranks[0]] if all(name in each for each in stepping.values())]
    pieces = {(rank, micro): piece for rank, samples in by_rank.items() for micro, piece in samples.pieces.items()}
    every = [*stepping.values(), *pieces.values()]
    if not names or any(len({each[name].shape for each in every if name in each}) > 1 for name in names):
        return None
    first = steps[evidence.ranks[0]]
    return _Update(
        first.backward_update,
        first.line,
        names,
        pieces,
        stepping,
        {rank: {name: value for name, value in of_rank.items() if name in names} for rank, of_rank in carried.items()},
        _TOLERANCE if first.loss_scale == 1.0 else _SCALED_TOLERANCE,
    )


def _put_together(shards: list[dict[str, NDArray[np.float64]]]) -> dict[str, NDArray[np.float64]]:
    """Samples of whole tensors from those of shards, which are NaN where another rank has the elements.

    A tensor that some rank does not have has no gradient there.
    """
    whole: dict[str, NDArray[np.float64]] = {}
    for shard in shards:
        for name, value in shard.items():
            if any(name not in other for other in shards):
                continue
            whole[name] = np.where(np.isnan(whole[name]), value, whole[name]) if name in whole else value
    return whole


def _judge(evidence: Evidence, update: _Update, findings: Findings) -> None:
    ranks, names = evidence.ranks, update.names
    if any(not np.isfinite(value).all() for gradients in update.stepping.values() for value in gradients.values()):
        text = f"update {update.number}: the gradient is not finite"
        findings.add(
            "FAIL",
            "gradient.nan",
            update.line,
            text,
            "check for a division by zero, or for a loss scale that is too large",
        )
        return
    if not any(float(np.abs(value).sum()) for gradients in update.stepping.values() for value in gradients.values()):
        return
    every = sorted(update.pieces)
    fits = {rank: update.fit(names, rank, [every]) for rank in ranks}
    if update.has_carried and all(abs(fit.factors[-1]) > 0.5 for fit in fits.values() if len(fit.factors) > 1):
        findings.add(
            "FAIL",
            "gradient.carried",
            update.line,
            f"update {update.number} still contains the gradient of the previous update",
            "optimizer.zero_grad() before the first backward of each update",
            (*_zeroed_at(evidence, update), *evidence.scaling_lines(update.number)[:1]),
        )
    if all(fit.residual < update.tolerance for fit in fits.values()):
        check_loss_terms(evidence, update.number, fits[ranks[0]].factors[0], every, findings)
        return
    _explain(evidence, update, every, findings)


def _zeroed_at(evidence: Evidence, update: _Update) -> tuple[str, ...]:
    """The line of the zero_grad that came last before an update."""
    step = next((step for step in evidence.of(evidence.ranks[0], OptimizerStep) if step.update == update.number), None)
    return (step.zeroed_at,) if step is not None and step.zeroed_at else ()


def _explain(evidence: Evidence, update: _Update, every: list[Piece], findings: Findings) -> None:
    """Name what a gradient is that is not a multiple of the sum over all ranks and backwards."""
    ranks, names, tolerance = evidence.ranks, update.names, update.tolerance
    local = {rank: [[piece for piece in every if piece[0] == rank]] for rank in ranks}
    bad = {name for name in names if any(_is_off(update, name, rank, [every]) for rank in ranks)}
    unsynced = {name for name in bad if not any(_is_off(update, name, rank, local[rank]) for rank in ranks)}
    each = {rank: update.fit(names, rank, [[piece] for piece in every]) for rank in ranks}
    residual = max(fit.residual for fit in each.values())
    about_ranks = len(ranks) > 1 and update.number == 0
    if len(ranks) > 1 and all(update.fit(names, rank, local[rank]).residual < tolerance for rank in ranks):
        rule, text = "local", "each rank steps with its local gradient: no gradient is averaged over the ranks"
        fix = "wrap the model in DistributedDataParallel, and call the last backward outside no_sync()"
    elif len(ranks) > 1 and unsynced and unsynced == bad and len(unsynced) < len(names):
        shown = ", ".join(sorted(unsynced)[:4])
        rule, text = "unsynced", f"{len(unsynced)} of {len(names)} parameters are not averaged over the ranks: {shown}"
        fix = "wrap the model after all its parameters are there, and ignore none that is trained"
    elif residual < tolerance:
        factors = [0.0 if abs(factor) < tolerance else factor for factor in each[ranks[0]].factors]
        weights = ", ".join(
            f"{factor:.3g} x (rank {rank}, backward {micro})"
            for factor, (rank, micro) in zip(factors, every, strict=False)
        )
        rule, text = "weights", f"it is not the mean of the ranks' gradients; on rank 0 it is {weights}"
        fix = "all-reduce only in the last backward of an update: no_sync() around the others"
        if _is_same_on_ranks(factors, every, tolerance):
            about_ranks = False
            fix = "add up the gradients of all backwards of an update, with the same weight"
    elif not bad and residual > _ROUNDED:
        rule, text = "scaled", "each tensor's gradient has a different factor: clipped one by one, or set to zero"
        fix = ""
    else:
        shown = ", ".join(sorted(bad)[:3])
        rule, text = (
            "unexplained",
            (
                f"the gradient that steps is not a combination of those of the backwards: it is changed in between, "
                f"e.g. {shown} (residual {residual:.2g})"
            ),
        )
        fix = "find the code that changes .grad between backward and step"
    is_rounded = rule == "unexplained" and (residual < _ROUNDED or _is_compressed(update))
    is_averaged = evidence.averages_parameters or (rule == "local" and evidence.averages_each_update)
    level = "NOTE" if is_averaged or is_rounded or rule == "scaled" else "WARN" if rule == "unexplained" else "FAIL"
    also = tuple(dict.fromkeys(event.line for event in evidence.of(ranks[0], NoSync)))
    text = f"update {update.number}: {text}"
    findings.add(level, f"gradient.{rule}", update.line, text, fix, also, about_ranks=about_ranks)


def _is_same_on_ranks(factors: list[float], every: list[Piece], tolerance: float) -> bool:
    """Whether a backward has the same factor on every rank, and not every backward the same: one rank does so, too."""
    by_backward: dict[int, list[float]] = {}
    for factor, (_, micro) in zip(factors, every, strict=False):
        by_backward.setdefault(micro, []).append(factor)
    spread = max(max(of_ranks) - min(of_ranks) for of_ranks in by_backward.values())
    return len(by_backward) > 1 and spread < tolerance * max(map(abs, factors))


def _is_compressed(update: _Update) -> bool:
    """Whether what steps has few different values, or zeros where the backwards have none: it is sent in part."""
    stepping = next(iter(update.stepping.values()))
    names = [name for name in update.names if all(name in piece for piece in update.pieces.values())]
    if not names or not update.pieces:
        return False
    steps = np.concatenate([stepping[name] for name in names])
    sums = np.concatenate([np.sum([piece[name] for piece in update.pieces.values()], axis=0) for name in names])
    kept = steps[steps != 0]
    has_few = len(kept) >= _MANY and 4 * len(np.unique(np.abs(kept))) < len(kept)
    return bool(np.mean(steps == 0) > _SPARSE + np.mean(sums == 0) or has_few)


def _is_off(update: _Update, name: str, rank: int, columns: Sequence[Sequence[Piece]]) -> bool:
    """Whether the gradient of this tensor is not a combination of these sums."""
    has_gradient = float(np.linalg.norm(update.stepping[rank][name])) > 0
    return has_gradient and update.fit([name], rank, columns).residual > 10 * update.tolerance
