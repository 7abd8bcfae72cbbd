"""Workers of a loader change no samples: the same script reads with num_workers=0 what it reads with workers."""

from __future__ import annotations

import dataclasses

from everyrank.audit.finding import Findings
from everyrank.relations.samples import samples_of_passes
from everyrank.rerun import ScriptRecording

__all__ = ["is_suspicious", "judge_workers"]

_FEW = 16  # samples: too few to judge
_REPEATED = 0.9  # of the samples of a pass: nothing is new
_NEW = 0.5
_COPIES = 0.4  # of the samples are read twice in a pass


def is_suspicious(many: ScriptRecording) -> bool:
    """Whether a loader with workers repeats samples within a pass or in the next pass."""
    shares = _shares(many)
    return any(share.again >= _REPEATED or share.twice >= _COPIES for share in shares.values())


def judge_workers(many: ScriptRecording, without: ScriptRecording, findings: Findings) -> None:
    """Compare a run with workers and one without."""
    with_workers, alone = _shares(many), _shares(without)
    places = many.ranks[0].facts.get("loader_places", {})
    for loader, shares in with_workers.items():
        if loader not in alone:
            continue
        own = alone[loader]
        is_again = shares.again >= _REPEATED and own.again < _NEW
        if is_again or (shares.in_order >= _REPEATED and own.in_order < _NEW):
            what = "samples" if is_again else "order"
            share, own_share = (shares.again, own.again) if is_again else (shares.in_order, own.in_order)
            findings.add(
                "WARN",
                "data.frozen-workers",
                places.get(loader, ""),
                f"the second pass repeats {share:.0%} of the {what} of the first, and {own_share:.0%} with "
                f"num_workers=0: workers have a copy of the dataset or of its random state, which does not change "
                f"between epochs",
                "leave persistent_workers out, or pass the epoch through the sampler; seed random numbers by epoch",
            )
        elif shares.twice >= _COPIES and own.twice < _COPIES / 4:
            findings.add(
                "WARN",
                "data.repeat",
                places.get(loader, ""),
                f"{shares.twice:.0%} of the samples of a pass are read more than once, and {own.twice:.0%} with "
                f"num_workers=0: all workers read the same stream",
                "divide the stream by get_worker_info().id and num_workers",
            )


@dataclasses.dataclass(frozen=True)
class _Shares:
    """What repeats.

    again     samples of pass 1 that pass 0 had
    twice     samples of pass 0 that were read before in it
    in_order  samples of pass 1 that pass 0 had at the same position on the same rank
    """

    again: float
    twice: float
    in_order: float


def _shares(recording: ScriptRecording) -> dict[int, _Shares]:
    """The shares of each training loader with workers."""
    passes: dict[int, dict[int, list[list[int]]]] = {}
    for rank in recording.ranks:
        for (loader, number), (_, samples) in samples_of_passes(rank).items():
            passes.setdefault(loader, {}).setdefault(number, []).append(samples)
    used = {loader for rank in recording.ranks for loader in rank.facts.get("with_workers", [])}
    shares: dict[int, _Shares] = {}
    for loader, by_number in passes.items():
        by_rank = [by_number.get(number, []) for number in (0, 1)]
        first, second = ([sample for samples in of_ranks for sample in samples] for of_ranks in by_rank)
        if (used and loader not in used) or len(first) < _FEW:
            continue
        known = set(first)
        pairs = [pair for ranks in zip(*by_rank, strict=False) for pair in zip(*ranks, strict=False)]
        # a pass that was cut off has a part of the samples
        is_known = len(second) >= _FEW
        again = sum(sample in known for sample in second) / len(second) if is_known else 0.0
        in_order = sum(one == other for one, other in pairs) / len(pairs) if is_known and pairs else 0.0
        shares[loader] = _Shares(again, 1 - len(known) / len(first), in_order)
    return shares
