"""Checks that an evaluation counts every validation sample once, and weights means by their numbers of terms."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Collection, Iterator, Sequence
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
    OptimizerStep,
)
from everyrank.audit.evidence import EpochKey, Evidence, are_cut_off
from everyrank.audit.finding import Findings, short_location

__all__ = ["check_evaluation", "losses_by_evaluation"]

_MeanEvent = TypeVar("_MeanEvent", EvalLoss, EvalShare)
_PRINTED_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d{1,9})?")
# functions of Accelerate and Lightning that send random states and flags, not results
_CONTROL_FUNCTIONS = {"synchronize_rng_states", "__iter__", "reduce_boolean_decision", "has_len_all_ranks"}
_CONTROL_COLLECTIVES = ("barrier", "broadcast", "scatter")
_MIN_DIGITS = 4  # significant digits needed to identify a printed number
_SUBSET_SAMPLERS = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")  # may draw a part of the samples


def check_evaluation(evidence: Evidence, findings: Findings) -> None:
    """Check loaders under no_grad, the collectives after them, and the numbers that the script prints."""
    normalises = any(event.num_batch_norms for event in evidence.all_of(Forward))
    evaluation_forwards = [event for rank in evidence.ranks for event in evidence.evaluation_forwards(rank)]
    for event in evaluation_forwards:
        if event.is_training and (normalises or event.num_dropouts):
            findings.add(
                "WARN",
                "eval.mode",
                event.line,
                "the model is evaluated in train mode: dropout is active, and batch norm uses the batch's statistics",
                "call model.eval() before the evaluation and model.train() after it",
            )
    for event in evidence.all_of(EvalForward):
        if not event.is_training and event.num_dropouts:
            findings.add(
                "WARN",
                "eval.dropout",
                event.line,
                f"{event.num_dropouts} dropout calls ignore eval mode, so dropout is active in the evaluation",
                "use F.dropout(x, p, training=self.training), or nn.Dropout",
            )
    _check_training_mode(evidence, findings)
    evaluation_epochs = dict.fromkeys(
        key for rank in evidence.ranks for key, kind in evidence.epochs[rank].items() if kind == "eval"
    )
    if not evaluation_forwards:
        findings.add_unchecked("evaluation: the part of the script that ran has none")
    if evidence.world_size > 1 and evidence.sees_functions and not _check_one_rank_evaluates(evidence, findings):
        for key in evaluation_epochs:
            loaders = {rank: evidence.loaders(rank).get(key) for rank in evidence.ranks}
            known_loaders = {rank: loader for rank, loader in loaders.items() if loader is not None and loader.indices}
            is_training = any(evidence.epochs[rank].get(key) == "train" for rank in evidence.ranks)
            if len(known_loaders) == len(loaders) and not is_training:
                _check_shards(evidence, key, known_loaders, findings)
    _check_means(evidence, findings)


def _check_training_mode(evidence: Evidence, findings: Findings) -> None:
    """Find a model that trains in eval mode after an evaluation."""
    rank = evidence.ranks[0]
    has_dropout = any(forward.num_dropouts for forward in evidence.of(rank, ForwardEnd))
    training_lines: set[str] = set()  # other lines may call other models, which stay in eval mode
    for event in _forwards_with_backward(evidence, rank):
        if event.is_training:
            training_lines.add(event.line)
        elif event.line in training_lines and (event.num_batch_norms or has_dropout):
            findings.add(
                "FAIL",
                "train.mode",
                event.line,
                "the model trains in eval mode since the first evaluation: dropout is off, and batch norm does not "
                "update its statistics",
                "call model.train() after each evaluation",
            )
            return


def _forwards_with_backward(evidence: Evidence, rank: int) -> list[Forward]:
    """The last forward before each backward. Other forwards may be evaluations without `torch.no_grad`."""
    forwards: list[Forward] = []
    last_forward: Forward | None = None
    for event in evidence.events[rank]:
        if isinstance(event, Forward) and event.is_grad:
            last_forward = event
        elif isinstance(event, Backward) and last_forward is not None:
            forwards.append(last_forward)
            last_forward = None
    return forwards


def _check_one_rank_evaluates(evidence: Evidence, findings: Findings) -> bool:
    """Whether only some ranks evaluate; adds a finding if so."""
    evaluating_ranks = [rank for rank in evidence.ranks if any(not f.is_grad for f in evidence.of(rank, Forward))]
    if not evaluating_ranks or len(evaluating_ranks) == evidence.world_size:
        return False
    event = next(forward for forward in evidence.of(evaluating_ranks[0], Forward) if not forward.is_grad)
    risk = " through DistributedDataParallel, whose broadcast of buffers would hang" if event.broadcasts_buffers else ""
    ranks = ", ".join(map(str, evaluating_ranks))
    text = f"only rank {ranks} evaluates{risk}; the other ranks wait at their next collective"
    findings.add("NOTE", "eval.one-rank", event.line, text)
    return True


def _collectives_after(evidence: Evidence, key: EpochKey) -> list[CollectiveCall]:
    """Collectives that rank 0's script calls between the first batch of an evaluation and the next training step."""
    rank = evidence.ranks[0]
    collectives: list[CollectiveCall] = []
    has_started = False
    for event in evidence.events[rank]:
        if isinstance(event, LoaderBatch) and (event.loader, event.epoch) == key:
            has_started = True
        elif has_started and isinstance(event, Forward) and event.is_grad:
            break
        elif (
            has_started
            and isinstance(event, CollectiveCall)
            and event.phase == "script"
            and not event.op.startswith(_CONTROL_COLLECTIVES)
            and not _CONTROL_FUNCTIONS.intersection(event.library_calls)
        ):
            collectives.append(event)
    return collectives


