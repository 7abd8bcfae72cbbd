"""Which samples the ranks read: the same ones, several times, or in the same order in each epoch."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

from everyrank.audit.events import CollectiveCall, ForwardEnd, LoaderBatch, LoaderEpoch
from everyrank.audit.evidence import Evidence, are_cut_off
from everyrank.audit.finding import Findings, short_place

__all__ = ["check_data"]

_MOST = 0.9  # of the samples
_FEW = 8  # samples: too few to judge an order by


def check_data(evidence: Evidence, findings: Findings) -> None:
    """Compare loaders and samplers, then the rows that reach the model from any source."""
    ranks = evidence.ranks
    orders: dict[int, list[LoaderEpoch]] = defaultdict(list)
    by_rank = {rank: evidence.loaders(rank) for rank in ranks}
    trained = [key for key, kind in evidence.epochs[ranks[0]].items() if kind == "train"]
    for key in trained:
        if all(key in by_rank[rank] for rank in ranks):
            loaders = {rank: by_rank[rank][key] for rank in ranks}
            is_common = _check_dataset(evidence, loaders, findings)
            if loaders[ranks[0]].indices:
                if is_common:
                    _check_indices(evidence, loaders, findings)
                orders[key[0]].append(loaders[ranks[0]])
            _check_lost_sampler(loaders[ranks[0]], findings)
    for epochs in orders.values():
        _check_epochs(evidence, epochs, findings)
    if not trained:
        findings.not_checked(
            "samplers: the script trains without a DataLoader; the rows that reach the model are compared"
        )
    elif not orders:
        findings.not_checked("the order of epochs: the data is a stream; the rows that reach the model are compared")
    elif all(len(epochs) < 2 for epochs in orders.values()):
        why = "the script ended in its first" if len(orders) == 1 else "each loader is used for one epoch"
        findings.not_checked(f"the order of a second epoch: {why}")
    _check_rows(evidence, findings)


def _check_lost_sampler(loader: LoaderEpoch, findings: Findings) -> None:
    if loader.lost_sampler:
        kind, line = loader.lost_sampler
        findings.add(
            "WARN",
            "data.sampler-lost",
            next((made for made in loader.made_at if made), loader.line),
            f"the {kind} that a loader of this dataset got at {short_place(line)} was dropped before it was read; "
            f"{loader.sampler} draws the samples, without the weights or the order of the other one",
            "divide what the first sampler draws over the ranks, and read it",
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
            (*_made_at(loaders), *evidence.unequal_shuffles),
        )
    elif len({loader.content for loader in loaders.values()} - {None}) > 1 and _are_divided(loaders):
        findings.add(
            "WARN",
            "data.content",
            line,
            "the sampler divides one dataset among the ranks, but its sample 0 is different on each: the data is made "
            "without a common seed, or files are listed in a different order",
            "make the data from a fixed seed, sort lists of files, and let the sampler divide the samples",
            evidence.unequal_shuffles,
        )
    return are_common


def _have_own_data(loaders: Mapping[int, LoaderEpoch]) -> bool:
    """Whether each rank has its own dataset: then equal indices are different samples."""
    seeded = [loader.seeded for loader in loaders.values()]
    return None not in seeded and len(set(seeded)) > 1


def _samples(loaders: Mapping[int, LoaderEpoch]) -> dict[int, list[object]]:
    """What each rank reads: a checksum of each sample, or its index in a dataset that all ranks have; else {}.

    A dataset with equal samples is told by its indices.
    """
    by_content = {rank: list[object](loader.samples) for rank, loader in loaders.items()}
    are_known = all(
        len(by_content[rank]) == len(loader.indices) and len(set(by_content[rank])) == len(set(loader.indices))
        for rank, loader in loaders.items()
    )
    if are_known:
        return by_content
    return {} if _have_own_data(loaders) else {rank: list[object](loader.indices) for rank, loader in loaders.items()}


def _are_divided(loaders: Mapping[int, LoaderEpoch]) -> bool:
    """Whether the samplers give each rank different indices, as if all ranks had the same dataset."""
    orders = [set(loader.indices or ()) for loader in loaders.values()]
    first, second = [*orders, set[object](), set[object]()][:2]
    return bool(first and second) and 2 * len(first & second) < min(len(first), len(second))


def _are_disjoint(loaders: Mapping[int, LoaderEpoch]) -> bool:
    """Whether no index is read by two ranks: the script divides the dataset by `Subset`."""
    orders = [set(loader.indices or ()) for loader in loaders.values()]
    return sum(map(len, orders)) == len(set[object]().union(*orders))


def _check_indices(evidence: Evidence, loaders: Mapping[int, LoaderEpoch], findings: Findings) -> None:
    """Compare the indices that the samplers of the ranks give in one epoch."""
    first = next(iter(loaders.values()))
    if len(loaders) < 2 or "Weighted" in first.sampler:
        return
    samples = _samples(loaders)
    if not samples:
        return
    orders = list(samples.values())
    if are_cut_off(loaders.values()) and orders[0] != orders[1]:
        findings.not_checked(
            f"which samples each rank reads at {first.line}: only the first {len(orders[0])} are known"
        )
        return
    indices = {rank: _one_pass(samples[rank], loader.length, len(loaders)) for rank, loader in loaders.items()}
    if any(len(set(order)) < len(order) for order in indices.values()):
        return  # drawn with replacement
    first_set, second_set, *_ = sets = [set(order) for order in indices.values()]
    num_common = len(first_set & second_set)
    num_read, total = len(first_set.union(*sets)), sum(map(len, indices.values()))
    batch = sum(max(loader.sizes) for loader in loaders.values())
    line, length = first.line, first.length or 0
    if len(first_set) > 1 and num_common >= _MOST * len(first_set | second_set):  # the last batch may be dropped
        if not (length <= batch and first.batch_sampler == "BatchSamplerShard"):
            _check_same(evidence, loaders, indices, num_read, findings)
    elif total - num_read > batch and length > batch and not findings.has("data.content"):
        findings.add(
            "WARN" if _have_own_data(loaders) else "FAIL",
            "data.overlap",
            line,
            f"{total - num_read} of {total} samples of an epoch are read more than once, {num_common} of them by "
            "ranks 0 and 1",
            "let one sampler divide the samples over the ranks, without overlap",
            _made_at(loaders),
        )
    elif total > num_read and not _have_own_data(loaders):
        text = f"{total - num_read} of {length} samples are read twice an epoch, to give all ranks the same number"
        findings.add("NOTE", "data.padded", line, text)
    if not _have_own_data(loaders):
        _check_skipped(loaders, num_read, batch, findings)


def _check_same(
    evidence: Evidence,
    loaders: Mapping[int, LoaderEpoch],
    indices: Mapping[int, list[object]],
    num_read: int,
    findings: Findings,
) -> None:
    """All ranks read all samples: a mistake unless layers are split or the script divides each batch itself."""
    first = next(iter(loaders.values()))
    if evidence.is_split:
        text = "every rank reads the same samples, as it must when layers are split"
        findings.add("NOTE", "data.same", first.line, text)
    elif _divides_itself(evidence, loaders):
        text = "every rank reads the same samples, and feeds the model its share of each batch"
        findings.add("NOTE", "data.same", first.line, text)
    elif _are_members(evidence):
        text = "every rank reads the same samples, draws its own random numbers for them, and shares its outputs"
        findings.add("NOTE", "data.same", first.line, text)
    else:
        in_order = all(order == indices[evidence.ranks[0]] for order in indices.values())
        which = "the same samples in the same order" if in_order else "all samples, in its own order"
        total = sum(map(len, indices.values()))
        findings.add(
            "FAIL",
            "data.same",
            first.line,
            f"every rank reads {which}: {num_read} samples are read {total} times an epoch ({first.sampler})",
            "divide them: DataLoader(data, sampler=DistributedSampler(data)), and sampler.set_epoch(epoch)",
            _made_at(loaders),
        )


def _one_pass(samples: list[object], length: int | None, num_ranks: int) -> list[object]:
    """The samples of one pass over the data: a custom sampler may make several passes in an epoch."""
    has_repeats = len(set(samples)) < len(samples)
    return samples[: (length or len(samples)) // num_ranks] if has_repeats else samples


def _are_members(evidence: Evidence) -> bool:
    """Whether the ranks compute different things from the same samples on purpose, as the members of an ensemble do.

    Their models draw random numbers that are not dropout, and one loss has the outputs of all ranks.
    """
    forwards = evidence.training_forwards
    first, second = (
        {(event.update, event.micro): event for event in evidence.of(rank, ForwardEnd)} for rank in evidence.ranks[:2]
    )
    same = [
        key
        for key in first.keys()
        & second.keys()
        & forwards[evidence.ranks[0]].keys()
        & forwards[evidence.ranks[1]].keys()
        if first[key].drawn_at and not first[key].num_dropouts and _feeds_same(evidence, key)
    ]
    return bool(same) and evidence.has_joint_loss and all(first[key].output != second[key].output for key in same)


def _feeds_same(evidence: Evidence, key: tuple[int, int]) -> bool:
    first, second = (evidence.training_forwards[rank][key] for rank in evidence.ranks[:2])
    return first.row_checksums == second.row_checksums and first.other_inputs == second.other_inputs


def _divides_itself(evidence: Evidence, loaders: Mapping[int, LoaderEpoch]) -> bool:
    """Whether the script divides each batch: the model gets fewer samples, or each rank different ones."""
    forwards = [evidence.training_forwards[rank] for rank in loaders]
    largest = max(max(loader.sizes) for loader in loaders.values())
    updates = sorted({update for of_rank in forwards for update, _ in of_rank})
    by_update = [
        [[forward for key, forward in of_rank.items() if key[0] == update] for update in updates]
        for of_rank in forwards
    ]
    if all(0 < sum(f.num_samples for f in update) < largest for of_rank in by_update for update in of_rank):
        return True
    orders = [loader.indices for loader in loaders.values()]
    rows = [[{row for f in update for row in f.row_checksums} for update in of_rank] for of_rank in by_update[:2]]
    return orders[0] == orders[1] and bool(updates) and not any(a & b for a, b in zip(*rows, strict=True))


def _made_at(loaders: Mapping[int, LoaderEpoch]) -> tuple[str, ...]:
    """The lines that make the sampler and the Subset."""
    return tuple(line for line in next(iter(loaders.values())).made_at if line)


def _check_skipped(loaders: Mapping[int, LoaderEpoch], num_read: int, batch: int, findings: Findings) -> None:
    first = next(iter(loaders.values()))
    length = first.length or 0
    if not are_cut_off(loaders.values()) and length - num_read > batch:
        findings.add(
            "WARN" if first.sampler == "DistributedSampler" and length == first.sampled_length else "NOTE",
            "data.skipped",
            first.line,
            f"{length - num_read} of {length} samples are never read in an epoch",
            "give the sampler the whole dataset, and the number of ranks that read it",
            _made_at(loaders),
        )


def _check_epochs(evidence: Evidence, epochs: list[LoaderEpoch], findings: Findings) -> None:
    """Find a second epoch with the order of the first."""
    epochs.sort(key=lambda loader: loader.epoch)
    if len(epochs) < 2 or len(epochs[0].indices) <= _FEW or epochs[0].indices != epochs[1].indices:
        return
    if epochs[0].content is not None and _read_differently(evidence, *epochs[:2]):
        return  # the dataset gives different samples for the same indices in each epoch
    order = epochs[0].indices
    is_meant = order == sorted(order) or epochs[1].shuffles is False
    if is_meant or epochs[1].sampler_epoch is None:
        findings.add(
            "WARN" if is_meant else "FAIL",
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
            "before the loop over the loader: loader.sampler.set_epoch(epoch)",
            (epochs[1].line,),
        )


def _read_differently(evidence: Evidence, *epochs: LoaderEpoch) -> bool:
    """Whether the batches of two epochs hold different samples for the same indices, without random numbers."""
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
    first = forwards[evidence.ranks[0]]
    common = [key for key in first if all(key in forwards[rank] for rank in evidence.ranks)]
    together = {event.update for event in evidence.all_of(CollectiveCall)}
    common = [key for key in common if key[0] in together] or common  # without what each rank does by itself before
    if evidence.world_size > 1 and not findings.has("data.same"):
        rows = {rank: [set(forwards[rank][key].row_checksums) for key in common] for rank in evidence.ranks[:2]}
        _compare_ranks(evidence, common, list(rows.values()), findings)
    for rank in evidence.ranks:
        _check_repeats(evidence, rank, findings)


def _compare_ranks(
    evidence: Evidence, common: list[tuple[int, int]], rows: list[list[set[str]]], findings: Findings
) -> None:
    """Compare the rows of two ranks, step by step and over all steps."""
    first_rows, second_rows = rows
    if len(set[str]().union(*first_rows, *second_rows)) == 1:
        findings.not_checked("the rows that ranks feed the model: all samples of this dataset are equal")
        return
    if any(_differs_otherwise(evidence, key) for key in common):
        return  # the rows are not samples, such as nodes of a graph from which other inputs select
    first = evidence.training_forwards[evidence.ranks[0]]
    same = [key for key, a, b in zip(common, first_rows, second_rows, strict=True) if a and 2 * len(a & b) >= len(a)]
    if len(same) >= 2 and 2 * len(same) >= len(common):
        if _are_members(evidence):
            text = f"in {len(same)} of {len(common)} steps the ranks feed the model the same samples"
            text += (
                ", draw their own random numbers for them, and share their outputs, as the members of an ensemble do"
            )
            findings.add("NOTE", "data.rows", first[same[0]].line, text)
            return
        has_more_groups = len(evidence.groups) > 2
        level = "NOTE" if evidence.is_split else "WARN" if has_more_groups else "FAIL"
        text = f"in {len(same)} of {len(common)} steps the ranks feed the model the same samples"
        text += "; only tensor or context parallelism needs that" if level != "FAIL" else ""
        fix = "divide each batch over the ranks, or draw it with a seed that depends on the rank"
        fix = fix if level != "NOTE" else ""
        ends = {(event.update, event.micro): event for event in evidence.of(evidence.ranks[0], ForwardEnd)}
        drawn_at = ends[same[0]].drawn_at if same[0] in ends else []
        if drawn_at and evidence.has_joint_loss and not evidence.is_split:
            text += f", and draw the same random numbers for them at {short_place(drawn_at[0])}"
            fix = "let the noise depend on the rank, or divide the samples over the ranks"
        seeds = evidence.equal_seeds(("torch", "numpy", "random"))
        findings.add(level, "data.rows", first[same[0]].line, text, fix, (*drawn_at, *_read_at(evidence), *seeds))
        return
    if evidence.calls_by_rpc:
        return  # a server may run the samples of its trainers again
    pools = [_until_repeated(of_rank) for of_rank in rows]
    smaller, both = min(map(len, pools)), len(pools[0] & pools[1])
    trained = {epoch for epoch, kind in evidence.epochs[evidence.ranks[0]].items() if kind == "train"}
    if smaller > 16 and 5 * both > smaller and len(trained) < 2 and not _has_failed(findings):
        findings.add(
            "FAIL",
            "data.rows",
            first[common[0]].line,
            f"{both} of {smaller} samples that rank 0 feeds the model are also fed by rank 1, at a different step",
            "divide the samples over the ranks: these draw from the same random stream, shifted",
            _read_at(evidence),
        )


def _differs_otherwise(evidence: Evidence, key: tuple[int, int]) -> bool:
    """Whether both ranks feed the same rows, and different other inputs, as for the nodes of a graph."""
    first, second = (evidence.training_forwards[rank][key] for rank in evidence.ranks[:2])
    return (
        bool(first.row_checksums)
        and first.row_checksums == second.row_checksums
        and first.other_inputs != second.other_inputs
    )


def _read_at(evidence: Evidence) -> tuple[str, ...]:
    """The lines that make the training loaders, and that loop over them."""
    loaders = evidence.loaders(evidence.ranks[0])
    trained = [key for key, kind in evidence.epochs[evidence.ranks[0]].items() if kind == "train"]
    return tuple(
        dict.fromkeys(line for key in trained if key in loaders for line in (loaders[key].line, loaders[key].used_at))
    )


def _until_repeated(rows: list[set[str]]) -> set[str]:
    """The samples that a rank feeds before it repeats one: training on a single batch is not a mistake."""
    pool = set[str]()
    for step_rows in rows:
        if pool & step_rows:
            break
        pool |= step_rows
    return pool


def _has_failed(findings: Findings) -> bool:
    return any(finding.level == "FAIL" and finding.rule.startswith("data.") for finding in findings)


def _check_repeats(evidence: Evidence, rank: int, findings: Findings) -> None:
    """Find a stream that gives the samples of the previous step again, within an epoch."""
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
            "divide the stream over ranks and workers, by torch.utils.data.get_worker_info()",
            (streams[0].used_at, next(iter(evidence.training_forwards[rank].values())).line),
        )
