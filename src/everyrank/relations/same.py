"""Other settings that should be the same training, such as larger batches and fewer of them per update."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.audit.finding import Findings
from everyrank.relations.numbers import constant_factor, relative_difference, tolerance_of
from everyrank.relations.samples import num_samples
from everyrank.rerun import Imposed, RankRecording, ScriptHost

__all__ = ["judge_same", "judge_settings"]


def judge_settings(
    host: ScriptHost, words: Sequence[str], processes: int, more: Sequence[str], findings: Findings, updates: int = 12
) -> None:
    """Run the script, then with `more` arguments on the same samples, and compare."""
    first = host.run_in_float64(processes, words=words, updates=updates, seconds=20.0)
    label = f"--same {' '.join(more)!r}"
    if first.trouble:
        findings.not_checked(f"{label}: the script fails in the comparison ({first.trouble})")
        return
    other = host.run(
        processes,
        words=[*words, *more],
        imposed=Imposed(recording=first, by_rows=True),
        float64=first.float64,
        updates=updates,
        detailed=updates,
        seconds=20.0,
    )
    refused = [why for rank in (*first.ranks, *other.ranks) for why, _ in rank.facts.get("refused", [])]
    if other.trouble or refused:
        findings.not_checked(f"{label}: not compared, because {(other.trouble or refused[0])}")
        return
    judge_same(first.ranks[0], other.ranks[0], label, findings)


def judge_same(first: RankRecording, other: RankRecording, label: str, findings: Findings) -> None:
    """Compare the updates of a rank under both settings. They have to read the same number of samples."""
    sizes = [_rows_of_updates(rank) for rank in (first, other)]
    count = min(len(first.updates), len(other.updates))
    if not count:
        findings.not_checked(f"{label}: no update was made")
        return
    if not any(sizes[0]):
        findings.not_checked(f"{label}: the batches do not come from a DataLoader")
        return
    if first.facts.get("batch_norms") and len(first.updates[0].losses) != len(other.updates[0].losses):
        findings.not_checked(f"{label}: batch norm takes the statistics of other batches")
        return
    tolerance = tolerance_of(list(first.updates[0].before.values()))
    if tolerance is None:
        findings.not_checked(f"{label}: the script computes in 16 bits")
        return
    for update in range(count):
        if sizes[0][update] != sizes[1][update]:
            findings.not_checked(
                f"{label}: update {update} reads {sizes[0][update]} samples on a rank, and {sizes[1][update]} with "
                f"these settings"
            )
            return
        if _differs(first, other, update, tolerance, label, findings):
            return


def _differs(
    first: RankRecording, other: RankRecording, update: int, tolerance: float, label: str, findings: Findings
) -> bool:
    one, two = first.updates[update], other.updates[update]
    if any(abs(a - b) > 1e-6 * max(abs(a), abs(b)) for a, b in zip(one.rates, two.rates, strict=False)):
        findings.add(
            "FAIL",
            "same.rate",
            one.step,
            f"update {update}: the learning rate is {one.rates[0]:.6g}, and {two.rates[0]:.6g} with {label}",
            "compute the schedule from the number of updates",
        )
        return True
    for kind, word in (("gradients", "gradient"), ("after", "value after the step")):
        values, others = getattr(one, kind), getattr(two, kind)
        pairs = {
            name: (value, others[name])
            for name, value in values.items()
            if value is not None and others.get(name) is not None and others[name].shape == value.shape
        }
        apart = {name: relative_difference(theirs, ours) for name, (ours, theirs) in pairs.items() if ours.numel()}
        worst = max(apart, key=lambda name: apart[name], default="")
        if not worst or apart[worst] <= 10 * tolerance:
            continue
        factor = constant_factor([(theirs, ours) for ours, theirs in pairs.values()]) if word == "gradient" else None
        reason = f": all are {factor:.4g} times as large" if factor is not None else ""
        place = one.backwards[-1] if word == "gradient" and one.backwards else one.step
        findings.add(
            "FAIL",
            f"same.{'gradient' if word == 'gradient' else 'parameters'}",
            place,
            f"update {update}: with {label} and the same samples, the {word} of {worst} differs by {apart[worst]:.2g} "
            f"of its norm{reason}",
            "let each sample weigh the same, whatever the number of batches of an update",
            also=(one.step,),
        )
        return True
    return False


def _rows_of_updates(rank: RankRecording) -> list[int]:
    """Samples that each update has read."""
    trained = rank.facts.get("trained", [])
    sizes = [0] * len(rank.updates)
    for (loader, _), batch, update in rank.batches:
        if loader in trained and update < len(sizes):
            sizes[update] += num_samples(batch)
    return sizes