def _check_shards(evidence: Evidence, key: EpochKey, loaders: dict[int, LoaderEpoch], findings: Findings) -> None:
    first = loaders[evidence.ranks[0]]
    sets = [set(loader.indices) for loader in loaders.values()]
    union, total = set[object]().union(*sets), sum(len(loader.indices) for loader in loaders.values())
    num_samples, line = len(union), first.line
    if are_cut_off(loaders.values()):
        findings.add_unchecked(
            f"which samples each rank evaluates at {line}: only the first of {first.num_indices} are known"
        )
        return
    collectives = _collectives_after(evidence, key)
    has_split = len({loader.subset for loader in loaders.values()}) > 1
    if has_split and collectives and first.sampler == "DistributedSampler":
        return  # data.split reports that the ranks split the dataset differently
    if sets[0] == sets[1]:
        if len(sets[0]) > 2 and len(sets[0]) == num_samples:
            findings.add("NOTE", "eval.everywhere", line, f"every rank evaluates all {num_samples} samples")
        return
    if not collectives:
        _report_local_result(evidence, key, first, f"{len(sets[0])} of {num_samples}", findings)
    elif _draws_subset(first):
        return  # each rank draws some of the samples
    elif total > num_samples and any(evidence.all_of(EvalSlice)):
        findings.add_unchecked("whether repeated samples are counted: the evaluation slices tensors itself")
    elif total > num_samples and not any("gather_for_metrics" in event.library_calls for event in collectives):
        gather_functions = sorted({event.library_calls[0] for event in collectives if event.library_calls})
        gathered_by = (
            f", by {', '.join(gather_functions)} at {short_location(collectives[0].line)}"
            if gather_functions and collectives[0].lines
            else ""
        )
        # the results of all samples may go into one dictionary, by the number of the sample
        is_gather_of_objects = any("object" in name for name in gather_functions)
        hint = "; ignore this if the script keeps one result of each sample" if is_gather_of_objects else ""
        findings.add(
            "WARN" if is_gather_of_objects else "FAIL",
            "eval.padded",
            line,
            f"{total - num_samples} of {num_samples} samples are evaluated twice (the sampler pads the ranks) and "
            f"counted twice{gathered_by}{hint}",
            "drop the samples beyond len(dataset), or evaluate Subset(data, range(rank, len(data), world_size))",
            tuple(collectives[0].lines[:1]),
        )
    _check_dropped(evidence, key, loaders, union, findings)


def _report_local_result(
    evidence: Evidence, key: EpochKey, loader: LoaderEpoch, share: str, findings: Findings
) -> None:
    forwards = _forwards_in(evidence, key)
    if forwards and all(event.is_prediction for event in forwards):
        return  # each rank makes predictions for its samples, and no number is computed from them
    is_lightning = any(event.is_lightning for event in forwards)
    findings.add(
        "FAIL",
        "eval.shard",
        loader.line,
        f"rank 0 evaluates {share} samples, and nothing is sent between the ranks before training continues, so its "
        "result covers only its shard",
        "use self.log(..., sync_dist=True)" if is_lightning else "all-reduce the sums and the counts, then divide",
        tuple(event.line for event in forwards[:1]),
    )


