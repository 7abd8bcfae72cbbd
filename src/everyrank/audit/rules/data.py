"""Finds samples that several ranks read, that no rank reads, and epochs in the same order."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

from everyrank.audit.events import CollectiveCall, ForwardEnd, LoaderBatch, LoaderEpoch
from everyrank.audit.evidence import Evidence, are_cut_off
from everyrank.audit.finding import Findings, short_location

__all__ = ["check_data"]

_MIN_COMMON_SHARE = 0.9  # of the samples
# parts of the names of samplers that repeat samples: repeated augmentation is that of DeiT and timm
_REPEATING_SAMPLERS = ("Weighted", "RASampler", "RepeatAug")
_MAX_SHORT_EPOCH = 8  # samples: too few to judge their order


def check_data(evidence: Evidence, findings: Findings) -> None:
    """Compare the loaders and samplers of the ranks, then the rows that reach the model from any source."""
    ranks = evidence.ranks
    epochs_by_loader: dict[int, list[LoaderEpoch]] = defaultdict(list)
    passes_by_rank: dict[int, dict[tuple[int, int], LoaderEpoch]] = {}
    for rank in ranks:
        events, numbers = evidence.loaders(rank), evidence.pass_numbers(rank)
        passes_by_rank[rank] = {(key[0], number): events[key] for key, number in numbers.items()}
    kinds = evidence.epochs[ranks[0]]
    trained = [key for key, each in passes_by_rank[ranks[0]].items() if kinds.get((each.loader, each.epoch)) == "train"]
    for key in trained:
        if all(key in passes_by_rank[rank] for rank in ranks):
            loaders = {rank: passes_by_rank[rank][key] for rank in ranks}
            is_common_dataset = _check_dataset(evidence, loaders, findings)
            if loaders[ranks[0]].indices:
                if is_common_dataset:
                    _check_indices(evidence, loaders, findings)
                epochs_by_loader[key[0]].append(loaders[ranks[0]])
            _check_lost_sampler(loaders[ranks[0]], findings)
    for epochs in epochs_by_loader.values():
        _check_epochs(evidence, epochs, findings)
    if not trained:
        findings.add_unchecked(
            "samplers: the script trains without a DataLoader; the rows that reach the model are compared"
        )
    elif not epochs_by_loader:
        findings.add_unchecked("the order of epochs: the data is a stream; the rows that reach the model are compared")
    elif all(len(epochs) < 2 for epochs in epochs_by_loader.values()):
        reason = "the script ended in its first" if len(epochs_by_loader) == 1 else "each loader is used for one epoch"
        findings.add_unchecked(f"the order of a second epoch: {reason}")
    _check_rows(evidence, findings)


def _check_lost_sampler(loader: LoaderEpoch, findings: Findings) -> None:
    if loader.lost_sampler:
        kind, line = loader.lost_sampler
        findings.add(
            "WARN",
            "data.sampler-lost",
            next((made for made in loader.made_at if made), loader.line),
            f"the {kind} of a loader of this dataset at {short_location(line)} was replaced before it was read. "
            f"{loader.sampler} draws the samples instead, without the weights or the order of the {kind}",
            f"keep the {kind}, and divide the samples that it draws over the ranks",
            (line, loader.line),
        )


def _check_dataset(evidence: Evidence, loaders: Mapping[int, LoaderEpoch], findings: Findings) -> bool:
    """Whether all ranks have the same dataset; adds a finding if not."""
    line = next(iter(loaders.values())).line
    are_common = len({loader.subset for loader in loaders.values()}) == 1 or _are_disjoint(loaders)
    if not are_common:
        findings.add(
            "FAIL",
            "data.split",
            line,
            "the ranks split the dataset differently: training samples of one rank are validation samples of another",
            "split with a generator of a fixed seed: random_split(data, sizes, torch.Generator().manual_seed(0))",
            (*_sampler_lines(loaders), *evidence.unequal_shuffles),
        )
    elif len({loader.content for loader in loaders.values()} - {None}) > 1 and _are_divided(loaders):
        findings.add(
            "WARN",
            "data.content",
            line,
            "the sampler divides one dataset over the ranks, but sample 0 is different on each rank: the data is "
            "generated without a common seed, or files are listed in a different order",
            "generate the data with a fixed seed, sort lists of files, and let the sampler divide the samples",
            evidence.unequal_shuffles,
        )
    return are_common


def _have_different_datasets(loaders: Mapping[int, LoaderEpoch]) -> bool:
    """Whether the ranks have different datasets, so that equal indices are different samples."""
    seeded = [loader.seeded for loader in loaders.values()]
    return None not in seeded and len(set(seeded)) > 1


def _samples_by_rank(loaders: Mapping[int, LoaderEpoch]) -> dict[int, list[object]]:
    """What each rank reads: checksums of its samples, or their indices in a dataset that all ranks have; else {}.

    Indices are used for a dataset that has equal samples.
    """
    by_content = {rank: list[object](loader.samples) for rank, loader in loaders.items()}
    are_known = all(
        len(by_content[rank]) == len(loader.indices) and len(set(by_content[rank])) == len(set(loader.indices))
        for rank, loader in loaders.items()
    )
    if are_known:
        return by_content
    return (
        {}
        if _have_different_datasets(loaders)
        else {rank: list[object](loader.indices) for rank, loader in loaders.items()}
    )


def _are_divided(loaders: Mapping[int, LoaderEpoch]) -> bool:
    """Whether the samplers give each rank different indices, as if all ranks had the same dataset."""
    orders = [set(loader.indices or ()) for loader in loaders.values()]
    first, second = [*orders, set[object](), set[object]()][:2]
    return bool(first and second) and 2 * len(first & second) < min(len(first), len(second))


def _are_disjoint(loaders: Mapping[int, LoaderEpoch]) -> bool:
    """Whether no index is read by two ranks, because the script divides the dataset by `Subset`."""
    orders = [set(loader.indices or ()) for loader in loaders.values()]
    return sum(map(len, orders)) == len(set[object]().union(*orders))


def _check_indices(evidence: Evidence, loaders: Mapping[int, LoaderEpoch], findings: Findings) -> None:
    """Compare the indices that the samplers of the ranks draw in one epoch."""
    first_loader = next(iter(loaders.values()))
    if len(loaders) < 2 or any(name in first_loader.sampler for name in _REPEATING_SAMPLERS):
        return
    samples = _samples_by_rank(loaders)
    if not samples:
        return
    orders = list(samples.values())
    if are_cut_off(loaders.values()) and orders[0] != orders[1]:
        findings.add_unchecked(
            f"which samples each rank reads at {first_loader.line}: only the first {len(orders[0])} are known"
        )
        return
    indices = {rank: _first_pass(samples[rank], loader.length, len(loaders)) for rank, loader in loaders.items()}
    if any(len(set(order)) < len(order) for order in indices.values()):
        return  # drawn with replacement
    first_set, second_set, *_ = sets = [set(order) for order in indices.values()]
    num_common = len(first_set & second_set)
    num_read, total = len(first_set.union(*sets)), sum(map(len, indices.values()))
    global_batch = sum(max(loader.sizes) for loader in loaders.values())
    line, length = first_loader.line, first_loader.length or 0
    if len(first_set) > 1 and num_common >= _MIN_COMMON_SHARE * len(
        first_set | second_set
    ):  # the last batch may be dropped
        if not (length <= global_batch and first_loader.batch_sampler == "BatchSamplerShard"):
            _check_same(evidence, loaders, indices, num_read, findings)
    elif total - num_read > global_batch and length > global_batch and not findings.has("data.content"):
        findings.add(
            "WARN" if _have_different_datasets(loaders) else "FAIL",
            "data.overlap",
            line,
            f"{total - num_read} of {total} samples of an epoch are read more than once, {num_common} of them by "
            "ranks 0 and 1",
            "let a single sampler divide the samples over the ranks without overlap",
            _sampler_lines(loaders),
        )
    elif total > num_read and not _have_different_datasets(loaders):
        text = (
            f"{total - num_read} of {length} samples are read twice in an epoch, so that all ranks get the same number"
        )
        findings.add("NOTE", "data.padded", line, text)
    if not _have_different_datasets(loaders):
        _check_unread(loaders, num_read, global_batch, findings)


def _check_same(
    evidence: Evidence,
    loaders: Mapping[int, LoaderEpoch],
    indices: Mapping[int, list[object]],
    num_read: int,
    findings: Findings,
) -> None:
    """Judge ranks that all read all samples: a mistake unless layers are split or the script divides each batch."""
    first_loader = next(iter(loaders.values()))
    if evidence.is_split:
        text = "every rank reads the same samples, as it must when layers are split"
        findings.add("NOTE", "data.same", first_loader.line, text)
    elif _script_divides_batches(evidence, loaders):
        text = "every rank reads the same samples, and feeds the model only its share of each batch"
        findings.add("NOTE", "data.same", first_loader.line, text)
    elif _are_ensemble_members(evidence):
        text = "every rank reads the same samples, draws its own random numbers for them, and shares its outputs"
        findings.add("NOTE", "data.same", first_loader.line, text)
    else:
        is_same_order = all(order == indices[evidence.ranks[0]] for order in indices.values())
        what_is_read = "the same samples in the same order" if is_same_order else "all samples, in its own order"
        total = sum(map(len, indices.values()))
        findings.add(
            "FAIL",
            "data.same",
            first_loader.line,
            f"every rank reads {what_is_read}: {num_read} samples are read {total} times an epoch "
            f"({first_loader.sampler})",
            "divide them: DataLoader(data, sampler=DistributedSampler(data)), and sampler.set_epoch(epoch)",
            _sampler_lines(loaders),
        )


def _first_pass(samples: list[object], length: int | None, num_ranks: int) -> list[object]:
    """The samples of the first pass over the data: a custom sampler may make several passes in an epoch."""
    has_repeats = len(set(samples)) < len(samples)
    return samples[: (length or len(samples)) // num_ranks] if has_repeats else samples


def _are_ensemble_members(evidence: Evidence) -> bool:
    """Whether the ranks compute different things from the same samples on purpose, as the members of an ensemble do.

    Their models draw random numbers that are not dropout, and the outputs of all ranks go into one loss.
    """
    forwards = evidence.training_forwards
    first, second = (
        {(event.update, event.micro): event for event in evidence.of(rank, ForwardEnd)} for rank in evidence.ranks[:2]
    )
    same_keys = [
        key
        for key in first.keys()
        & second.keys()
        & forwards[evidence.ranks[0]].keys()
        & forwards[evidence.ranks[1]].keys()
        if first[key].drawn_at and not first[key].num_dropouts and _feed_same_samples(evidence, key)
    ]
    return (
        bool(same_keys)
        and evidence.has_joint_loss
        and all(first[key].output != second[key].output for key in same_keys)
    )


def _feed_same_samples(evidence: Evidence, key: tuple[int, int]) -> bool:
    first, second = (evidence.training_forwards[rank][key] for rank in evidence.ranks[:2])
    return first.row_checksums == second.row_checksums and first.other_inputs == second.other_inputs


def _script_divides_batches(evidence: Evidence, loaders: Mapping[int, LoaderEpoch]) -> bool:
    """Whether the script divides each batch itself: the model gets fewer samples, or each rank gets different ones."""
    forwards = [evidence.training_forwards[rank] for rank in loaders]
    largest = max(max(loader.sizes) for loader in loaders.values())
    updates = sorted({update for rank_forwards in forwards for update, _ in rank_forwards})
    by_update = [
        [[forward for key, forward in rank_forwards.items() if key[0] == update] for update in updates]
        for rank_forwards in forwards
    ]
    if all(
        0 < sum(forward.num_samples for forward in update) < largest
        for rank_forwards in by_update
        for update in rank_forwards
    ):
        return True
    orders = [loader.indices for loader in loaders.values()]
    rows = [
        [{row for forward in update for row in forward.row_checksums} for update in rank_forwards]
        for rank_forwards in by_update[:2]
    ]
    return (
        orders[0] == orders[1]
        and bool(updates)
        and not any(first_rank_rows & second_rank_rows for first_rank_rows, second_rank_rows in zip(*rows, strict=True))
    )


def _sampler_lines(loaders: Mapping[int, LoaderEpoch]) -> tuple[str, ...]:
    """The lines that construct the sampler and the Subset."""
    return tuple(line for line in next(iter(loaders.values())).made_at if line)


def _check_unread(loaders: Mapping[int, LoaderEpoch], num_read: int, global_batch: int, findings: Findings) -> None:
    first_loader = next(iter(loaders.values()))
    length = first_loader.length or 0
    if not are_cut_off(loaders.values()) and length - num_read > global_batch:
        findings.add(
            "WARN"
            if first_loader.sampler == "DistributedSampler" and length == first_loader.sampled_length
            else "NOTE",
            "data.skipped",
            first_loader.line,
            f"{length - num_read} of {length} samples are never read in an epoch",
            "pass the whole dataset to the sampler, and the number of ranks that read it",
            _sampler_lines(loaders),
        )


def _check_epochs(evidence: Evidence, epochs: list[LoaderEpoch], findings: Findings) -> None:
    """Find a second epoch with the same order as the first."""
    epochs.sort(key=lambda loader: loader.epoch)
    if len(epochs) < 2 or len(epochs[0].indices) <= _MAX_SHORT_EPOCH or epochs[0].indices != epochs[1].indices:
        return
    if epochs[0].content is not None and _give_different_samples(evidence, *epochs[:2]):
        return  # the dataset returns different samples for the same indices in each epoch
    first_order = epochs[0].indices
    may_be_intended = first_order == sorted(first_order, key=_numbers_first) or epochs[1].shuffles is False
    if may_be_intended or epochs[1].sampler_epoch is None:
        findings.add(
            "WARN" if may_be_intended else "FAIL",
            "data.epoch",
            epochs[1].line,
            "the second epoch has the order of the first: the data is not shuffled",
            "use DistributedSampler(data), which shuffles, and call sampler.set_epoch(epoch)",
            (epochs[1].used_at,),
        )
    else:
        findings.add(
            "FAIL",
            "data.epoch",
            epochs[1].used_at,
            "the second epoch has the order of the first: set_epoch is not called, or always with the same number",
            "call loader.sampler.set_epoch(epoch) before the loop over the loader",
            (epochs[1].line,),
        )


def _numbers_first(index: int | str) -> tuple[int, str]:
    """A key to sort indices, of which some may be texts."""
    return (0, index) if isinstance(index, str) else (index, "")


def _give_different_samples(evidence: Evidence, *epochs: LoaderEpoch) -> bool:
    """Whether the batches of two epochs have different samples for the same indices, without random numbers."""
    rows: list[dict[int, set[str]]] = []
    for epoch in epochs:
        batches = [batch for batch in evidence.of(evidence.ranks[0], LoaderBatch) if batch.epoch == epoch.epoch]
        rows.append({batch.number: set(batch.row_checksums) for batch in batches if batch.loader == epoch.loader})
    first, second = rows
    common = [number for number in first if number in second and first[number] and second[number]]
    return 2 * sum(first[number] != second[number] for number in common) > len(common)


# --- rows that reach the model


def _check_rows(evidence: Evidence, findings: Findings) -> None:
    forwards = evidence.training_forwards
    first_rank_forwards = forwards[evidence.ranks[0]]
    common_steps = [key for key in first_rank_forwards if all(key in forwards[rank] for rank in evidence.ranks)]
    updates_with_collectives = {event.update for event in evidence.all_of(CollectiveCall)}
    # leave out the updates in which each rank works by itself, for example to prepare something
    common_steps = [key for key in common_steps if key[0] in updates_with_collectives] or common_steps
    if evidence.world_size > 1 and not findings.has("data.same"):
        rows = {rank: [set(forwards[rank][key].row_checksums) for key in common_steps] for rank in evidence.ranks[:2]}
        _compare_ranks(evidence, common_steps, list(rows.values()), findings)
    for rank in evidence.ranks:
        _check_repeats(evidence, rank, findings)


def _compare_ranks(
    evidence: Evidence, common_steps: list[tuple[int, int]], rows: list[list[set[str]]], findings: Findings
) -> None:
    """Compare the rows of two ranks, step by step and over all steps."""
    first_rows, second_rows = rows
    if len(set[str]().union(*first_rows, *second_rows)) == 1:
        findings.add_unchecked("the rows that ranks feed the model: all samples of this dataset are equal")
        return
    if any(_only_other_inputs_differ(evidence, key) for key in common_steps):
        return  # the rows are not samples; for example, they are nodes of a graph, and other inputs select from them
    first_rank_forwards = evidence.training_forwards[evidence.ranks[0]]
    same_steps = [
        key
        for key, first_step_rows, second_step_rows in zip(common_steps, first_rows, second_rows, strict=True)
        if first_step_rows and 2 * len(first_step_rows & second_step_rows) >= len(first_step_rows)
    ]
    if len(same_steps) >= 2 and 2 * len(same_steps) >= len(common_steps):
        if _are_ensemble_members(evidence):
            text = f"in {len(same_steps)} of {len(common_steps)} steps the ranks feed the model the same samples"
            text += (
                ", draw their own random numbers for them, and share their outputs, as the members of an ensemble do"
            )
            findings.add("NOTE", "data.rows", first_rank_forwards[same_steps[0]].line, text)
            return
        has_more_groups = len(evidence.groups) > 2
        level = "NOTE" if evidence.is_split else "WARN" if has_more_groups else "FAIL"
        text = f"in {len(same_steps)} of {len(common_steps)} steps the ranks feed the model the same samples"
        text += "; only tensor or context parallelism needs that" if level != "FAIL" else ""
        fix = "divide each batch over the ranks, or draw it with a seed that depends on the rank"
        fix = fix if level != "NOTE" else ""
        forward_ends = {(event.update, event.micro): event for event in evidence.of(evidence.ranks[0], ForwardEnd)}
        drawn_at = forward_ends[same_steps[0]].drawn_at if same_steps[0] in forward_ends else []
        if drawn_at and evidence.has_joint_loss and not evidence.is_split:
            text += f", and draw the same random numbers for them at {short_location(drawn_at[0])}"
            fix = "let the noise depend on the rank, or divide the samples over the ranks"
        seeds = evidence.equal_seeds(("torch", "numpy", "random"))
        findings.add(
            level,
            "data.rows",
            first_rank_forwards[same_steps[0]].line,
            text,
            fix,
            (*drawn_at, *_loader_lines(evidence), *seeds),
        )
        return
    if evidence.calls_by_rpc:
        return  # an RPC server may run the samples of its trainers again
    samples_of_ranks = [_before_first_repeat(rank_rows) for rank_rows in rows]
    num_smaller, num_shared = min(map(len, samples_of_ranks)), len(samples_of_ranks[0] & samples_of_ranks[1])
    trained_epochs = {epoch for epoch, kind in evidence.epochs[evidence.ranks[0]].items() if kind == "train"}
    if (
        num_smaller > 16
        and 5 * num_shared > num_smaller
        and len(trained_epochs) < 2
        and not _has_data_failure(findings)
    ):
        findings.add(
            "FAIL",
            "data.rows",
            first_rank_forwards[common_steps[0]].line,
            f"{num_shared} of {num_smaller} samples that rank 0 feeds the model are also fed by rank 1, at a different "
            "step, because the ranks draw from the same random stream with an offset",
            "divide the samples over the ranks, or draw them with a seed that depends on the rank",
            _loader_lines(evidence),
        )


def _only_other_inputs_differ(evidence: Evidence, key: tuple[int, int]) -> bool:
    """Whether both ranks feed the same rows and different other inputs, for example nodes of one graph and masks."""
    first, second = (evidence.training_forwards[rank][key] for rank in evidence.ranks[:2])
    return (
        bool(first.row_checksums)
        and first.row_checksums == second.row_checksums
        and first.other_inputs != second.other_inputs
    )


def _loader_lines(evidence: Evidence) -> tuple[str, ...]:
    """The lines that construct the training loaders, and that loop over them."""
    loaders = evidence.loaders(evidence.ranks[0])
    trained = [key for key, kind in evidence.epochs[evidence.ranks[0]].items() if kind == "train"]
    return tuple(
        dict.fromkeys(line for key in trained if key in loaders for line in (loaders[key].line, loaders[key].used_at))
    )


def _before_first_repeat(rows: list[set[str]]) -> set[str]:
    """The samples that a rank feeds before it repeats one, because training on a single batch is not a mistake."""
    samples = set[str]()
    for step_rows in rows:
        if samples & step_rows:
            break
        samples |= step_rows
    return samples


def _has_data_failure(findings: Findings) -> bool:
    return any(finding.level == "FAIL" and finding.rule.startswith("data.") for finding in findings)


def _check_repeats(evidence: Evidence, rank: int, findings: Findings) -> None:
    """Find a stream that yields the samples of the previous step again within an epoch."""
    streams = [loader for loader in evidence.of(rank, LoaderEpoch) if loader.num_batches is None]
    workers = max((loader.workers for loader in streams), default=0)
    if workers < 2:
        return
    epochs = {event.update: (event.loader, event.epoch) for event in evidence.of(rank, LoaderBatch)}
    forwards = sorted(evidence.training_forwards[rank].items())
    steps = [(epochs.get(key[0]), event.row_checksums) for key, event in forwards]
    pairs = [(before[1], after[1]) for before, after in itertools.pairwise(steps) if before[0] == after[0]]
    repeated = sum(before == after != [] for before, after in pairs)
    if repeated and 3 * repeated >= len(pairs):
        findings.add(
            "FAIL",
            "data.repeat",
            streams[0].line,
            f"rank {rank} feeds the model the samples of the previous step again, in {repeated} of {len(pairs)} steps: "
            f"each of {workers} workers reads the whole stream",
            "divide the stream over ranks and workers with torch.utils.data.get_worker_info()",
            (streams[0].used_at, next(iter(evidence.training_forwards[rank].values())).line),
        )
