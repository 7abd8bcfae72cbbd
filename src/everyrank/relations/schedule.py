"""Checks that the learning-rate schedule does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.audit.finding import Findings
from everyrank.rerun import RankRecording, ScriptRecording

__all__ = ["has_schedule", "is_scaled_by_ranks", "judge_horizon"]

_FINISHED_BELOW = 0.01  # of the largest rate
_UNFINISHED_ABOVE = 0.1  # of the largest rate
_MAX_IDLE_SHARE = 0.2  # of the updates, with a learning rate of 0
_RATIO_TOLERANCE = 0.2  # of the ratio of the numbers of updates to the number of ranks
_MARGIN = 0.03  # of the largest rate
_MIN_UPDATES = 2


def has_schedule(rank: RankRecording) -> bool:
    """Whether the learning rate changes in the recorded updates."""
    return len({tuple(update.rates) for update in rank.updates}) > 1


def is_scaled_by_ranks(many: Sequence[float], single: Sequence[float], ranks: int) -> bool | None:
    """Whether update u on N ranks has the learning rate of update N * u on one rank, up to a constant factor.

    Such a schedule is correct, because an update on N ranks reads N times the samples. None if there are too few
    updates to tell.
    """
    comparable = [update for update in range(len(many)) if ranks * (update + 1) < len(single)]
    if len(comparable) < _MIN_UPDATES:
        return None
    largest = max(single[: ranks * (comparable[-1] + 1) + 1])
    factor = max(many[: comparable[-1] + 1]) / largest if largest else 0.0
    margin = _MARGIN * largest * factor
    for update in comparable:
        nearby = [rate * factor for rate in single[ranks * update : ranks * (update + 1) + 1]]
        if not min(nearby) - margin <= many[update] <= max(nearby) + margin:
            return False
    return True


def _has_same_progress(shared: Sequence[float], single: Sequence[float]) -> bool:
    """Whether the rates of N ranks are those of one rank after the same fraction of the training.

    The warm-up may take the same fraction of the training, or the same number of updates.
    """
    update_ratio = len(single) / len(shared)
    peaks = [rates.index(max(rates)) for rates in (shared, single)]
    if min(abs(peaks[0] - peaks[1]), abs(peaks[0] - peaks[1] / update_ratio)) > 1:
        return False
    shared, single = shared[peaks[0] :], single[peaks[1] :]
    for update, rate in enumerate(shared):
        first, last = (round(position * len(single) / len(shared)) for position in (update, update + 1))
        nearby = single[max(0, first - 1) : last + 1]
        if not min(nearby) - _MARGIN <= rate <= max(nearby) + _MARGIN:
            return False
    return True


def _is_faster(shared: Sequence[float], single: Sequence[float], ranks: int) -> bool:
    """Whether the schedule of N ranks takes N steps in each update, and the rates differ because of that."""
    last = len(single) - 1
    takes_every_step = all(
        abs(rate - single[min(ranks * update, last)]) <= _MARGIN for update, rate in enumerate(shared)
    )
    return takes_every_step and any(
        abs(shared_rate - single_rate) > 3 * _MARGIN for shared_rate, single_rate in zip(shared, single, strict=True)
    )


def _rates_of_last(rank: RankRecording) -> list[float]:
    """The learning rates of the optimizer of the last update. Another optimizer may have trained something before."""
    last = rank.updates[-1].optimizer if rank.updates else ""
    return [update.rates[0] for update in rank.updates if update.rates and update.optimizer == last]


def judge_horizon(many: ScriptRecording, single: ScriptRecording, findings: Findings) -> None:
    """Compare where the schedule ends on N ranks and on one, in complete runs of the script."""
    first_rank, single_rank = many.ranks[0], single.ranks[0]
    if (
        many.failure
        or single.failure
        or not (first_rank.facts.get("came_to_end") and single_rank.facts.get("came_to_end"))
    ):
        return
    shared_rates, single_rates = (_rates_of_last(rank) for rank in (first_rank, single_rank))
    update_ratio = len(single_rates) / max(len(shared_rates), 1)
    if len(shared_rates) < 4 or not max(shared_rates) or not max(single_rates, default=0.0):
        return
    shared_rates, single_rates = ([rate / max(rates) for rate in rates] for rates in (shared_rates, single_rates))
    locations = first_rank.facts.get("schedules", [first_rank.updates[-1].step])
    if len(shared_rates) == len(single_rates) and _is_faster(shared_rates, single_rates, len(many.ranks)):
        findings.add(
            "WARN",
            "schedule.horizon",
            locations[0],
            f"the learning rate of update u on {len(many.ranks)} ranks is that of update {len(many.ranks)}u on one "
            f"rank, and the script makes {len(shared_rates)} updates on both: the schedule ends before training does",
            "step the scheduler once per update, or multiply its length by the number of ranks",
            other_lines=tuple(locations[1:]),
        )
    if abs(update_ratio - len(many.ranks)) > _RATIO_TOLERANCE * len(many.ranks):
        return  # the number of updates is a setting, or the script stopped early
    if _has_same_progress(shared_rates, single_rates):
        findings.refute("schedule.often", "ranks.rate")  # the schedule already counts the ranks
        return
    idle = [
        sum(rate < _FINISHED_BELOW for rate in reversed(rates)) / len(rates) for rates in (shared_rates, single_rates)
    ]
    if idle[0] <= idle[1] + _MARGIN and abs(shared_rates[-1] - single_rates[-1]) <= 2 * _MARGIN:
        findings.refute("schedule.often")  # it does not end early
    next_rates = [
        2 * rates[-1] - rates[-2] for rates in (shared_rates, single_rates)
    ]  # linear schedules end one step later
    if next_rates[1] < _FINISHED_BELOW and shared_rates[-1] > _UNFINISHED_ABOVE and next_rates[0] > _FINISHED_BELOW:
        findings.add(
            "WARN",
            "schedule.horizon",
            locations[0],
            f"the learning rate ends at {shared_rates[-1]:.0%} of its maximum on {len(many.ranks)} ranks "
            f"({len(shared_rates)} updates), and at {single_rates[-1]:.0%} on one rank ({len(single_rates)} updates): "
            f"the length of the schedule ignores the number of ranks",
            "compute the number of updates from len(loader), which the sampler has divided by the ranks",
            other_lines=tuple(locations[1:]),
        )
    elif idle[0] > _MAX_IDLE_SHARE and idle[1] < _MAX_IDLE_SHARE / 4:
        findings.add(
            "WARN",
            "schedule.horizon",
            locations[0],
            f"the learning rate is zero in {idle[0]:.0%} of the updates on {len(many.ranks)} ranks, and in "
            f"{idle[1]:.0%} on one rank: the schedule ends before training does",
            "step the scheduler once per update, and compute its length from the number of updates",
            other_lines=tuple(locations[1:]),
        )
