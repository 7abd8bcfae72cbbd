"""Evaluations: every validation sample counts once, and means are weighted by their numbers of terms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from everyrank.audit.events import (
    Backward,
    CollectiveCall,
    EvalForward,
    EvalLoss,
    EvalShare,
    EvalSlice,
    Forward,
    ForwardEnd,
    LoaderBatch,
    LoaderEpoch,
)
from everyrank.audit.evidence import EpochKey, Evidence, are_cut_off
from everyrank.audit.finding import Findings, short_place

__all__ = ["check_evaluation", "loss_passes"]

_Mean = TypeVar("_Mean", EvalLoss, EvalShare)
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
# functions of Accelerate and Lightning that send random states and flags, not results
_OTHER_SENDERS = {"synchronize_rng_states", "__iter__", "reduce_boolean_decision", "has_len_all_ranks"}
_SENDS_NO_RESULTS = ("barrier", "broadcast", "scatter")
_DIGITS = 4  # significant digits needed to identify a printed number


def check_evaluation(evidence: Evidence, findings: Findings) -> None:
    """Check loaders under no_grad, the collectives after them, and the numbers that the script prints."""
    normalises = any(event.num_batch_norms for event in evidence.all_of(Forward))
    for event in evidence.all_of(EvalForward):
        if event.is_training and (normalises or event.num_dropouts):
            findings.add(
                "WARN",
                "eval.mode",
                event.line,
                "evaluates in train mode: dropout is active, and batch norm uses the statistics of this batch",
                "model.eval() before the evaluation, model.train() after it",
            )
    for event in evidence.all_of(EvalForward):
        if not event.is_training and event.num_dropouts:
            findings.add(
                "WARN",
                "eval.dropout",
                event.line,
                f"evaluates with {event.num_dropouts} dropouts that ignore eval mode",
                "F.dropout(x, p, training=self.training), or nn.Dropout",
            )
    _check_training_mode(evidence, findings)
    evaluated = dict.fromkeys(
        key for rank in evidence.ranks for key, kind in evidence.epochs[rank].items() if kind == "eval"
    )
    if not any(not event.is_grad for event in evidence.all_of(Forward)):
        findings.not_checked("evaluation: the part of the script that ran has none")
    if evidence.world_size > 1 and evidence.sees_functions and not _only_some_evaluate(evidence, findings):
        for key in evaluated:
            loaders = {rank: evidence.loaders(rank).get(key) for rank in evidence.ranks}
            known = {rank: loader for rank, loader in loaders.items() if loader is not None and loader.indices}
            if len(known) == len(loaders):
                _check_shards(evidence, key, known, findings)
    _check_means(evidence, findings)


def _check_training_mode(evidence: Evidence, findings: Findings) -> None:
    """Find a model that trains in eval mode after an evaluation."""
    rank = evidence.ranks[0]
    has_dropout = any(forward.num_dropouts for forward in evidence.of(rank, ForwardEnd))
    was_training = False
    for event in _trained_forwards(evidence, rank):
        was_training |= event.is_training
        if was_training and not event.is_training and (event.num_batch_norms or has_dropout):
            findings.add(
                "FAIL",
                "train.mode",
                event.line,
                "trains in eval mode since the first evaluation: dropout is off, and batch norm keeps its statistics",
                "model.train() after each evaluation",
            )
            return


def _trained_forwards(evidence: Evidence, rank: int) -> list[Forward]:
    """The last forward before each backward. Others may be evaluations without `torch.no_grad`."""
    forwards: list[Forward] = []
    last: Forward | None = None
    for event in evidence.events[rank]:
        if isinstance(event, Forward) and event.is_grad:
            last = event
        elif isinstance(event, Backward) and last is not None:
            forwards.append(last)
            last = None
    return forwards


def _only_some_evaluate(evidence: Evidence, findings: Findings) -> bool:
    evaluating = [rank for rank in evidence.ranks if any(not f.is_grad for f in evidence.of(rank, Forward))]
    if not evaluating or len(evaluating) == evidence.world_size:
        return False
    event = next(forward for forward in evidence.of(evaluating[0], Forward) if not forward.is_grad)
    risk = " through DistributedDataParallel, whose broadcast of buffers would hang" if event.broadcasts_buffers else ""
    text = f"only rank {', '.join(map(str, evaluating))} evaluates{risk}; the other ranks wait at their next collective"
    findings.add("NOTE", "eval.one-rank", event.line, text)
    return True


def _sent_after(evidence: Evidence, key: EpochKey) -> list[CollectiveCall]:
    """Collectives that rank 0's script calls between the first batch of an evaluation and the next training step."""
    rank = evidence.ranks[0]
    sent: list[CollectiveCall] = []
    has_begun = False
    for event in evidence.events[rank]:
        if isinstance(event, LoaderBatch) and (event.loader, event.epoch) == key:
            has_begun = True
        elif has_begun and isinstance(event, Forward) and event.is_grad:
            break
        elif (
            has_begun
            and isinstance(event, CollectiveCall)
            and event.phase == "script"
            and not event.op.startswith(_SENDS_NO_RESULTS)
            and not _OTHER_SENDERS.intersection(event.library_calls)
        ):
            sent.append(event)
    return sent


