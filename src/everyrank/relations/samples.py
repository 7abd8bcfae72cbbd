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
    "judge_equal_tensors",
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
_MIN_PERMUTATIONS = 2  # complete permutations (passes of a sampler) that a rank must have drawn to be judged
_BATCHES_AFTER = 2  # a pass is judged only if the first batches after the unused ones have one backward each
_SAME_DATA_SHARE = 0.9  # with a larger share of common samples, ranks read the same data, and audit's rules judge it


def judge_samples(recording: ScriptRecording, findings: Findings) -> None:
    """Compare the samples of ranks in each pass over a training loader.

    A pass in which a rank reads a sample twice (equal samples, draws with replacement) is not judged. Augmented samples
    have a different checksum each time they are read, so overlaps of them are not found.
    """
    if len(recording.ranks) < 2:
        return
    batch_size = max(_largest_batch_size(rank) for rank in recording.ranks)
    has_finding = _judge_passes([samples_of_passes(rank) for rank in recording.ranks], batch_size, findings)
    if not has_finding:
        _judge_passes([_samples_of_reads(rank) for rank in recording.ranks], _MAX_COMMON, findings)


def _judge_passes(
    passes: list[dict[tuple[Any, int], tuple[str, list[int]]]], max_common: int, findings: Findings
) -> bool:
    """Report the first pass in which ranks read more than `max_common` of the same samples, but not all of them."""
    for key, (location, first) in passes[0].items():
        others = [samples[key][1] for samples in passes[1:] if key in samples]
        if len(others) + 1 < len(passes) or any(len(set(rows)) < len(rows) for rows in (first, *others)):
            continue
        second = others[0]
        if any(len(rows) < _MIN_SAMPLES for rows in (first, second)):
            continue
        common = set(first) & set(second)
        smaller = min(len(first), len(second))
        if len(common) > max_common and len(common) < _SAME_DATA_SHARE * smaller:
            findings.add(
                "WARN",
                "data.shared-samples",
                location,
                f"pass {key[1]} over the training data: ranks 0 and 1 both read {len(common)} of {smaller} samples, by "
                "their content. The shards of the ranks overlap, and some samples are read by no rank",
                "shuffle with the same seed on all ranks before the data is divided by rank",
            )
            return True
    return False


def judge_equal_tensors(recording: ScriptRecording, findings: Findings) -> None:
    """Find a tensor that is equal on two ranks in each batch, although their samples differ.

    Both ranks drew it with the same random numbers. An example is a random mask of each sample, with a seed that
    depends only on the worker. Tensors that are equal in all batches, and single numbers of a sample, such as classes
    in a fixed order, do not count.
    """
    if len(recording.ranks) < 2:
        return
    loader_lines = recording.ranks[0].facts.get("loader_places", {})
    for key, pairs in _paired_batches(recording).items():
        tensors = [[list(tensors_of_batch(batch)) for batch in pair] for pair in pairs]
        if len(tensors) < _MIN_BATCHES or len({len(each) for pair in tensors for each in pair}) > 1:
            continue
        equal = [[_is_equal(a, b) for a, b in zip(*pair, strict=True)] for pair in tensors]
        for index, tensor in enumerate(tensors[0][0]):
            # an image without objects has no rows of boxes
            has_rows = tensor.dim() > 1 and len(tensor) > 0
            is_drawn = has_rows and tensor[0].numel() >= _MIN_NUMBERS and tensor.is_floating_point()
            if not is_drawn:
                continue
            changes = not _is_equal(tensor, tensors[1][0][index]) and not _is_equal(tensor[0], tensor[-1])
            is_equal_while_others_differ = all(row[index] and not all(row) for row in equal)
            if changes and is_equal_while_others_differ:
                findings.add(
                    "WARN",
                    "random.equal-draws",
                    loader_lines.get(key[0], ""),
                    f"tensor {index} of each batch is the same on ranks 0 and 1, although their samples differ: "
                    "the ranks draw it with the same random numbers",
                    "use a seed that depends on the rank, too: seed + rank * num_workers + worker_id",
                )
                return


def _paired_batches(recording: ScriptRecording) -> dict[tuple[int, int], list[tuple[Any, Any]]]:
    """The pairs of batches that ranks 0 and 1 read at the same position of each pass over a training loader."""
    passes: list[dict[tuple[int, int], list[Any]]] = []
    for rank in recording.ranks[:2]:
        training_loaders, batches_of_rank = rank.facts.get("training_loaders", []), dict[tuple[int, int], list[Any]]()
        for (loader, pass_index), batch, _ in rank.batches:
            if loader in training_loaders:
                batches_of_rank.setdefault((loader, pass_index), []).append(batch)
        passes.append(batches_of_rank)
    return {key: list(zip(first, passes[1].get(key, []), strict=False)) for key, first in passes[0].items()}


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and bool((first == second).all())


