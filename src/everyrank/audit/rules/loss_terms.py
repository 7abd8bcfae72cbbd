"""What each term of the loss weighs in the gradient that steps: 1/N each, N the terms of all ranks and backwards."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

from everyrank.audit.events import BackwardEnd, LossTerm
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["Piece", "check_loss_terms"]

Piece = tuple[int, int]
"""A backward: its rank, and its number within the update."""
_UNEVEN, _OFF = 1e-3, 1e-2  # relative


def check_loss_terms(
    evidence: Evidence, update: int, factor: float, pieces: Sequence[Piece], findings: Findings
) -> None:
    """The gradient of this update is `factor` times the sum over `pieces`; judge the losses that they are of."""
    losses = _losses(evidence, update)
    if set(losses) != set(pieces):
        findings.not_checked(f"the weight of loss terms: {_why_not(losses, pieces)}")
        return
    if len({tuple((term.name, term.line) for term in terms) for terms in losses.values()}) > 1:
        findings.not_checked("the weight of loss terms: backwards of one update are of different losses")
        return
    num_losses = len(next(iter(losses.values())))
    for place in range(num_losses):
        terms = {piece: found[place] for piece, found in losses.items()}
        if all(term.terms for term in terms.values()):
            _judge(evidence, update, factor, terms, num_losses == 1, findings)


def _why_not(losses: Collection[Piece], pieces: Sequence[Piece]) -> str:
    """Why the terms of an update cannot be counted."""
    if not losses:
        return "no loss of torch.nn.functional, nor a mean or sum, was seen"
    unseen = len(set(pieces) - set(losses))
    if unseen:
        return (
            f"{unseen} of {len(pieces)} backwards of an update are of no function of torch.nn.functional, mean or sum"
        )
    return "an update has backwards whose gradient is not in what the optimizer steps"


def _losses(evidence: Evidence, update: int) -> dict[Piece, list[LossTerm]]:
    """Of each backward of this update, by rank, the losses that its gradient is of."""
    found: dict[Piece, list[LossTerm]] = {}
    for rank in evidence.ranks:
        for event in evidence.of(rank, BackwardEnd):
            terms = [term for term in event.losses if term.scale]
            if event.update == update and terms:
                found[rank, event.micro] = terms
    return found


def _judge(
    evidence: Evidence,
    update: int,
    factor: float,
    terms: dict[Piece, LossTerm],
    is_only: bool,
    findings: Findings,
) -> None:
    if all(term.scale < 0 for term in terms.values()):  # a likelihood with a minus sign before it
        terms = {piece: dataclasses.replace(term, scale=-term.scale) for piece, term in terms.items()}
    weights = {
        piece: factor * term.scale / (term.terms if term.reduction == "mean" else 1) for piece, term in terms.items()
    }
    least, most = min(weights, key=lambda piece: weights[piece]), max(weights, key=lambda piece: weights[piece])
    count = sum(term.terms for term in terms.values())
    first = next(iter(terms.values()))
    is_uneven = weights[most] - weights[least] > _UNEVEN * abs(weights[most])
    if is_uneven:
        findings.add(
            "FAIL",
            "gradient.ragged",
            first.line,
            f"update {update}: a loss term of rank {most[0]}, backward {most[1]} ({terms[most].terms:g} terms) "
            f"weighs {weights[most] / weights[least]:.3g} times one of rank {least[0]}, backward {least[1]} "
            f"({terms[least].terms:g} terms): a mean of means, not the mean of all {count:g}",
            "sum the loss, and divide by the number of terms of all ranks and micro-batches",
            evidence.scaling_lines(update),
        )
    total = sum(weights[piece] * term.terms for piece, term in terms.items())
    if len({term.reduction for term in terms.values()}) > 1:
        return  # divided by a fixed number, which is that of the terms where the batch is full
    if first.reduction == "mean" and is_only and abs(total - 1) > _OFF:
        _wrong_scale(evidence, update, factor, terms, total, findings)
    elif first.reduction == "sum" and is_only and not is_uneven and abs(total - 1) > _UNEVEN:
        _summed(evidence, update, factor, weights[most], terms, findings)


def _wrong_scale(
    evidence: Evidence,
    update: int,
    factor: float,
    terms: dict[Piece, LossTerm],
    total: float,
    findings: Findings,
) -> None:
    """A mean whose gradient is not that of the mean over all terms: by a factor that has a name, or one of its own."""
    ranks, num_ranks = evidence.ranks, evidence.world_size
    scale = evidence.steps[update][ranks[0]].loss_scale if update in evidence.steps else 1.0
    if scale != 1.0 and abs(total / scale - 1) < _OFF:
        return  # clipped before it was unscaled: said there
    num_backwards = len(terms) // num_ranks
    reduced = factor * num_ranks  # 1 where the ranks are averaged, their number where they are summed
    if abs(reduced * scale - 1) < _OFF or abs(reduced * scale - num_ranks) < _OFF * num_ranks:
        reduced *= scale
    usual = _usual_backwards(evidence, update, num_backwards)
    if num_backwards != usual and update in evidence.after_jumps and _has_no_rest(evidence, usual):
        return  # the epoch was shortened: in a whole one no fewer are left
    cause, fix = _cause(total, reduced, num_ranks, num_backwards, usual)
    findings.add(
        "FAIL" if cause else "NOTE",
        "gradient.scale",
        next(iter(terms.values())).line,
        f"update {update}: the gradient is {total:.4g} times that of the mean over all terms: "
        + (cause or "a weight of the script's own?"),
        fix,
        evidence.scaling_lines(update),
    )


def _usual_backwards(evidence: Evidence, update: int, default: int) -> int:
    """How many backwards the other updates have."""
    counts = Counter(event.update for event in evidence.of(evidence.ranks[0], BackwardEnd))
    usual = Counter(count for other, count in counts.items() if other != update).most_common(1)
    return usual[0][0] if usual else default


def _has_no_rest(evidence: Evidence, usual: int) -> bool:
    """Whether the batches of each epoch, were it whole, are a multiple of the backwards of an update."""
    trained = {key for key, kind in evidence.epochs[evidence.ranks[0]].items() if kind == "train"}
    own = [loader for key, loader in evidence.loaders(evidence.ranks[0]).items() if key in trained]
    return all((loader.num_batches or 0) % usual == 0 for loader in own)


def _cause(total: float, reduced: float, num_ranks: int, num_backwards: int, usual: int) -> tuple[str, str]:
    """The mistake that gives this factor, and what to write instead; ("", "") where none does."""

    def is_about(value: float, expected: float) -> bool:
        return abs(value - expected) < _OFF * expected

    several, are_more = num_ranks > 1, num_backwards > 1
    by_ranks = "divide by the number of ranks once: DistributedDataParallel already does"
    by_backwards = f"(loss / {max(num_backwards, usual)}).backward() for each micro-batch"
    if num_backwards != usual and is_about(total * usual, num_backwards):
        why = f"divided by {usual} backwards, but this update has {num_backwards}: the rest of an epoch"
        return why, "divide by the micro-batches that this update has"
    if several and is_about(reduced, num_ranks):
        return f"summed over the {num_ranks} ranks, not averaged", "divide the sum by dist.get_world_size()"
    if several and (is_about(reduced * num_ranks, 1) or is_about(total * num_ranks, 1)):
        return f"divided by the {num_ranks} ranks once too often", by_ranks
    if are_more and is_about(total, num_backwards):
        return f"not divided by the {num_backwards} backwards of an update", by_backwards
    if are_more and is_about(total * num_backwards, 1):
        return f"divided by the {num_backwards} backwards twice", by_backwards
    if several and is_about(total, num_ranks):
        return f"multiplied by the {num_ranks} ranks, though it is averaged", by_ranks
    return "", ""


def _summed(
    evidence: Evidence,
    update: int,
    factor: float,
    weight: float,
    terms: dict[Piece, LossTerm],
    findings: Findings,
) -> None:
    """A sum is a choice, and said, because the step grows with the batch; divided by all its terms it is a mean."""
    if update in evidence.after_jumps:
        return
    count, num_ranks = sum(term.terms for term in terms.values()), evidence.world_size
    first = next(iter(terms.values()))
    if abs(first.scale * count / evidence.steps[update][evidence.ranks[0]].loss_scale - 1) < _OFF:
        _wrong_scale(evidence, update, factor, terms, count * weight, findings)
        return
    line = first.line
    text = f"update {update}: a summed loss, each of {count:g} terms weighs {weight:.4g}"
    if num_ranks > 1 and abs(weight * num_ranks - 1) < _UNEVEN:
        text += f": 1/{num_ranks}, the ranks' mean of sums, so the step shrinks as ranks are added"
    findings.add("NOTE", "gradient.sum", line, text)
