"""Checks that workers of a loader change no samples, by comparison with num_workers=0."""

from __future__ import annotations

import dataclasses

from everyrank.audit.finding import Findings
from everyrank.relations.samples import samples_of_passes
from everyrank.rerun import ScriptRecording

__all__ = ["is_suspicious", "judge_workers"]

_MIN_SAMPLES = 16
_MIN_REPEATED_SHARE = 0.9  # of the samples of a pass, if workers repeat them
_MAX_USUAL_SHARE = 0.5  # of the samples of a pass that repeat without workers
_MIN_TWICE_SHARE = 0.4  # of the samples of a pass, if workers read them twice


def is_suspicious(many: ScriptRecording) -> bool:
    """Whether a loader with workers repeats samples within a pass or in the next pass."""
    shares = _shares(many)
    return any(share.again >= _MIN_REPEATED_SHARE or share.twice >= _MIN_TWICE_SHARE for share in shares.values())


def judge_workers(many: ScriptRecording, without: ScriptRecording, findings: Findings) -> None:
    """Compare a run with workers with a run without workers."""
    with_workers, shares_without_workers = _shares(many), _shares(without)
    places = many.ranks[0].facts.get("loader_places", {})
    for loader, shares in with_workers.items():
        if loader not in shares_without_workers:
            continue
        usual = shares_without_workers[loader]
        repeats_samples = shares.again >= _MIN_REPEATED_SHARE and usual.again < _MAX_USUAL_SHARE
        if repeats_samples or (shares.in_order >= _MIN_REPEATED_SHARE and usual.in_order < _MAX_USUAL_SHARE):
            repeated = "samples" if repeats_samples else "order"
            share, usual_share = (shares.again, usual.again) if repeats_samples else (shares.in_order, usual.in_order)
            findings.add(
                "WARN",
                "data.frozen-workers",
                places.get(loader, ""),
                f"the second pass repeats {share:.0%} of the {repeated} of the first, and {usual_share:.0%} with "
                f"num_workers=0: workers have a copy of the dataset or of its random state, which does not change "
                f"between epochs",
                "remove persistent_workers, or pass the epoch through the sampler, and seed random numbers by epoch",
            )
        elif shares.twice >= _MIN_TWICE_SHARE and usual.twice < _MIN_TWICE_SHARE / 4:
            findings.add(
                "WARN",
                "data.repeat",
                places.get(loader, ""),
                f"{shares.twice:.0%} of the samples of a pass are read more than once, and {usual.twice:.0%} with "
                f"num_workers=0: all workers read the same stream",
                "divide the stream by get_worker_info().id and num_workers",
            )


@dataclasses.dataclass(frozen=True)
class _Shares:
    """Shares of repeated samples.

    again     samples of pass 1 that pass 0 has read, too
    twice     samples of pass 0 that were read before in pass 0
    in_order  samples of pass 1 that pass 0 has read at the same position on the same rank
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
    for loader, rank_samples_by_pass in passes.items():
        by_rank = [rank_samples_by_pass.get(number, []) for number in (0, 1)]
        first, second = ([sample for samples in rank_samples for sample in samples] for rank_samples in by_rank)
        if (used and loader not in used) or len(first) < _MIN_SAMPLES:
            continue
        first_samples = set(first)
        pairs = [pair for ranks in zip(*by_rank, strict=False) for pair in zip(*ranks, strict=False)]
        # a pass that was ended early has few samples
        has_enough = len(second) >= _MIN_SAMPLES
        again = sum(sample in first_samples for sample in second) / len(second) if has_enough else 0.0
        in_order = (
            sum(first_sample == second_sample for first_sample, second_sample in pairs) / len(pairs)
            if has_enough and pairs
            else 0.0
        )
        shares[loader] = _Shares(again, 1 - len(first_samples) / len(first), in_order)
    return shares