def judge_skipped_batches(rank: RankRecording, findings: Findings) -> None:
    """Find batches at the beginning of several passes of a loader that are read but not used for training."""
    passes: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for loader, pass_index, backwards, location, _ in rank.facts.get("read", []):
        passes.setdefault((loader, pass_index), []).append((backwards, location))
    ended = {tuple(key) for key in rank.facts.get("read_to_end", [])}
    skipped: dict[int, list[tuple[int, int, str]]] = {}
    for (loader, pass_index), read in passes.items():
        counts = [backwards for backwards, _ in read]
        backwards_at_end = passes.get((loader, pass_index + 1), [(rank.facts.get("backwards", 0), "")])[0][0]
        # Loaders that read ahead (Accelerate, Lightning) yield used batches before the first backward, too. So unused
        # batches are counted as batches minus backwards.
        num_unused = len(counts) - (backwards_at_end - counts[0])
        first = next((index for index, count in enumerate(counts) if count > counts[0]), 0)
        after = counts[first : first + _BATCHES_AFTER]
        # Only loops with one backward for each batch are judged: if the count rises by more, batches are read ahead.
        is_one_by_one = len(after) == _BATCHES_AFTER and all(b == a + 1 for a, b in itertools.pairwise(after))
        is_at_start = 0 < num_unused < first and counts[first] == counts[0] + 1
        if (loader, pass_index) in ended and is_one_by_one and is_at_start:
            skipped.setdefault(loader, []).append((pass_index, num_unused, read[0][1]))
    for skipped_of_loader in skipped.values():
        batch_counts = {num_unused for _, num_unused, _ in skipped_of_loader}
        if len(skipped_of_loader) < 2 or len(batch_counts) > 1:
            continue
        last_pass, num_unused, location = skipped_of_loader[-1]
        findings.add(
            "WARN",
            "data.untrained",
            location,
            f"passes {skipped_of_loader[0][0]} and {last_pass} over the training data: the first {num_unused} batches "
            f"of each are read, but not trained on",
            "after a resume, skip batches only in the first epoch",
        )
        return


def judge_uneven_passes(recording: ScriptRecording, findings: Findings) -> None:
    """Find ranks that draw a new permutation after different numbers of batches, in an endless pass over the data.

    Then the ranks are in different passes at the same update, and read each other's samples.
    """
    counts = [_batches_of_permutations(rank) for rank in recording.ranks]
    for key, (location, first) in counts[0].items():
        others = [rank_counts[key][1] for rank_counts in counts[1:] if key in rank_counts]
        if len(others) + 1 < len(counts) or any(
            len(set(each)) > 1 or len(each) < _MIN_PERMUTATIONS for each in (first, *others)
        ):
            continue
        batch_counts = [each[0] for each in (first, *others)]
        if len(set(batch_counts)) > 1:
            findings.add(
                "WARN",
                "data.uneven-passes",
                location,
                f"the ranks draw a new order after {', '.join(map(str, batch_counts))} batches: they are in different "
                f"passes over the data at the same update, and overlap",
                "drop the remainder before the data is divided by rank, so that all ranks have equally many batches",
            )
            return


def _batches_of_permutations(rank: RankRecording) -> dict[tuple[int, int], tuple[str, list[int]]]:
    """(line, number of batches of each permutation except the last) of each pass over a training loader of a rank."""
    passes: dict[tuple[int, int], Counter[int]] = {}
    for loader, pass_index, _, _, num_permutations in rank.facts.get("read", []):
        if loader in rank.facts.get("training_loaders", []):
            passes.setdefault((loader, pass_index), Counter())[num_permutations] += 1
    loader_lines = rank.facts.get("loader_places", {})
    return {key: (loader_lines.get(key[0], ""), list(counts.values())[:-1]) for key, counts in passes.items()}


def samples_of_passes(rank: RankRecording) -> dict[tuple[int, int], tuple[str, list[int]]]:
    """(line, checksums of samples) of each pass of a rank during which it trained."""
    passes: dict[tuple[int, int], list[tuple[Any, int]]] = {}
    for (loader, pass_index), batch, update in rank.batches:
        passes.setdefault((loader, pass_index), []).append((batch, update))
    loader_lines = rank.facts.get("loader_places", {})
    return {
        key: (loader_lines.get(key[0], ""), [checksum for batch, _ in read for checksum in samples_of_batch(batch)])
        for key, read in passes.items()
        if read[0][1] < read[-1][1]
    }


def _samples_of_reads(rank: RankRecording) -> dict[tuple[Any, int], tuple[str, list[int]]]:
    """Return (line, checksums of rows) by line and pass, for scripts that index a data tensor, as in `data[i:j]`."""
    loops = rank.facts.get("loops", [])
    starts = [update for location, _, update in loops if location == loops[0][0]]
    samples: dict[tuple[Any, int], tuple[str, list[int]]] = {}
    for (location, _, _), (rows, update) in rank.reads.items():
        pass_index = sum(start <= update for start in starts) - 1
        if pass_index >= 0 and rows.dim() > 1:
            samples.setdefault((location, pass_index), (location, []))[1].extend(samples_of_batch(rows))
    return samples


def _largest_batch_size(rank: RankRecording) -> int:
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
