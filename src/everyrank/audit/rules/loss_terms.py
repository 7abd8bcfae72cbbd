"""Checks that each loss term has weight 1/N in the gradient, where N counts the terms of all ranks and backwards."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

from everyrank.audit.events import BackwardEnd, LossTerm
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["BackwardKey", "check_loss_terms", "scale_error"]

BackwardKey = tuple[int, int]
"""A backward: its rank, and its number in the update."""
_UNEVEN_TOLERANCE, _SCALE_TOLERANCE = 1e-3, 1e-2  # relative


def check_loss_terms(
    evidence: Evidence, update: int, factor: float, backwards: Sequence[BackwardKey], findings: Findings
) -> None:
    """Check the loss weights of an update whose gradient is `factor` times the sum of those of `backwards`."""
    losses = _losses_of_update(evidence, update)
    if set(losses) != set(backwards):
        findings.add_unchecked(f"the weight of loss terms: {_reason_not_counted(losses, backwards)}")
        return
    if len({tuple((term.name, term.line) for term in terms) for terms in losses.values()}) > 1:
        findings.add_unchecked("the weight of loss terms: the micro-batches of an update use different loss functions")
        return
    num_losses = len(next(iter(losses.values())))
    may_mix = num_losses > 1 and _have_equal_sums(losses.values())
    for number in range(num_losses):
        terms = {key: backward_terms[number] for key, backward_terms in losses.items()}
        if all(term.terms for term in terms.values()):
            _check_weights(evidence, update, factor, terms, num_losses == 1, may_mix, findings)


def _have_equal_sums(losses: Collection[list[LossTerm]]) -> bool:
    """Whether the losses of each backward have the same total weight, as in mixup: a and 1 - a for any a."""
    sums = [sum(term.scale * (1 if term.reduction == "mean" else term.terms) for term in terms) for terms in losses]
    return max(sums) - min(sums) <= _UNEVEN_TOLERANCE * max(map(abs, sums))


def _reason_not_counted(losses: Collection[BackwardKey], backwards: Sequence[BackwardKey]) -> str:
    """Why the terms of an update cannot be counted."""
    if not losses:
        return "no loss of torch.nn.functional, no mean() and no sum() was recorded"
    num_without_loss = len(set(backwards) - set(losses))
    if num_without_loss:
        return (
            f"{num_without_loss} of {len(backwards)} backwards of an update have no loss of torch.nn.functional, "
            "mean() or sum()"
        )
    return "the optimizer step leaves out the gradient of some backwards"


def _losses_of_update(evidence: Evidence, update: int) -> dict[BackwardKey, list[LossTerm]]:
    """The losses of each backward of this update."""
    losses: dict[BackwardKey, list[LossTerm]] = {}
    for rank in evidence.ranks:
        for event in evidence.of(rank, BackwardEnd):
            terms = [term for term in event.losses if term.scale]
            if event.update == update and terms:
                losses[rank, event.micro] = terms
    return losses


def _check_weights(
    evidence: Evidence,
    update: int,
    factor: float,
    terms: dict[BackwardKey, LossTerm],
    is_only_loss: bool,
    may_mix: bool,
    findings: Findings,
) -> None:
    if all(term.scale < 0 for term in terms.values()):  # a likelihood with a minus sign before it
        terms = {key: dataclasses.replace(term, scale=-term.scale) for key, term in terms.items()}
    weights = {
        key: factor * term.scale / (term.terms if term.reduction == "mean" else 1) for key, term in terms.items()
    }
    lightest, heaviest = min(weights, key=lambda key: weights[key]), max(weights, key=lambda key: weights[key])
    count = sum(term.terms for term in terms.values())
    first = next(iter(terms.values()))
    # mixup, for example, draws weights that add up to 1 on each rank
    may_be_intended = may_mix and len({term.terms for term in terms.values()}) == 1
    is_uneven = not may_be_intended and weights[heaviest] - weights[lightest] > _UNEVEN_TOLERANCE * abs(
        weights[heaviest]
    )
    if is_uneven:
        findings.add(
            "FAIL",
            "gradient.ragged",
            first.line,
            f"update {update}: a loss term of rank {heaviest[0]}, backward {heaviest[1]} ({terms[heaviest].terms:g} "
            f"terms) weighs {weights[heaviest] / weights[lightest]:.3g} times one of rank {lightest[0]}, backward "
            f"{lightest[1]} ({terms[lightest].terms:g} terms): a mean of means, not the mean over all {count:g} terms",
            "sum the loss, and divide it by the number of terms of all ranks and micro-batches",
            evidence.scaling_lines(update),
            refuted_if_equal_to_one_rank=update == 0 and len(terms) == evidence.world_size,
        )
    total_weight = sum(weights[key] * term.terms for key, term in terms.items())
    if len({term.reduction for term in terms.values()}) > 1:
        return  # some losses are means and some are sums: the script may divide by the size of a full batch
    if first.reduction == "mean" and is_only_loss and abs(total_weight - 1) > _SCALE_TOLERANCE:
        _report_scale(evidence, update, factor, terms, total_weight, findings)
    elif first.reduction == "sum" and is_only_loss and not is_uneven and abs(total_weight - 1) > _UNEVEN_TOLERANCE:
        _report_sum(evidence, update, factor, weights[heaviest], terms, findings)


def _report_scale(
    evidence: Evidence,
    update: int,
    factor: float,
    terms: dict[BackwardKey, LossTerm],
    total_weight: float,
    findings: Findings,
) -> None:
    """Report a mean loss whose gradient is wrong by a factor, with the cause if it is known."""
    ranks, num_ranks = evidence.ranks, evidence.world_size
    loss_scale = evidence.steps[update][ranks[0]].loss_scale if update in evidence.steps else 1.0
    if loss_scale != 1.0 and abs(total_weight / loss_scale - 1) < _SCALE_TOLERANCE:
        return  # clip.scaled reports it
    num_backwards = len(terms) // num_ranks
    rank_factor = factor * num_ranks  # 1 if gradients are averaged over ranks, num_ranks if summed
    if (
        abs(rank_factor * loss_scale - 1) < _SCALE_TOLERANCE
        or abs(rank_factor * loss_scale - num_ranks) < _SCALE_TOLERANCE * num_ranks
    ):
        rank_factor *= loss_scale
    usual_backwards = _usual_backwards(evidence, update, num_backwards)
    if (
        num_backwards != usual_backwards
        and update in evidence.updates_after_skip
        and _divides_all_epochs(evidence, usual_backwards)
    ):
        return  # only because the audit has shortened the epoch: the whole epoch ends with a full update
    cause, fix = _cause_and_fix(total_weight, rank_factor, num_ranks, num_backwards, usual_backwards)
    findings.add(
        "FAIL" if cause else "NOTE",
        "gradient.scale",
        next(iter(terms.values())).line,
        f"update {update}: the gradient is {scale_error(total_weight)}: "
        f"{cause or 'perhaps a loss weight of the script'}",
        fix,
        (*evidence.scaling_lines(update), *(_step_line(evidence, update) if num_backwards != usual_backwards else ())),
        refuted_if_equal_to_one_rank=update == 0 and "ranks" in cause,
    )


def _step_line(evidence: Evidence, update: int) -> tuple[str, ...]:
    """Return the line of `optimizer.step()`, which ends an accumulation."""
    steps = evidence.steps.get(update)
    return (steps[evidence.ranks[0]].line,) if steps else ()


def scale_error(total_weight: float) -> str:
    """Describe the scale error of a gradient, which is 1 for the mean over all terms."""
    if total_weight > 1:
        return f"{total_weight:.4g}x too large"
    return (
        f"{1 / total_weight:.4g}x too small"
        if total_weight > 0
        else f"{total_weight:.4g} times that of the mean over all terms"
    )


def _usual_backwards(evidence: Evidence, update: int, default: int) -> int:
    """The usual number of backwards of the other updates."""
    counts = Counter(event.update for event in evidence.of(evidence.ranks[0], BackwardEnd))
    usual_count = Counter(count for other_update, count in counts.items() if other_update != update).most_common(1)
    return usual_count[0][0] if usual_count else default


def _divides_all_epochs(evidence: Evidence, usual_count: int) -> bool:
    """Whether `usual` divides the number of batches of each training epoch."""
    trained = {key for key, kind in evidence.epochs[evidence.ranks[0]].items() if kind == "train"}
    loaders = [loader for key, loader in evidence.loaders(evidence.ranks[0]).items() if key in trained]
    return all((loader.num_batches or 0) % usual_count == 0 for loader in loaders)


def _cause_and_fix(
    total_weight: float, rank_factor: float, num_ranks: int, num_backwards: int, usual_backwards: int
) -> tuple[str, str]:
    """The mistake that explains this factor, and its fix; ("", "") if none is known."""

    def is_about(value: float, expected: float) -> bool:
        return abs(value - expected) < _SCALE_TOLERANCE * expected

    has_several_ranks, has_several_backwards = num_ranks > 1, num_backwards > 1
    by_ranks = "do not divide or multiply by the number of ranks: DistributedDataParallel averages"
    by_backwards = f"(loss / {max(num_backwards, usual_backwards)}).backward() for each micro-batch"
    if num_backwards != usual_backwards and is_about(total_weight * usual_backwards, num_backwards):
        cause = (
            f"the loss is divided by {usual_backwards} backwards, but this update, at the end of an epoch, has "
            f"{num_backwards}"
        )
        return cause, "divide by the number of micro-batches of this update"
    if has_several_ranks and is_about(rank_factor, num_ranks):
        return f"it is summed over the {num_ranks} ranks, not averaged", "divide the sum by dist.get_world_size()"
    if has_several_ranks and (is_about(rank_factor * num_ranks, 1) or is_about(total_weight * num_ranks, 1)):
        return f"it is divided by the {num_ranks} ranks once too often", by_ranks
    if has_several_backwards and is_about(total_weight, num_backwards):
        return f"the loss is not divided by the {num_backwards} backwards of an update", by_backwards
    if has_several_backwards and is_about(total_weight * num_backwards, 1):
        return f"the loss is divided by the {num_backwards} backwards twice", by_backwards
    if has_several_ranks and is_about(total_weight, num_ranks):
        return f"the loss is multiplied by the {num_ranks} ranks, but the gradient is averaged", by_ranks
    return "", ""


def _report_sum(
    evidence: Evidence,
    update: int,
    factor: float,
    weight: float,
    terms: dict[BackwardKey, LossTerm],
    findings: Findings,
) -> None:
    """Report a summed loss as a NOTE, because its step grows with the batch; judge it as a mean if it is divided."""
    if update in evidence.updates_after_skip:
        return
    count, num_ranks = sum(term.terms for term in terms.values()), evidence.world_size
    first = next(iter(terms.values()))
    if abs(first.scale * count / evidence.steps[update][evidence.ranks[0]].loss_scale - 1) < _SCALE_TOLERANCE:
        _report_scale(evidence, update, factor, terms, count * weight, findings)
        return
    line = first.line
    text = f"update {update}: the loss is a sum, and each of {count:g} terms has weight {weight:.4g}"
    if num_ranks > 1 and abs(weight * num_ranks - 1) < _UNEVEN_TOLERANCE:
        text += ". It is averaged over ranks, so the step shrinks as ranks are added"
    findings.add("NOTE", "gradient.sum", line, text)
