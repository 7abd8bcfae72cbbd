"""Checks that different settings give the same training, for example larger batches and fewer of them per update."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.audit.finding import Findings
from everyrank.relations.numbers import (
    constant_factor,
    first_different_rates,
    relative_difference,
    tolerance_of,
)
from everyrank.relations.samples import num_samples
from everyrank.rerun import Imposed, RankRecording, ScriptHost

__all__ = ["judge_same", "judge_settings"]


def judge_settings(
    host: ScriptHost,
    python_args: Sequence[str],
    processes: int,
    more_args: Sequence[str],
    findings: Findings,
    updates: int = 12,
) -> None:
    """Run the script without and with `more_args` on the same samples, and compare."""
    first = host.run_in_float64(processes, python_args=python_args, updates=updates, seconds=20.0)
    label = f"--same {' '.join(more_args)!r}"
    if first.failure:
        findings.add_unchecked(f"{label}: the script fails in the comparison ({first.failure})")
        return
    other = host.run(
        processes,
        python_args=[*python_args, *more_args],
        imposed=Imposed(recording=first, by_rows=True),
        float64=first.float64,
        updates=updates,
        num_detailed=updates,
        seconds=20.0,
    )
    refused = [reason for rank in (*first.ranks, *other.ranks) for reason, _ in rank.facts.get("refused", [])]
    if other.failure or refused:
        findings.add_unchecked(f"{label}: not compared, because {(other.failure or refused[0])}")
        return
    judge_same(first.ranks[0], other.ranks[0], label, findings)


def judge_same(first: RankRecording, other: RankRecording, label: str, findings: Findings) -> None:
    """Compare the updates of a rank under both settings, which have to read the same number of samples."""
    sizes = [_rows_of_updates(rank) for rank in (first, other)]
    count = min(len(first.updates), len(other.updates))
    if not count:
        findings.add_unchecked(f"{label}: no update was made")
        return
    if not any(sizes[0]):
        findings.add_unchecked(f"{label}: the batches do not come from a DataLoader")
        return
    if first.facts.get("batch_norms") and len(first.updates[0].losses) != len(other.updates[0].losses):
        findings.add_unchecked(f"{label}: batch norm uses the statistics of different batches")
        return
    tolerance = tolerance_of(list(first.updates[0].before.values()))
    if tolerance is None:
        findings.add_unchecked(f"{label}: the script computes in 16 bits")
        return
    for update in range(count):
        if sizes[0][update] != sizes[1][update]:
            findings.add_unchecked(
                f"{label}: update {update} reads {sizes[0][update]} samples on a rank, and {sizes[1][update]} with "
                f"these settings"
            )
            return
        if _differs(first, other, update, tolerance, label, findings):
            return


def _differs(
    first: RankRecording, other: RankRecording, update: int, tolerance: float, label: str, findings: Findings
) -> bool:
    first_update, other_update = first.updates[update], other.updates[update]
    rates = first_different_rates([first_update.rates, other_update.rates])
    if rates is not None:
        findings.add(
            "FAIL",
            "same.rate",
            first_update.step,
            f"update {update}: the learning rate is {rates[0]:.6g}, and {rates[1]:.6g} with {label}",
            "compute the schedule from the number of updates",
        )
        return True
    for kind, quantity in (("gradients", "gradient"), ("after", "value after the step")):
        values, others = getattr(first_update, kind), getattr(other_update, kind)
        pairs = {
            name: (value, others[name])
            for name, value in values.items()
            if value is not None and others.get(name) is not None and others[name].shape == value.shape
        }
        differences = {
            name: relative_difference(other_value, first_value)
            for name, (first_value, other_value) in pairs.items()
            if first_value.numel()
        }
        worst = max(differences, key=lambda name: differences[name], default="")
        if not worst or differences[worst] <= 10 * tolerance:
            continue
        factor = (
            constant_factor([(other_value, first_value) for first_value, other_value in pairs.values()])
            if quantity == "gradient"
            else None
        )
        reason = f": all are {factor:.4g} times as large" if factor is not None else ""
        location = (
            first_update.backwards[-1] if quantity == "gradient" and first_update.backwards else first_update.step
        )
        findings.add(
            "FAIL",
            f"same.{'gradient' if quantity == 'gradient' else 'parameters'}",
            location,
            f"update {update}: with {label} and the same samples, the {quantity} of {worst} differs by "
            f"{differences[worst]:.2g} of its norm{reason}",
            "give each sample the same weight, for any number of batches of an update",
            other_lines=(first_update.step,),
        )
        return True
    return False


def _rows_of_updates(rank: RankRecording) -> list[int]:
    """The number of samples that each update has read."""
    training_loaders = rank.facts.get("training_loaders", [])
    sizes = [0] * len(rank.updates)
    for (loader, _), batch, update in rank.batches:
        if loader in training_loaders and update < len(sizes):
            sizes[update] += num_samples(batch)
    return sizes