def _check_shards(evidence: Evidence, key: EpochKey, loaders: dict[int, LoaderEpoch], findings: Findings) -> None:
    first = loaders[evidence.ranks[0]]
    sets = [set(loader.indices) for loader in loaders.values()]
    union, total = set[object]().union(*sets), sum(len(loader.indices) for loader in loaders.values())
    num, line = len(union), first.line
    if are_cut_off(loaders.values()):
        findings.not_checked(
            f"which samples each rank evaluates at {line}: only the first of {first.num_indices} are known"
        )
        return
    sent = _sent_after(evidence, key)
    has_split = len({loader.subset for loader in loaders.values()}) > 1
    if has_split and sent and first.sampler == "DistributedSampler":
        return  # data.split reports that the ranks split the dataset differently
    if sets[0] == sets[1]:
        if len(sets[0]) > 2:
            findings.add("NOTE", "eval.everywhere", line, f"every rank evaluates all {num} samples")
        return
    if not sent:
        _judge_unsent(evidence, key, first, f"{len(sets[0])} of {num}", findings)
    elif total > num and any(evidence.all_of(EvalSlice)):
        findings.not_checked("whether repeated samples are counted: the evaluation slices tensors itself")
    elif total > num and not any("gather_for_metrics" in event.library_calls for event in sent):
        calls = sorted({event.library_calls[0] for event in sent if event.library_calls})
        by = f", by {', '.join(calls)} at {short_place(sent[0].line)}" if calls and sent[0].lines else ""
        findings.add(
            "FAIL",
            "eval.padded",
            line,
            f"{total - num} of {num} samples are evaluated twice (the sampler pads the ranks) and counted twice{by}",
            "drop the samples beyond len(dataset), or give each rank Subset(data, range(rank, len(data), world_size))",
            tuple(sent[0].lines[:1]),
        )
    _check_dropped(evidence, key, loaders, union, findings)


def _judge_unsent(evidence: Evidence, key: EpochKey, loader: LoaderEpoch, share: str, findings: Findings) -> None:
    forwards = _evaluated_in(evidence, key)
    if forwards and all(event.is_prediction for event in forwards):
        return  # each rank has its own predictions, and no number is computed from them
    is_lightning = any(event.is_lightning for event in forwards)
    findings.add(
        "FAIL",
        "eval.shard",
        loader.line,
        f"rank 0 evaluates {share} samples, and nothing is sent between the ranks before training continues: its "
        "result is that of its shard",
        "self.log(..., sync_dist=True)" if is_lightning else "all-reduce the sums and the counts, then divide",
        tuple(event.line for event in forwards[:1]),
    )


def _evaluated_in(evidence: Evidence, key: EpochKey) -> list[EvalForward]:
    """The forwards of rank 0 on the batches of this evaluation."""
    forwards: list[EvalForward] = []
    last = None
    for event in evidence.events[evidence.ranks[0]]:
        if isinstance(event, LoaderBatch):
            last = (event.loader, event.epoch)
        elif isinstance(event, EvalForward) and last == key:
            forwards.append(event)
    return forwards


def _check_dropped(
    evidence: Evidence, key: EpochKey, loaders: dict[int, LoaderEpoch], union: set[object], findings: Findings
) -> None:
    """Find samples that no rank evaluates: of each loader's dataset, and of the whole where it is not divided."""
    first = loaders[evidence.ranks[0]]
    length = first.length or 0
    num = sum(
        (loader.length or 0) - loader.num_indices
        for loader in loaders.values()
        if loader.sampler in ("SequentialSampler", "RandomSampler") and loader.batch_sampler == "BatchSampler"
    )
    if first.subset is None and len(union) < length:
        others: set[object] = set()
        for rank in evidence.ranks:
            for other, loader in evidence.loaders(rank).items():
                if other != key and loader.indices:
                    others |= set(loader.indices)
        num = max(num, len(set(range(length)) - union - others))
    if num > 0:
        text = f"{num} of {max(length, len(union) + num)} samples are not evaluated"
        findings.add("WARN", "eval.dropped", first.line, text, "drop_last=False in the evaluation")


