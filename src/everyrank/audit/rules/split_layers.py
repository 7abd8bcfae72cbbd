"""Layers that are split over the ranks: what can be told without putting their gradients together.

The ranks then read the same samples, so that a loss counts on each of them, and what is not split is the same on all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.events import BackwardEnd, Collective, LossTerm, OptimizerStep, Wrap
from everyrank.audit.evidence import Evidence, Samples
from everyrank.audit.finding import Findings

__all__ = ["check_split_layers"]

_EQUAL, _UPDATES = 1e-3, 3  # relative; updates that have to agree


def check_split_layers(evidence: Evidence, findings: Findings) -> None:
    """Parameters beside DTensors, and the scale of a loss that all ranks have alike."""
    is_pipeline = any(event.op.startswith(("send", "recv")) for event in evidence.all_of(Collective))
    if evidence.world_size < 2 or is_pipeline or not evidence.steps:
        return
    _check_beside(evidence, findings)
    _check_experts(evidence, findings)
    if all(event.is_split for event in evidence.all_of(OptimizerStep)) and not evidence.all_of(Wrap):
        _check_scale(evidence, findings)


def _check_beside(evidence: Evidence, findings: Findings) -> None:
    """Parameters that are whole and alike on all ranks at the start, beside sharded ones, stay alike.

    Where one of them differs from the start, a script may hold parts of its own: then nothing is said.
    """
    differ = [(update, steps, _differing(steps)) for update, steps in evidence.steps.items()]
    if not differ or differ[0][2] is None or differ[0][2]:
        return
    found = [(update, steps, names) for update, steps, names in differ if names]
    if not found or differ[-1][2] == []:  # equal again at the end: averaged now and then
        return
    update, steps, names = found[0]
    first = steps[evidence.ranks[0]]
    findings.add(
        "WARN",
        "replicas.drift",
        first.line,
        f"{len(names)} of {len(first.replicated)} parameters that all ranks hold whole, beside sharded ones, differ "
        f"between the ranks after update {update - 1}: {', '.join(names[:4])}",
        "average or add up their gradients over the ranks, and scale them alike on all: clipping, too",
    )


def _differing(steps: dict[int, OptimizerStep]) -> list[str] | None:
    """The names of those that the ranks hold in different versions; None where they hold others."""
    first, *others = [step.replicated for step in steps.values()]
    if not first or any(set(other) != set(first) for other in others):
        return None
    return [name for name in first if any(other[name] != first[name] for other in others)]


def _check_experts(evidence: Evidence, findings: Findings) -> None:
    """Parameters that one rank alone has, in a model that sends activations: experts, which see all ranks' tokens.

    Their gradients are sums over the losses of all ranks. Where these are averaged for the other parameters, a gradient
    of an expert that steps as it came is as many times too large as there are ranks.
    """
    num = evidence.world_size
    if not evidence.sends_activations:
        return
    for found, (update, steps) in enumerate(evidence.steps.items(), 1):
        own = [evidence.samples(rank, update) for rank in evidence.ranks]
        losses = [_losses(evidence, rank, update) for rank in evidence.ranks]
        if any(not one for one in losses) or None in own or _are_near([one[0].value for one in losses]):
            return  # all compute one loss: nothing is a sum over them
        factors = _factors([one for one in own if one is not None])
        if factors is None or abs(factors[0] * num - 1) > _EQUAL or abs(factors[1] - 1) > _EQUAL:
            return
        if found == _UPDATES:
            findings.add(
                "WARN",
                "gradient.scale",
                steps[evidence.ranks[0]].line,
                f"gradients are averaged over the {num} ranks, those of parameters that one rank alone has step as "
                f"they came: {num} times the others where the tokens of all ranks go through them (experts)",
                "divide the gradients of experts by the number of ranks whose losses they are sums over",
            )


def _factors(own: Sequence[Samples]) -> tuple[float, float] | None:
    """With which factors the sum over all ranks, and a rank's own backward, step: of shared parameters, of its own."""
    if any(len(one.pieces) != 1 for one in own):
        return None
    pieces = [next(iter(one.pieces.values())) for one in own]
    stepping = [{**one.steps, **one.clipped} for one in own]
    shared = set.intersection(*(set(step) for step in stepping))
    alone = [name for name in stepping[0] if name in pieces[0] and not any(name in step for step in stepping[1:])]
    shared = {name for name in shared if all(name in piece for piece in pieces)}
    if not alone or not shared:
        return None
    of_all = [(stepping[0][name], np.sum([piece[name] for piece in pieces], axis=0)) for name in sorted(shared)]
    factors = _ratio(of_all), _ratio([(stepping[0][name], pieces[0][name]) for name in alone])
    return (factors[0], factors[1]) if factors[0] is not None and factors[1] is not None else None