def _forwards_in(evidence: Evidence, key: EpochKey) -> list[EvalForward]:
    """The forwards of rank 0 on the batches of this evaluation."""
    forwards: list[EvalForward] = []
    last_epoch = None
    for event in evidence.events[evidence.ranks[0]]:
        if isinstance(event, LoaderBatch):
            last_epoch = (event.loader, event.epoch)
        elif isinstance(event, EvalForward) and last_epoch == key:
            forwards.append(event)
    return forwards


def _check_dropped(
    evidence: Evidence, key: EpochKey, loaders: dict[int, LoaderEpoch], union: set[object], findings: Findings
) -> None:
    """Find samples that no rank evaluates: in each loader's dataset, and in the whole dataset if it is not divided."""
    first = loaders[evidence.ranks[0]]
    length = first.length or 0
    if _draws_subset(first):
        return
    num_dropped = sum(
        (loader.length or 0) - loader.num_indices
        for loader in loaders.values()
        if loader.sampler in ("SequentialSampler", "RandomSampler") and loader.batch_sampler == "BatchSampler"
    )
    if first.subset is None and len(union) < length:
        other_samples: set[object] = set()
        for rank in evidence.ranks:
            for other_key, loader in evidence.loaders(rank).items():
                if other_key != key and loader.indices and _have_same_dataset(loader, first):
                    other_samples |= set(loader.indices)
        num_dropped = max(num_dropped, len(set(range(length)) - union - other_samples))
    if num_dropped > 0:
        text = f"{num_dropped} of {max(length, len(union) + num_dropped)} samples are not evaluated"
        findings.add("WARN", "eval.dropped", first.line, text, "use drop_last=False in the evaluation")


def _draws_subset(loader: LoaderEpoch) -> bool:
    """Whether the sampler draws only some of the samples, which may differ between ranks, to save time."""
    num_batches_left = ((loader.length or 0) - loader.num_indices) / max([*loader.sizes, 1])
    return (
        loader.sampler in _SUBSET_SAMPLERS
        and loader.batch_sampler == "BatchSampler"
        and (num_batches_left >= 1 or loader.sampler != "RandomSampler")  # less than a batch: by drop_last
    )


def _have_same_dataset(first: LoaderEpoch, second: LoaderEpoch) -> bool:
    """Whether two loaders seem to read the same dataset."""
    return (first.dataset, first.length, first.content) == (second.dataset, second.length, second.content)


# --- means


def _check_means(evidence: Evidence, findings: Findings) -> None:
    """Find a printed number that is the mean of the batches' means instead of the mean over all terms."""
    output = evidence.run.outputs[0] if evidence.run.outputs else ""
    groups: list[Sequence[Sequence[EvalLoss | EvalShare]]] = [
        group
        for group in (*_mean_groups(evidence, EvalLoss), *_mean_groups(evidence, EvalShare))
        if all(_are_of_different_batches(evidence, events) for events in group)
    ]
    # a number that has another explanation: another mean over terms, or a learning rate
    other_numbers = {rate for step in evidence.all_of(OptimizerStep) for rate in step.rates}
    for group in groups:
        other_numbers |= {unit * _mean_over_terms(group) for unit in _units(group)}
    reported_numbers: set[str] = set()  # two lines may compute the same accuracy
    for group in groups:
        _check_mean(output, group, other_numbers, findings, reported_numbers)


def losses_by_evaluation(evidence: Evidence, rank: int) -> list[list[EvalLoss]]:
    """The losses of each evaluation of a rank."""
    return _by_evaluation(evidence, rank, EvalLoss)


def _by_evaluation(evidence: Evidence, rank: int, kind: type[_MeanEvent]) -> list[list[_MeanEvent]]:
    """The events of this kind in each evaluation of a rank."""
    evaluations, evaluation = list[list[_MeanEvent]](), list[_MeanEvent]()
    for event in evidence.events[rank]:
        if isinstance(event, kind):
            evaluation.append(event)
        elif isinstance(event, Forward) and event.is_grad and evaluation:
            evaluations.append(evaluation)
            evaluation = []
    return [*evaluations, *([evaluation] if evaluation else [])]


def _by_line(
    by_rank: Sequence[Sequence[Sequence[_MeanEvent]]],
) -> Iterator[list[list[list[_MeanEvent]]]]:
    """The evaluations of each rank, with only the events of one line, for each line."""
    lines = dict.fromkeys(event.line for evaluations in by_rank for events in evaluations for event in events)
    for line in lines:
        yield [[[event for event in events if event.line == line] for events in evaluations] for evaluations in by_rank]