# --- means


def _check_means(evidence: Evidence, findings: Findings) -> None:
    """Find a printed number that is the mean of the batches' means, and not the mean over all terms."""
    output = evidence.run.outputs[0] if evidence.run.outputs else ""
    losses = [loss_passes(evidence, rank) for rank in evidence.ranks]
    shares = [_passes(evidence, rank, EvalShare) for rank in evidence.ranks]
    reported: set[str] = set()  # two lines may compute the same accuracy
    for passes in (losses, *(_passes_of(shares, line) for line in _lines_of(shares))):
        for events in passes[0]:
            _check_mean(output, [events], findings, reported)
        for of_all_ranks in zip(*passes, strict=False) if len(passes) > 1 else ():
            _check_mean(output, list(of_all_ranks), findings, reported)


def loss_passes(evidence: Evidence, rank: int) -> list[list[EvalLoss]]:
    """The losses of each evaluation of a rank."""
    return _passes(evidence, rank, EvalLoss)


def _passes(evidence: Evidence, rank: int, kind: type[_Mean]) -> list[list[_Mean]]:
    """The events of this kind in each evaluation of a rank."""
    passes, current = list[list[_Mean]](), list[_Mean]()
    for event in evidence.events[rank]:
        if isinstance(event, kind):
            current.append(event)
        elif isinstance(event, Forward) and event.is_grad and current:
            passes.append(current)
            current = []
    return [*passes, *([current] if current else [])]


def _lines_of(shares: Sequence[Sequence[Sequence[EvalShare]]]) -> list[str]:
    return list(dict.fromkeys(event.line for passes in shares for events in passes for event in events))


def _passes_of(shares: Sequence[Sequence[Sequence[EvalShare]]], line: str) -> list[list[list[EvalShare]]]:
    """Those of one line."""
    return [[[event for event in events if event.line == line] for events in passes] for passes in shares]


def _check_mean(
    output: str, by_rank: Sequence[Sequence[EvalLoss | EvalShare]], findings: Findings, reported: set[str]
) -> None:
    """Check one evaluation, given its means on each rank. `reported` are the printed numbers of earlier findings."""
    events = [event for of_rank in by_rank for event in of_rank]
    terms = sum(event.terms for event in events)
    if len(events) < 2 or len({event.terms for event in events}) < 2 or not all(by_rank):
        return
    of_means = sum(sum(event.value for event in of_rank) / len(of_rank) for of_rank in by_rank) / len(by_rank)
    of_terms = sum(event.value * event.terms for event in events) / terms
    for unit in (1.0, 100.0) if isinstance(events[0], EvalShare) else (1.0,):
        shown = _shown(output, unit * of_means, unit * of_terms)
        if shown and shown not in reported and not _shown(output, unit * of_terms, unit * of_means):
            reported.add(shown)
            counts = [event.terms for event in events]
            findings.add(
                "FAIL",
                "eval.mean-of-means",
                events[0].line,
                f"the script prints {shown}, the mean of {len(events)} means of {min(counts):g} to {max(counts):g} "
                f"terms; the mean over all terms is {unit * of_terms:.6g}{_error(of_means, of_terms)}",
                "add up loss * number of terms, and divide by the number of all terms"
                if isinstance(events[0], EvalLoss)
                else "add up the numbers of ones and of all terms over batches and ranks, then divide",
            )
            return


def _error(shown: float, right: float) -> str:
    """How far a number is from the right one: `, so it is 2.3% too large`."""
    return (
        f", so it is {100 * abs(shown / right - 1):.2g}% too {'large' if shown > right else 'small'}"
        if right > 0
        else ""
    )


def _shown(output: str, wanted: float, other: float) -> str:
    """The printed number that equals `wanted`, if its digits distinguish it from `other`; else ""."""
    for text in _NUMBER.findall(output):
        mantissa, _, exponent = text.partition("e")
        last = 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        digits = len(mantissa.replace(".", "").replace("-", "").lstrip("0"))
        if digits >= _DIGITS and abs(float(text) - wanted) <= 1.001 * last and abs(wanted - other) > 4 * last:
            return text
    return ""