def _ratio(pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> float | None:
    """c, where all of the former are c times the latter."""
    target, of = (np.concatenate([pair[place] for pair in pairs]) for place in (0, 1))
    square = float(of @ of)
    ratio = float(target @ of) / square if square else 0.0
    is_exact = float(np.linalg.norm(target - ratio * of)) <= _EQUAL * float(np.linalg.norm(target))
    return ratio if ratio and is_exact else None


def _check_scale(evidence: Evidence, findings: Findings) -> None:
    """A loss of the same samples on all ranks weighs 1 on each: not their number, nor one over it."""
    found: list[tuple[LossTerm, float]] = []
    for update in evidence.steps:
        alike = _loss_of_all(evidence, update)
        if alike is not None:
            found.append((alike, _weight(alike, evidence.steps[update][evidence.ranks[0]].loss_scale)))
    num = evidence.world_size
    for expected, text, fix in (
        (num, f"multiplied by {num}", "by the number of ranks that read other samples"),
        (1 / num, f"divided by {num}, or by the terms of all ranks", "by what the ranks that read other samples have"),
    ):
        if len(found) >= _UPDATES and all(abs(weight / expected - 1) < _EQUAL for _, weight in found):
            findings.add(
                "WARN",
                "gradient.scale",
                found[0][0].line,
                f"the loss weighs {found[0][1]:.4g} times what the mean over its terms does, in each update: {text}, "
                f"and the {num} ranks read the same samples",
                f"multiply, divide or count {fix}: ranks of one tensor-parallel group are one",
                evidence.scaling_lines(list(evidence.steps)[1]),
            )


def _loss_of_all(evidence: Evidence, update: int) -> LossTerm | None:
    """The one loss of an update, where all ranks have computed it from the same rows, to the same value."""
    losses: list[LossTerm] = []
    rows: list[list[str]] = []
    for rank in evidence.ranks:
        terms = _losses(evidence, rank, update)
        if len(terms) != 1:
            return None
        losses += terms
        forward = evidence.training_forwards[rank].get((update, 0))
        rows.append(forward.row_checksums if forward is not None else [])
    are_alike = _are_near([one.value for one in losses])
    return losses[0] if rows[0] and all(own == rows[0] for own in rows) and are_alike else None


def _losses(evidence: Evidence, rank: int, update: int) -> list[LossTerm]:
    """The losses of an update of one backward, which have a value; [] where there are several backwards."""
    ends = [event for event in evidence.of(rank, BackwardEnd) if event.update == update]
    terms = [term for event in ends for term in event.losses if term.scale]
    are_known = all(math.isfinite(term.value) for term in terms)
    return terms if len(ends) == 1 and are_known else []


def _are_near(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _EQUAL * max(map(abs, values))


def _weight(loss: LossTerm, loss_scale: float) -> float:
    """What all terms of a loss weigh together: 1 for their mean; NaN for a sum as it is.

    Terms that are exactly zero are masked ones, unless that makes it a mean over all of them.
    """
    scale = loss.scale / loss_scale
    if loss.reduction == "mean":
        return scale
    if abs(scale - 1) < _EQUAL or abs(scale * loss.terms - 1) < _EQUAL:
        return math.nan
    return scale * (loss.nonzero if loss.nonzero is not None else loss.terms)
