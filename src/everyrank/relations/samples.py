"""Checks that ranks read different samples in an epoch, by their content: also for streams and custom samplers."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from everyrank.audit.finding import Findings
from everyrank.rerun import RankRecording, ScriptRecording

if TYPE_CHECKING:
    import torch

__all__ = [
    "checksums_of_tensors",
    "judge_equal_columns",
    "judge_samples",
    "judge_skipped_batches",
    "judge_uneven_passes",
    "num_samples",
    "samples_of_batch",
    "samples_of_passes",
    "tensors_of_batch",
]

_MIN_SAMPLES = 16  # of a rank, to judge it
_MAX_COMMON = 4  # samples that two ranks may have in common
_MIN_BATCHES, _MIN_NUMBERS = 3, 4  # batches, and numbers of a sample, to judge whether ranks draw the same numbers
_MIN_ORDERS = 2  # complete orders of a rank, to judge it
_BATCHES_AFTER = 2  # batches with one backward each, to judge the batches before them
_SAME_DATA_SHARE = 0.9  # with a larger share of common samples, ranks read the same data, and audit's rules judge it


def judge_samples(many: ScriptRecording, findings: Findings) -> None:
    """Compare the samples of ranks in each pass over a training loader.

    Datasets with equal samples, draws with replacement and augmented samples cannot be judged: there a single rank
    reads a sample twice, or no sample is read again in a later pass.
    """
    if len(many.ranks) < 2:
        return
    batch = max(_largest_batch(rank) for rank in many.ranks)
    has_finding = _judge_passes([samples_of_passes(rank) for rank in many.ranks], batch, findings)
    if not has_finding:
        _judge_passes([_samples_of_reads(rank) for rank in many.ranks], _MAX_COMMON, findings)


def _judge_passes(
    passes: list[dict[tuple[Any, int], tuple[str, list[int]]]], most_common: int, findings: Findings
) -> bool:
    """Report the first pass in which ranks read more than `most_common` of the same samples, but not all of them."""
    for key, (location, first) in passes[0].items():
        others = [samples[key][1] for samples in passes[1:] if key in samples]
        if len(others) + 1 < len(passes) or any(len(set(rows)) < len(rows) for rows in (first, *others)):
            continue
        second = others[0]
        if any(len(rows) < _MIN_SAMPLES for rows in (first, second)):
            continue
        common = set(first) & set(second)
        smaller = min(len(first), len(second))
        if len(common) > most_common and len(common) < _SAME_DATA_SHARE * smaller:
            findings.add(
                "WARN",
                "data.shared-samples",
                location,
                f"pass {key[1]} over the training data: ranks 0 and 1 both read {len(common)} of {smaller} samples, by "
                f"their content, so the shards of the ranks overlap, and no rank reads some other samples",
                "shuffle with the same seed on all ranks before the data is divided by rank",
            )
            return True
    return False


def judge_equal_columns(many: ScriptRecording, findings: Findings) -> None:
    """Find a tensor in each batch that is equal on two ranks although their samples differ: it has the same draws.

    For example a random mask of each sample, with a seed that only depends on the worker. Tensors that are equal in all
    batches, and single numbers of a sample, such as classes in a fixed order, do not count.
    """
    if len(many.ranks) < 2:
        return
    places = many.ranks[0].facts.get("loader_places", {})
    for key, pairs in _batches_at_once(many).items():
        columns = [[list(tensors_of_batch(batch)) for batch in pair] for pair in pairs]
        if len(columns) < _MIN_BATCHES or len({len(each) for pair in columns for each in pair}) > 1:
            continue
        equal = [[_is_equal(a, b) for a, b in zip(*pair, strict=True)] for pair in columns]
        for number, column in enumerate(columns[0][0]):
            # an image without objects has no rows of boxes
            has_rows = column.dim() > 1 and len(column) > 0
            is_drawn = has_rows and column[0].numel() >= _MIN_NUMBERS and column.is_floating_point()
            if not is_drawn:
                continue
            changes = not _is_equal(column, columns[1][0][number]) and not _is_equal(column[0], column[-1])
            is_only_equal_column = all(row[number] and not all(row) for row in equal)
            if changes and is_only_equal_column:
                findings.add(
                    "WARN",
                    "random.equal-draws",
                    places.get(key[0], ""),
                    f"tensor {number} of each batch is the same on ranks 0 and 1, although their samples differ: "
                    "the ranks draw it with the same random numbers",
                    "use a seed that depends on the rank, too: seed + rank * num_workers + worker_id",
                )
                return


def _batches_at_once(many: ScriptRecording) -> dict[tuple[int, int], list[tuple[Any, Any]]]:
    """The pairs of batches that ranks 0 and 1 read at the same position of each pass over a training loader."""
    passes: list[dict[tuple[int, int], list[Any]]] = []
    for rank in many.ranks[:2]:
        training_loaders, batches_of_rank = rank.facts.get("training_loaders", []), dict[tuple[int, int], list[Any]]()
        for (loader, number), batch, _ in rank.batches:
            if loader in training_loaders:
                batches_of_rank.setdefault((loader, number), []).append(batch)
        passes.append(batches_of_rank)
    return {key: list(zip(first, passes[1].get(key, []), strict=False)) for key, first in passes[0].items()}


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and bool((first == second).all())


def judge_skipped_batches(rank: RankRecording, findings: Findings) -> None:
    """Find batches at the beginning of several passes of a loader that are read but not used for training."""
    passes: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for loader, number, backwards, location, _ in rank.facts.get("read", []):
        passes.setdefault((loader, number), []).append((backwards, location))
    ended = {tuple(key) for key in rank.facts.get("read_to_end", [])}
    skipped: dict[int, list[tuple[int, int, str]]] = {}
    for (loader, number), read in passes.items():
        counts = [backwards for backwards, _ in read]
        after_pass = passes.get((loader, number + 1), [(rank.facts.get("backwards", 0), "")])[0][0]
        # loaders that read ahead, as those of Accelerate and Lightning, also give batches before the first backward
        num_unused = len(counts) - (after_pass - counts[0])
        first = next((index for index, count in enumerate(counts) if count > counts[0]), 0)
        after = counts[first : first + _BATCHES_AFTER]
        # the batch before the first backward was used; if backwards come in groups, several batches are read ahead
        is_one_by_one = len(after) == _BATCHES_AFTER and all(b == a + 1 for a, b in itertools.pairwise(after))
        is_at_start = 0 < num_unused < first and counts[first] == counts[0] + 1
        if (loader, number) in ended and is_one_by_one and is_at_start:
            skipped.setdefault(loader, []).append((number, num_unused, read[0][1]))
    for skipped_of_loader in skipped.values():
        numbers = {batches for _, batches, _ in skipped_of_loader}
        if len(skipped_of_loader) < 2 or len(numbers) > 1:
            continue
        number, batches, location = skipped_of_loader[-1]
        findings.add(
            "WARN",
            "data.untrained",
            location,
            f"passes {skipped_of_loader[0][0]} and {number} over the training data: the first {batches} batches of "
            f"each are read, but not trained on",
            "after a resume, skip batches only in the first epoch",
        )
        return


def judge_uneven_passes(many: ScriptRecording, findings: Findings) -> None:
    """Find ranks that draw a new order after different numbers of batches, in an endless pass over the data.

    Then the ranks are in different passes at the same update, and read each other's samples.
    """
    counts = [_batches_of_orders(rank) for rank in many.ranks]
    for key, (location, first) in counts[0].items():
        others = [rank_counts[key][1] for rank_counts in counts[1:] if key in rank_counts]
        if len(others) + 1 < len(counts) or any(
            len(set(each)) > 1 or len(each) < _MIN_ORDERS for each in (first, *others)
        ):
            continue
        numbers = [each[0] for each in (first, *others)]
        if len(set(numbers)) > 1:
            findings.add(
                "WARN",
                "data.uneven-passes",
                location,
                f"the ranks draw a new order after {', '.join(map(str, numbers))} batches: they are in different "
                f"passes over the data at the same update, and overlap",
                "drop the remainder before the data is divided by rank, so that all ranks have equally many batches",
            )
            return


def _batches_of_orders(rank: RankRecording) -> dict[tuple[int, int], tuple[str, list[int]]]:
    """(line, number of batches of each order except the last) of each pass over a training loader of a rank."""
    passes: dict[tuple[int, int], Counter[int]] = {}
    for loader, number, _, _, orders in rank.facts.get("read", []):
        if loader in rank.facts.get("training_loaders", []):
            passes.setdefault((loader, number), Counter())[orders] += 1
    places = rank.facts.get("loader_places", {})
    return {key: (places.get(key[0], ""), list(counts.values())[:-1]) for key, counts in passes.items()}


def samples_of_passes(rank: RankRecording) -> dict[tuple[int, int], tuple[str, list[int]]]:
    """(line, checksums of samples) of each pass of a rank during which it trained."""
    passes: dict[tuple[int, int], list[tuple[Any, int]]] = {}
    for (loader, number), batch, update in rank.batches:
        passes.setdefault((loader, number), []).append((batch, update))
    places = rank.facts.get("loader_places", {})
    return {
        key: (places.get(key[0], ""), [checksum for batch, _ in read for checksum in samples_of_batch(batch)])
        for key, read in passes.items()
        if read[0][1] < read[-1][1]
    }


def _samples_of_reads(rank: RankRecording) -> dict[tuple[Any, int], tuple[str, list[int]]]:
    """(line, checksums of samples) of the rows that each line takes from a tensor, for each training pass."""
    loops = rank.facts.get("loops", [])
    starts = [update for location, _, update in loops if location == loops[0][0]]
    samples: dict[tuple[Any, int], tuple[str, list[int]]] = {}
    for (location, _, _), (rows, update) in rank.reads.items():
        number = sum(start <= update for start in starts) - 1
        if number >= 0 and rows.dim() > 1:
            samples.setdefault((location, number), (location, []))[1].extend(samples_of_batch(rows))
    return samples


def _largest_batch(rank: RankRecording) -> int:
    return max((len(_rows(batch)) for _, batch, _ in rank.batches), default=0)


def num_samples(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor with dimensions."""
    return next((len(each) for each in tensors_of_batch(batch) if each.dim()), 0)


def samples_of_batch(batch: Any) -> list[int]:
    """A checksum of each sample of a batch, from the first tensor with several numbers for each sample."""
    return [_checksum(row) for row in _rows(batch)]


def checksums_of_tensors(batch: Any) -> list[int]:
    """A checksum of each tensor of a batch, also of those with a single number for each sample."""
    return [_checksum(each) for each in tensors_of_batch(batch)]


def _checksum(tensor: torch.Tensor) -> int:
    import torch

    # as bytes, because numpy has no bfloat16
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _rows(batch: Any) -> Any:
    """The first tensor of a batch with several numbers for each sample; () if there is none."""
    return next((each for each in tensors_of_batch(batch) if each.dim() > 1), ())


def tensors_of_batch(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a batch in order, also from lists, tuples and the values of dicts."""
    import torch

    if isinstance(value, dict):
        for each in value.values():
            yield from tensors_of_batch(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of_batch(each)
    elif isinstance(value, torch.Tensor):
        yield value
