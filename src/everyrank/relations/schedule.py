"""The schedule of learning rates depends on the progress of the training, not on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.audit.finding import Findings
from everyrank.rerun import RankRecording, ScriptRecording

__all__ = ["has_schedule", "is_stretched", "judge_horizon"]

_ENDED = 0.01  # of the largest rate: the schedule has come to its end
_HIGH = 0.1  # of the largest rate: it has not
_LONG = 0.2  # of the updates: too many with a rate of zero
_OTHER_END = 0.2  # of the ranks: one rank does not make that many times the updates
_MARGIN = 0.03  # of the largest rate
_FEW = 2


def has_schedule(rank: RankRecording) -> bool:
    """Whether the learning rate changes in the recorded updates."""
    return len({tuple(update.rates) for update in rank.updates}) > 1


def is_stretched(many: Sequence[float], one: Sequence[float], ranks: int) -> bool | None:
    """Whether the rates of N ranks are those of one rank after N times as many updates, up to a constant factor.

    A schedule whose length is divided by the ranks is correct: an update of N ranks reads the samples of N.
    None if there are too few updates to tell.
    """
    known = [update for update in range(len(many)) if ranks * (update + 1) < len(one)]
    if len(known) < _FEW:
        return None
    largest = max(one[: ranks * (known[-1] + 1) + 1])
    factor = max(many[: known[-1] + 1]) / largest if largest else 0.0
    margin = 0.03 * largest * factor
    for update in known:
        nearby = [rate * factor for rate in one[ranks * update : ranks * (update + 1) + 1]]
        if not min(nearby) - margin <= many[update] <= max(nearby) + margin:
            return False
    return True


def _has_same_progress(shared: Sequence[float], single: Sequence[float]) -> bool:
    """Whether the rates of N ranks are those of one rank after the same part of the training.

    The warm-up may take the same part of the training, or the same number of updates.
    """
    times = len(single) / len(shared)
    peaks = [rates.index(max(rates)) for rates in (shared, single)]
    if min(abs(peaks[0] - peaks[1]), abs(peaks[0] - peaks[1] / times)) > 1:
        return False
    shared, single = shared[peaks[0] :], single[peaks[1] :]
    for update, rate in enumerate(shared):
        first, last = (round(part * len(single) / len(shared)) for part in (update, update + 1))
        nearby = single[max(0, first - 1) : last + 1]
        if not min(nearby) - _MARGIN <= rate <= max(nearby) + _MARGIN:
            return False
    return True


def judge_horizon(many: ScriptRecording, one: ScriptRecording, findings: Findings) -> None:
    """Compare the ends of the schedules of complete runs, each with the batches that it reads by itself."""
    ranks, alone = many.ranks[0], one.ranks[0]
    if many.trouble or one.trouble or not (ranks.facts.get("came_to_end") and alone.facts.get("came_to_end")):
        return
    shared, single = ([update.rates[0] for update in rank.updates if update.rates] for rank in (ranks, alone))
    times = len(single) / max(len(shared), 1)
    if len(shared) < 4 or abs(times - len(many.ranks)) > _OTHER_END * len(many.ranks):
        return  # the number of updates is part of the settings, or the script stops early
    if not max(shared) or not max(single):
        return
    shared, single = ([rate / max(rates) for rate in rates] for rates in (shared, single))
    if _has_same_progress(shared, single):
        findings.refuted |= {"schedule.often", "ranks.rate"}  # it is made for the steps or samples of all ranks
        return
    place = ranks.facts.get("schedules", [ranks.updates[-1].step])
    idle = [sum(rate < _ENDED for rate in reversed(rates)) / len(rates) for rates in (shared, single)]
    if idle[0] <= idle[1] + _MARGIN and abs(shared[-1] - single[-1]) <= 2 * _MARGIN:
        findings.refuted.add("schedule.often")  # it does not end early
    following = [2 * rates[-1] - rates[-2] for rates in (shared, single)]  # linear schedules end one step later
    if following[1] < _ENDED and shared[-1] > _HIGH and following[0] > _ENDED:
        findings.add(
            "WARN",
            "schedule.horizon",
            place[0],
            f"the learning rate ends at {shared[-1]:.0%} of its maximum on {len(many.ranks)} ranks "
            f"({len(shared)} updates), and at {single[-1]:.0%} on one rank ({len(single)} updates): the length of the "
            f"schedule does not count the ranks",
            "compute the number of updates from len(loader), which the sampler has divided by the ranks",
            also=tuple(place[1:]),
        )
    elif idle[0] > _LONG and idle[1] < _LONG / 4:
        findings.add(
            "WARN",
            "schedule.horizon",
            place[0],
            f"the learning rate is zero in {idle[0]:.0%} of the updates on {len(many.ranks)} ranks, and in "
            f"{idle[1]:.0%} on one rank: the schedule ends before the training",
            "step the scheduler once per update, and compute its length from the number of updates",
            also=tuple(place[1:]),
        )