def _mean_groups(evidence: Evidence, kind: type[_MeanEvent]) -> Iterator[list[list[_MeanEvent]]]:
    """Yield events whose mean a script may print: of each evaluation of rank 0, and of each evaluation of all ranks."""
    for by_rank in _by_line([_by_evaluation(evidence, rank, kind) for rank in evidence.ranks]):
        yield from ([events] for events in by_rank[0])
        yield from (list(events) for events in zip(*by_rank, strict=False) if len(by_rank) > 1)


def _are_of_different_batches(evidence: Evidence, events: Sequence[EvalLoss | EvalShare]) -> bool:
    """Whether each batch has one of these events. Several after one forward may be of classes, as for a mean recall."""
    of_rank = evidence.events[events[0].rank] if events else []
    positions = [event.count for event in of_rank if isinstance(event, EvalForward | LoaderBatch)]
    batches = [bisect.bisect(positions, event.count) for event in events]
    return len(set(batches)) == len(batches)


def _units(group: Sequence[Sequence[EvalLoss | EvalShare]]) -> tuple[float, ...]:
    """The factors of a printed mean: a share may be printed in percent."""
    return (1.0, 100.0) if any(isinstance(event, EvalShare) for events in group for event in events) else (1.0,)


def _mean_over_terms(group: Sequence[Sequence[EvalLoss | EvalShare]]) -> float:
    events = [event for rank_events in group for event in rank_events]
    num_terms = sum(event.terms for event in events)
    return sum(event.value * event.terms for event in events) / num_terms if num_terms else math.nan


def _check_mean(
    output: str,
    by_rank: Sequence[Sequence[EvalLoss | EvalShare]],
    other_numbers: Collection[float],
    findings: Findings,
    reported_numbers: set[str],
) -> None:
    """Check the means of one evaluation on each rank. `reported_numbers` are printed numbers of earlier findings."""
    events = [event for rank_events in by_rank for event in rank_events]
    if len(events) < 2 or len({event.terms for event in events}) < 2 or not all(by_rank):
        return
    mean_of_means = sum(sum(event.value for event in rank_events) / len(rank_events) for rank_events in by_rank) / len(
        by_rank
    )
    mean_over_terms = _mean_over_terms(by_rank)
    for unit in _units(by_rank):
        expected, correct = unit * mean_of_means, unit * mean_over_terms
        printed = _printed_number(output, expected, correct)
        if (
            printed
            and printed not in reported_numbers
            and not any(_is_rounded(printed, number) for number in other_numbers)
            and not _printed_number(output, correct, expected, min_digits=1)
        ):
            reported_numbers.add(printed)
            term_counts = [event.terms for event in events]
            findings.add(
                "FAIL",
                "eval.mean-of-means",
                events[0].line,
                f"the script prints {printed}, the mean of {len(events)} means of {min(term_counts):g} to "
                f"{max(term_counts):g} terms; the mean over all terms is {correct:.6g}"
                f"{_relative_error(mean_of_means, mean_over_terms)}",
                "add up loss * number of terms, and divide by the number of all terms"
                if isinstance(events[0], EvalLoss)
                else "add up the numbers of ones and of all terms over batches and ranks, then divide",
            )
            return


def _relative_error(printed: float, correct: float) -> str:
    """The relative error of a printed number, as the end of a sentence: `, so it is 2.3% too large`."""
    return (
        f", so it is {100 * abs(printed / correct - 1):.2g}% too {'large' if printed > correct else 'small'}"
        if correct > 0
        else ""
    )


def _printed_number(output: str, expected: float, other: float, min_digits: int = _MIN_DIGITS) -> str:
    """The printed number that equals `expected`, if its digits distinguish it from `other`; else ""."""
    for text in _PRINTED_NUMBER.findall(output):
        digits = len(text.partition("e")[0].replace(".", "").replace("-", "").lstrip("0"))
        is_distinct = abs(expected - other) > (4 if digits >= _MIN_DIGITS else 2.002) * _half_digit(text)
        if digits >= min_digits and is_distinct and _is_rounded(text, expected):
            return text
    return ""


def _is_rounded(text: str, number: float) -> bool:
    """Whether a printed number is this number, rounded to its digits."""
    return abs(float(text) - number) <= 1.001 * _half_digit(text)


def _half_digit(text: str) -> float:
    """Half of the last digit of a printed number."""
    mantissa, _, exponent = text.partition("e")
    return float(f"0.5e{int(exponent or 0) - len(mantissa.partition('.')[2])}")
