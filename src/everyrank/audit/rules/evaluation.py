"""What an evaluation counts: every held-out sample once, and means by the number of terms."""

from __future__ import annotations

import re

from everyrank.audit.events import (
    Backward,
    Batch,
    Collective,
    EvalForward,
    EvalLoss,
    EvalSlice,
    Forward,
    ForwardEnd,
    LoaderEpoch,
)
from everyrank.audit.evidence import EpochKey, Evidence, are_cut_off
from everyrank.audit.finding import Findings, short_place

__all__ = ["check_evaluation", "loss_passes"]

_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
# random states, and whether to stop: Accelerate's and Lightning's, no results
_OTHER_SENDERS = {"synchronize_rng_states", "__iter__", "reduce_boolean_decision", "has_len_all_ranks"}
_SENDS_NO_RESULTS = ("barrier", "broadcast", "scatter")  # of other ranks
_DIGITS = 4  # of a printed number that are enough to know it again


def check_evaluation(evidence: Evidence, findings: Findings) -> None:
    """Loaders under no_grad, what is sent between the ranks afterwards, and the numbers that the script prints."""
    normalises = any(event.num_batch_norms for event in evidence.all_of(Forward))
    for event in evidence.all_of(EvalForward):
        if event.is_training and (normalises or event.num_dropouts):
            findings.add(
                "WARN",
                "eval.mode",
                event.line,
                "evaluates in training mode: dropout drops, and batch norm takes the statistics of this batch",
                "model.eval() before the evaluation, model.train() after it",
            )
    for event in evidence.all_of(EvalForward):
        if not event.is_training and event.num_dropouts:
            findings.add(
                "WARN",
                "eval.dropout",
                event.line,
                f"evaluates with {event.num_dropouts} dropouts that do not know of eval mode",
                "F.dropout(x, p, training=self.training), or nn.Dropout",
            )
    _check_training_mode(evidence, findings)
    evaluated = dict.fromkeys(
        key for rank in evidence.ranks for key, kind in evidence.epochs[rank].items() if kind == "eval"
    )
    if not any(not event.is_grad for event in evidence.all_of(Forward)):
        findings.not_checked("evaluation: the script did not come to one in the part that ran")
    if evidence.world_size > 1 and evidence.sees_functions and not _only_some_evaluate(evidence, findings):
        for key in evaluated:
            loaders = {rank: evidence.loaders(rank).get(key) for rank in evidence.ranks}
            found = {rank: loader for rank, loader in loaders.items() if loader is not None and loader.indices}
            if len(found) == len(loaders):
                _check_shards(evidence, key, found, findings)
    _check_means(evidence, findings)


def _check_training_mode(evidence: Evidence, findings: Findings) -> None:
    """A model that was trained in train mode, was evaluated, and goes on in eval mode."""
    rank = evidence.ranks[0]
    has_dropout = any(one.num_dropouts for one in evidence.of(rank, ForwardEnd))
    was_training = False
    for event in _trained_forwards(evidence, rank):
        was_training |= event.is_training
        if was_training and not event.is_training and (event.num_batch_norms or has_dropout):
            findings.add(
                "FAIL",
                "train.mode",
                event.line,
                "trains in eval mode since the first evaluation: no dropout, and batch norm learns nothing more",
                "model.train() after each evaluation",
            )
            return


def _trained_forwards(evidence: Evidence, rank: int) -> list[Forward]:
    """The last forward before each backward: others may be evaluations without `torch.no_grad`."""
    found: list[Forward] = []
    last: Forward | None = None
    for event in evidence.events[rank]:
        if isinstance(event, Forward) and event.is_grad:
            last = event
        elif isinstance(event, Backward) and last is not None:
            found.append(last)
            last = None
    return found


def _only_some_evaluate(evidence: Evidence, findings: Findings) -> bool:
    evaluating = [rank for rank in evidence.ranks if any(not one.is_grad for one in evidence.of(rank, Forward))]
    if not evaluating or len(evaluating) == evidence.world_size:
        return False
    event = next(one for one in evidence.of(evaluating[0], Forward) if not one.is_grad)
    risk = " through DistributedDataParallel, whose broadcast of buffers would hang" if event.broadcasts_buffers else ""
    text = f"only rank {', '.join(map(str, evaluating))} evaluates{risk}; the others wait at their next collective"
    findings.add("NOTE", "eval.one-rank", event.line, text)
    return True


def _sent_after(evidence: Evidence, key: EpochKey) -> list[Collective]:
    """Rank 0's own collectives between the first batch of this evaluation and the training that follows."""
    rank = evidence.ranks[0]
    found: list[Collective] = []
    is_on = False
    for event in evidence.events[rank]:
        if isinstance(event, Batch) and (event.loader, event.epoch) == key:
            is_on = True
        elif is_on and isinstance(event, Forward) and event.is_grad:
            break
        elif (
            is_on
            and isinstance(event, Collective)
            and event.phase == "script"
            and not event.op.startswith(_SENDS_NO_RESULTS)
            and not _OTHER_SENDERS.intersection(event.library_calls)
        ):
            found.append(event)
    return found


