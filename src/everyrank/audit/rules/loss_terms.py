"""Check that each loss term weighs 1/N in the gradient, where N counts the terms of all ranks and micro-batches."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

from everyrank.audit.events import BackwardEnd, LossTerm
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["Piece", "check_loss_terms", "times"]

Piece = tuple[int, int]
"""A backward: its rank, and its number in the update."""
_UNEVEN, _OFF = 1e-3, 1e-2  # relative


def check_loss_terms(
    evidence: Evidence, update: int, factor: float, pieces: Sequence[Piece], findings: Findings
) -> None:
    """Check the loss weights of an update whose gradient is `factor` times the sum of the gradients of `pieces`."""
    losses = _losses(evidence, update)
    if set(losses) != set(pieces):
        findings.not_checked(f"the weight of loss terms: {_why_not(losses, pieces)}")
        return
    if len({tuple((term.name, term.line) for term in terms) for terms in losses.values()}) > 1:
        findings.not_checked("the weight of loss terms: the micro-batches of an update use different loss functions")
        return
    num_losses = len(next(iter(losses.values())))
    for number in range(num_losses):
        terms = {piece: of_piece[number] for piece, of_piece in losses.items()}
        if all(term.terms for term in terms.values()):
            _judge(evidence, update, factor, terms, num_losses == 1, findings)


def _why_not(losses: Collection[Piece], pieces: Sequence[Piece]) -> str:
    """Why the terms of an update cannot be counted."""
    if not losses:
        return "no loss of torch.nn.functional, no mean() and no sum() was recorded"
    unseen = len(set(pieces) - set(losses))
    if unseen:
        return f"{unseen} of {len(pieces)} backwards of an update have no loss of torch.nn.functional, mean() or sum()"
    return "the optimizer step leaves out the gradient of some backwards"


def _losses(evidence: Evidence, update: int) -> dict[Piece, list[LossTerm]]:
    """The losses of each backward of this update."""
    losses: dict[Piece, list[LossTerm]] = {}
    for rank in evidence.ranks:
        for event in evidence.of(rank, BackwardEnd):
            terms = [term for term in event.losses if term.scale]
            if event.update == update and terms:
                losses[rank, event.micro] = terms
    return losses


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
    # with several losses and equal counts, the script sets the weights; mixup draws one for each rank
    is_chosen = not is_only and len({term.terms for term in terms.values()}) == 1
    is_uneven = not is_chosen and weights[most] - weights[least] > _UNEVEN * abs(weights[most])
    if is_uneven:
        findings.add(
            "FAIL",
            "gradient.ragged",
            first.line,
            f"update {update}: a loss term of rank {most[0]}, backward {most[1]} ({terms[most].terms:g} terms) "
            f"weighs {weights[most] / weights[least]:.3g} times one of rank {least[0]}, backward {least[1]} "
            f"({terms[least].terms:g} terms): a mean of means, not the mean over all {count:g} terms",
            "sum the loss, and divide it by the number of terms of all ranks and micro-batches",
            evidence.scaling_lines(update),
            about_ranks=update == 0 and len(terms) == evidence.world_size,
        )
    total = sum(weights[piece] * term.terms for piece, term in terms.items())
    if len({term.reduction for term in terms.values()}) > 1:
        return  # means and sums are mixed: the script may divide by the size of a full batch
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
    """Report a mean loss whose gradient is off by a factor, with the cause if it is known."""
    ranks, num_ranks = evidence.ranks, evidence.world_size
    scale = evidence.steps[update][ranks[0]].loss_scale if update in evidence.steps else 1.0
    if scale != 1.0 and abs(total / scale - 1) < _OFF:
        return  # clip.scaled reports it
    num_backwards = len(terms) // num_ranks
    reduced = factor * num_ranks  # 1 if gradients are averaged over ranks, num_ranks if summed
    if abs(reduced * scale - 1) < _OFF or abs(reduced * scale - num_ranks) < _OFF * num_ranks:
        reduced *= scale
    usual = _usual_backwards(evidence, update, num_backwards)
    if num_backwards != usual and update in evidence.after_jumps and _has_no_rest(evidence, usual):
        return  # the audit has shortened the epoch; a whole one ends with a full update
    cause, fix = _cause(total, reduced, num_ranks, num_backwards, usual)
    findings.add(
        "FAIL" if cause else "NOTE",
        "gradient.scale",
        next(iter(terms.values())).line,
        f"update {update}: the gradient is {times(total)}: {cause or 'perhaps a loss weight of the script'}",
        fix,
        (*evidence.scaling_lines(update), *(_window_of(evidence, update) if num_backwards != usual else ())),
        about_ranks=update == 0 and "ranks" in cause,
    )


def _window_of(evidence: Evidence, update: int) -> tuple[str, ...]:
    """Return the line of `optimizer.step()`, which ends an accumulation."""
    steps = evidence.steps.get(update)
    return (steps[evidence.ranks[0]].line,) if steps else ()


def times(total: float) -> str:
    """Describe the scale error of a gradient; 1 is that of the mean over all terms."""
    if total > 1:
        return f"{total:.4g}x too large"
    return f"{1 / total:.4g}x too small" if total > 0 else f"{total:.4g} times that of the mean over all terms"


def _usual_backwards(evidence: Evidence, update: int, default: int) -> int:
    """The usual number of backwards of the other updates."""
    counts = Counter(event.update for event in evidence.of(evidence.ranks[0], BackwardEnd))
    usual = Counter(count for other, count in counts.items() if other != update).most_common(1)
    return usual[0][0] if usual else default


def _has_no_rest(evidence: Evidence, usual: int) -> bool:
    """Whether `usual` divides the number of batches of each training epoch."""
    trained = {key for key, kind in evidence.epochs[evidence.ranks[0]].items() if kind == "train"}
    loaders = [loader for key, loader in evidence.loaders(evidence.ranks[0]).items() if key in trained]
    return all((loader.num_batches or 0) % usual == 0 for loader in loaders)


def _cause(total: float, reduced: float, num_ranks: int, num_backwards: int, usual: int) -> tuple[str, str]:
    """The mistake that gives this factor, and its fix; ("", "") if none does."""

    def is_about(value: float, expected: float) -> bool:
        return abs(value - expected) < _OFF * expected

    several, are_more = num_ranks > 1, num_backwards > 1
    by_ranks = "do not divide or multiply by the number of ranks: DistributedDataParallel averages"
    by_backwards = f"(loss / {max(num_backwards, usual)}).backward() for each micro-batch"
    if num_backwards != usual and is_about(total * usual, num_backwards):
        cause = (
            f"the loss is divided by {usual} backwards, but this update, at the end of an epoch, has {num_backwards}"
        )
        return cause, "divide by the number of micro-batches of this update"
    if several and is_about(reduced, num_ranks):
        return f"it is summed over the {num_ranks} ranks, not averaged", "divide the sum by dist.get_world_size()"
    if several and (is_about(reduced * num_ranks, 1) or is_about(total * num_ranks, 1)):
        return f"it is divided by the {num_ranks} ranks once too often", by_ranks
    if are_more and is_about(total, num_backwards):
        return f"the loss is not divided by the {num_backwards} backwards of an update", by_backwards
    if are_more and is_about(total * num_backwards, 1):
        return f"the loss is divided by the {num_backwards} backwards twice", by_backwards
    if several and is_about(total, num_ranks):
        return f"the loss is multiplied by the {num_ranks} ranks, but the gradient is averaged", by_ranks
    return "", ""


def _summed(
    evidence: Evidence,
    update: int,
    factor: float,
    weight: float,
    terms: dict[Piece, LossTerm],
    findings: Findings,
) -> None:
    """Report a summed loss as a NOTE: its step grows with the batch. Divided by its number of terms, it is a mean."""
    if update in evidence.after_jumps:
        return
    count, num_ranks = sum(term.terms for term in terms.values()), evidence.world_size
    first = next(iter(terms.values()))
    if abs(first.scale * count / evidence.steps[update][evidence.ranks[0]].loss_scale - 1) < _OFF:
        _wrong_scale(evidence, update, factor, terms, count * weight, findings)
        return
    line = first.line
    text = f"update {update}: the loss is a sum, and each of {count:g} terms has weight {weight:.4g}"
    if num_ranks > 1 and abs(weight * num_ranks - 1) < _UNEVEN:
        text += ": averaged over ranks, so the step shrinks as ranks are added"
    findings.add("NOTE", "gradient.sum", line, text)
