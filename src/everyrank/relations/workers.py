"""Workers of a loader change no samples: the same script reads with num_workers=0 what it reads with workers."""

from __future__ import annotations

from everyrank.audit.finding import Findings
from everyrank.audit.source_lines import argument_of
from everyrank.relations.samples import samples_of_passes
from everyrank.rerun import ScriptRecording

__all__ = ["is_suspicious", "judge_workers"]

_REPEATED = 0.9  # of the samples of a pass: nothing is new
_NEW = 0.5
_COPIES = 0.4  # of the samples are read twice in a pass


def is_suspicious(many: ScriptRecording) -> bool:
    """Whether a loader with workers repeats samples within a pass or in the next pass."""
    shares = _shares(many)
    return any(again >= _REPEATED or twice >= _COPIES for again, twice in shares.values())


def judge_workers(many: ScriptRecording, without: ScriptRecording, findings: Findings) -> None:
    """Compare a run with workers and one without."""
    with_workers, alone = _shares(many), _shares(without)
    places = many.ranks[0].facts.get("loader_places", {})
    for loader, (again, twice) in with_workers.items():
        if loader not in alone:
            continue
        own_again, own_twice = alone[loader]
        if again >= _REPEATED and own_again < _NEW:
            findings.add(
                "WARN",
                "data.frozen-workers",
                places.get(loader, ""),
                f"the second pass reads {again:.0%} of the samples of the first again, and {own_again:.0%} with "
                f"num_workers=0: workers have a copy of the dataset or of its random state, which does not change "
                f"between epochs",
                "leave persistent_workers out, or pass the epoch through the sampler; seed random numbers by epoch",
                also=argument_of(places.get(loader, ""), "persistent_workers"),
            )
        elif twice >= _COPIES and own_twice < _COPIES / 4:
            findings.add(
                "WARN",
                "data.repeat",
                places.get(loader, ""),
                f"{twice:.0%} of the samples of a pass are read more than once, and {own_twice:.0%} with "
                f"num_workers=0: all workers read the same stream",
                "divide the stream by get_worker_info().id and num_workers",
            )


def _shares(recording: ScriptRecording) -> dict[int, tuple[float, float]]:
    """For each training loader with workers: samples of pass 1 that pass 0 had; samples of pass 0 read before in it."""
    passes: dict[int, dict[int, list[int]]] = {}
    for rank in recording.ranks:
        for (loader, number), (_, samples) in samples_of_passes(rank).items():
            passes.setdefault(loader, {}).setdefault(number, []).extend(samples)
    used = {loader for rank in recording.ranks for loader in rank.facts.get("with_workers", [])}
    shares: dict[int, tuple[float, float]] = {}
    for loader, by_number in passes.items():
        first, second = by_number.get(0, []), by_number.get(1, [])
        if (used and loader not in used) or len(first) < 16:
            continue
        known = set(first)
        # a pass that was cut off has a part of the samples
        again = sum(sample in known for sample in second) / len(second) if len(second) >= 16 else 0.0
        shares[loader] = again, 1 - len(known) / len(first)
    return shares
