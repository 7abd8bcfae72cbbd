"""Checks layers that are split over the ranks, as far as possible without combining their gradients.

The ranks of split layers read the same samples. So each rank computes the same loss, and replicated parameters stay
equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.events import (
    BackwardEnd,
    CollectiveCall,
    LoaderEpoch,
    LocalTensor,
    LossTerm,
    OptimizerStep,
    Wrap,
)
from everyrank.audit.evidence import Evidence, GradientSamples
from everyrank.audit.finding import Findings, short_location

__all__ = ["check_split_layers"]

_TOLERANCE, _MIN_UPDATES = 1e-3, 3  # relative; updates that have to agree


def check_split_layers(evidence: Evidence, findings: Findings) -> None:
    """Check replicated parameters next to DTensors, experts, and the scale of a loss that all ranks share."""
    is_pipeline = any(event.op.startswith(("send", "recv")) for event in evidence.all_of(CollectiveCall))
    if evidence.world_size < 2 or is_pipeline or not evidence.steps:
        return
    _check_replicated(evidence, findings)
    _check_experts(evidence, findings)
    if all(event.is_split for event in evidence.all_of(OptimizerStep)) and not evidence.all_of(Wrap):
        _check_scale(evidence, findings)


def _check_replicated(evidence: Evidence, findings: Findings) -> None:
    """Find replicated parameters next to sharded ones that are equal on all ranks at the start, and drift apart.

    If one of them differs from the start, the ranks may have different shards of it, and nothing is reported.
    """
    differing_by_update = [(update, steps, _differing_names(steps)) for update, steps in evidence.steps.items()]
    if not differing_by_update or differing_by_update[0][2] is None or differing_by_update[0][2]:
        return
    drifted = [(update, steps, names) for update, steps, names in differing_by_update if names]
    if (
        not drifted or differing_by_update[-1][2] == []
    ):  # equal again at the end, because they are averaged now and then
        return
    update, steps, names = drifted[0]
    first = steps[evidence.ranks[0]]
    text = (
        f"{len(names)} of {len(first.replicated)} replicated parameters, next to sharded ones, differ "
        f"between the ranks after update {update - 1}: {', '.join(names[:4])}"
    )
    if evidence.is_split and _feed_different_samples(evidence):
        loader = next(iter(evidence.of(evidence.ranks[0], LoaderEpoch)), None)
        findings.add(
            "WARN",
            "data.different",
            loader.line if loader is not None else first.line,
            f"each rank feeds the model different samples, but its layers are split over the ranks. {text}",
            "use a sampler by the data-parallel rank only, so that all ranks that share a model read the same samples",
            (*(loader.made_at if loader is not None else ()), first.line),
        )
        return
    lines = tuple(dict.fromkeys(event.line for event in evidence.of(evidence.ranks[0], LocalTensor)))
    if lines:
        text += (
            f". At {', '.join(map(short_location, lines[:2]))}, to_local() has no grad_placements, so each rank takes "
            "the gradient of its own samples as the gradient of all samples"
        )
    findings.add(
        "WARN",
        "replicas.drift",
        first.line,
        text,
        "average or sum their gradients over the ranks, and scale and clip them equally on all ranks",
        lines,
    )


def _feed_different_samples(evidence: Evidence) -> bool:
    """Whether no two ranks feed the model the same sample."""
    forwards = [evidence.training_forwards[rank] for rank in evidence.ranks]
    keys = [key for key in forwards[0] if all(key in rank_forwards for rank_forwards in forwards)]
    rows = [[set(rank_forwards[key].row_checksums) for key in keys] for rank_forwards in forwards]
    pairs = [pair for step_rows in zip(*rows, strict=True) for pair in itertools.combinations(step_rows, 2)]
    return bool(pairs) and all(
        first_rows and second_rows and not first_rows & second_rows for first_rows, second_rows in pairs
    )


def _differing_names(steps: dict[int, OptimizerStep]) -> list[str] | None:
    """The names of replicated parameters that differ between ranks; None if the ranks have different names."""
    first, *others = [step.replicated for step in steps.values()]
    if not first or any(set(other) != set(first) for other in others):
        return None
    return [name for name in first if any(other[name] != first[name] for other in others)]


def _check_experts(evidence: Evidence, findings: Findings) -> None:
    """Find experts, which only one rank has, whose gradients are too large by the number of ranks.

    An expert sees the tokens of all ranks, so its gradient is a sum over their losses. If the gradients of the other
    parameters are averaged, it has to be divided by the number of ranks.
    """
    num_ranks = evidence.world_size
    if not evidence.sends_activations:
        return
    for num_updates, (update, steps) in enumerate(evidence.steps.items(), 1):
        samples = [evidence.gradient_samples(rank, update) for rank in evidence.ranks]
        losses = [_losses(evidence, rank, update) for rank in evidence.ranks]
        if not all(losses) or None in samples or _are_near([rank_losses[0].value for rank_losses in losses]):
            return  # all ranks compute the same loss
        factors = _factors([rank_losses for rank_losses in samples if rank_losses is not None])
        if factors is None or abs(factors[0] * num_ranks - 1) > _TOLERANCE or abs(factors[1] - 1) > _TOLERANCE:
            return
        if num_updates == _MIN_UPDATES:
            findings.add(
                "WARN",
                "gradient.scale",
                steps[evidence.ranks[0]].line,
                f"gradients are averaged over the {num_ranks} ranks, except those of parameters that only one rank "
                f"has. If these get the tokens of all ranks, as experts do, their gradients are {num_ranks}x too large",
                "divide the gradients of experts by the number of ranks whose tokens they get",
                refuted_if_equal_to_one_rank=True,
            )


def _factors(samples: Sequence[GradientSamples]) -> tuple[float, float] | None:
    """The factors of shared parameters (relative to the sum over ranks) and of local ones (to this rank's backward)."""
    if any(len(rank_samples.backwards) != 1 for rank_samples in samples):
        return None
    backward_gradients = [next(iter(rank_samples.backwards.values())) for rank_samples in samples]
    step_gradients = [{**rank_samples.steps, **rank_samples.clipped} for rank_samples in samples]
    shared_names = set.intersection(*(set(step) for step in step_gradients))
    local_names = [
        name
        for name in step_gradients[0]
        if name in backward_gradients[0] and not any(name in step for step in step_gradients[1:])
    ]
    shared_names = {name for name in shared_names if all(name in gradients for gradients in backward_gradients)}
    if not local_names or not shared_names:
        return None
    summed_pairs = [
        (step_gradients[0][name], np.sum([gradients[name] for gradients in backward_gradients], axis=0))
        for name in sorted(shared_names)
    ]
    factors = (
        _ratio(summed_pairs),
        _ratio([(step_gradients[0][name], backward_gradients[0][name]) for name in local_names]),
    )
    return (factors[0], factors[1]) if factors[0] is not None and factors[1] is not None else None


def _ratio(pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> float | None:
    """The number c if the first array of each pair is c times the second one; None if there is no such number."""
    target, base = (np.concatenate([pair[number] for pair in pairs]) for number in (0, 1))
    square = float(base @ base)
    ratio = float(target @ base) / square if square else 0.0
    is_exact = float(np.linalg.norm(target - ratio * base)) <= _TOLERANCE * float(np.linalg.norm(target))
    return ratio if ratio and is_exact else None


def _check_scale(evidence: Evidence, findings: Findings) -> None:
    """Find a loss of the same samples on all ranks that is multiplied or divided by the number of ranks."""
    losses: list[tuple[LossTerm, float]] = []
    for update in evidence.steps:
        loss = _common_loss(evidence, update)
        if loss is not None:
            losses.append((loss, _weight(loss, evidence.steps[update][evidence.ranks[0]].loss_scale)))
    num_ranks = evidence.world_size
    for expected, text, fix in (
        (num_ranks, f"multiplied by {num_ranks}", "multiply by the number of ranks that read different samples"),
        (
            1 / num_ranks,
            f"divided by {num_ranks}, or by the terms of all ranks",
            "divide by the terms of different samples only",
        ),
    ):
        if len(losses) >= _MIN_UPDATES and all(abs(weight / expected - 1) < _TOLERANCE for _, weight in losses):
            findings.add(
                "WARN",
                "gradient.scale",
                losses[0][0].line,
                f"the loss has {losses[0][1]:.4g} times the weight of the mean over its terms in each update: it is "
                f"{text}, but the {num_ranks} ranks read the same samples",
                f"{fix}. The ranks of a tensor-parallel group count as one rank",
                evidence.scaling_lines(list(evidence.steps)[1]),
                refuted_if_equal_to_one_rank=True,
            )


def _common_loss(evidence: Evidence, update: int) -> LossTerm | None:
    """The loss of an update if all ranks compute it from the same rows and get the same value; else None."""
    losses: list[LossTerm] = []
    rows: list[list[str]] = []
    for rank in evidence.ranks:
        terms = _losses(evidence, rank, update)
        if len(terms) != 1:
            return None
        losses += terms
        forward = evidence.training_forwards[rank].get((update, 0))
        rows.append(forward.row_checksums if forward is not None else [])
    are_equal = _are_near([loss.value for loss in losses])
    return losses[0] if rows[0] and all(rank_rows == rows[0] for rank_rows in rows) and are_equal else None


def _losses(evidence: Evidence, rank: int, update: int) -> list[LossTerm]:
    """The losses of the only backward of an update; [] if there are several backwards, or a loss has no value."""
    backward_ends = [event for event in evidence.of(rank, BackwardEnd) if event.update == update]
    terms = [term for event in backward_ends for term in event.losses if term.scale]
    are_known = all(math.isfinite(term.value) for term in terms)
    return terms if len(backward_ends) == 1 and are_known else []


def _are_near(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _TOLERANCE * max(map(abs, values))


def _weight(loss: LossTerm, loss_scale: float) -> float:
    """The total weight of all terms of a loss: 1 for their mean, NaN for an unscaled sum.

    Terms that are exactly zero count as masked, unless the loss is a mean if they count.
    """
    scale = loss.scale / loss_scale
    if loss.reduction == "mean":
        return scale
    if abs(scale - 1) < _TOLERANCE or abs(scale * loss.terms - 1) < _TOLERANCE:
        return math.nan
    return scale * (loss.nonzero if loss.nonzero is not None else loss.terms)