def _check_shards(evidence: Evidence, key: EpochKey, loaders: dict[int, LoaderEpoch], findings: Findings) -> None:
    first = loaders[evidence.ranks[0]]
    sets = [set(loader.indices) for loader in loaders.values()]
    union, total = set[object]().union(*sets), sum(len(loader.indices) for loader in loaders.values())
    num, line = len(union), first.line
    if are_cut_off(loaders.values()):
        findings.not_checked(
            f"which samples each rank evaluates at {line}: of {first.num_indices} only the first are known"
        )
        return
    sent = _sent_after(evidence, key)
    has_split = len({loader.subset for loader in loaders.values()}) > 1
    if has_split and sent and first.sampler == "DistributedSampler":
        return  # each rank has split the dataset differently: said of the training
    if sets[0] == sets[1]:
        if len(sets[0]) > 2:
            findings.add("NOTE", "eval.everywhere", line, f"every rank evaluates all {num} samples")
        return
    if not sent:
        _judge_unsent(evidence, key, first, f"{len(sets[0])} of {num}", findings)
    elif total > num and any(evidence.all_of(EvalSlice)):
        findings.not_checked("whether samples that were repeated are counted: the evaluation cuts tensors by hand")
    elif total > num and not any("gather_for_metrics" in event.library_calls for event in sent):
        calls = sorted({event.library_calls[0] for event in sent if event.library_calls})
        what = f", by {', '.join(calls)} at {short_place(sent[0].lines[0])}" if calls and sent[0].lines else ""
        findings.add(
            "FAIL",
            "eval.padded",
            line,
            f"{total - num} of {num} samples are evaluated twice (the sampler fills up the ranks) and counted "
            f"twice{what}",
            "drop what is beyond len(dataset), or give each rank Subset(data, range(rank, len(data), world_size))",
            tuple(sent[0].lines[:1]),
        )
    _check_dropped(evidence, key, loaders, union, findings)


def _judge_unsent(evidence: Evidence, key: EpochKey, loader: LoaderEpoch, share: str, findings: Findings) -> None:
    passed = _evaluated_in(evidence, key)
    if passed and all(event.is_prediction for event in passed):
        return  # each rank has its own part of the predictions: no number is made of them
    is_lightning = any(event.is_lightning for event in passed)
    findings.add(
        "FAIL",
        "eval.shard",
        loader.line,
        f"rank 0 evaluates {share} samples, and nothing is sent between the ranks before training goes on: its number "
        "is that of its shard",
        "self.log(..., sync_dist=True)" if is_lightning else "all-reduce the sums and the counts, then divide",
        tuple(event.line for event in passed[:1]),
    )


def _evaluated_in(evidence: Evidence, key: EpochKey) -> list[EvalForward]:
    """What rank 0's model was called on with the batches of this evaluation."""
    found: list[EvalForward] = []
    last = None
    for event in evidence.events[evidence.ranks[0]]:
        if isinstance(event, Batch):
            last = (event.loader, event.epoch)
        elif isinstance(event, EvalForward) and last == key:
            found.append(event)
    return found


def _check_dropped(
    evidence: Evidence, key: EpochKey, loaders: dict[int, LoaderEpoch], union: set[object], findings: Findings
) -> None:
    """Samples that no rank evaluates: of the loader's own dataset, and where it is not cut up, of the whole."""
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
        findings.add("WARN", "eval.dropped", first.line, text, "drop_last=False where it is counted")


# --- means


def _check_means(evidence: Evidence, findings: Findings) -> None:
    """A number that is printed, and is the mean of the batches' means rather than the mean over all terms."""
    output = evidence.run.outputs[0] if evidence.run.outputs else ""
    own = [loss_passes(evidence, rank) for rank in evidence.ranks]
    for events in own[0]:
        _check_mean(output, [events], findings)
    for of_all in zip(*own, strict=False) if len(own) > 1 else ():
        _check_mean(output, list(of_all), findings)


def loss_passes(evidence: Evidence, rank: int) -> list[list[EvalLoss]]:
    """The losses of each evaluation of a rank."""
    passes, current = list[list[EvalLoss]](), list[EvalLoss]()
    for event in evidence.events[rank]:
        if isinstance(event, EvalLoss):
            current.append(event)
        elif isinstance(event, Forward) and event.is_grad and current:
            passes.append(current)
            current = []
    return [*passes, *([current] if current else [])]


def _check_mean(output: str, parts: list[list[EvalLoss]], findings: Findings) -> None:
    """`parts` are the losses of one evaluation, by rank."""
    events = [event for part in parts for event in part]
    terms = sum(event.terms for event in events)
    if len(events) < 2 or len({event.terms for event in events}) < 2 or not terms:
        return
    of_means = sum(sum(event.value for event in part) / len(part) for part in parts) / len(parts)
    of_terms = sum(event.value * event.terms for event in events) / terms
    shown = _shown(output, of_means, of_terms)
    if shown and not _shown(output, of_terms, of_means):
        counts = [event.terms for event in events]
        findings.add(
            "FAIL",
            "eval.mean-of-means",
            events[0].line,
            f"the script prints {shown}, the mean of {len(events)} means of {min(counts):g} to {max(counts):g} terms; "
            f"the mean over all terms is {of_terms:.6g}",
            "add up loss * number of terms, and divide by the number of all terms",
        )


def _shown(output: str, wanted: float, other: float) -> str:
    """The printed number that is `wanted`, where it has enough digits to be told from `other`."""
    for text in _NUMBER.findall(output):
        mantissa, _, exponent = text.partition("e")
        last = 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        digits = len(mantissa.replace(".", "").replace("-", "").lstrip("0"))
        if digits >= _DIGITS and abs(float(text) - wanted) <= 1.001 * last and abs(wanted - other) > 4 * last:
            return text
    return ""
