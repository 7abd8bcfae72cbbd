"""Data loading: each sample is read exactly once, in an order that does not depend on the ranks.

slicing.py   splits a batch into micro-batches, then over ranks
order.py     the sample order: a function of seed, epoch and step only
seeds.py     seeds as a function of (seed, epoch, sample)
stream.py    iterable datasets
fetch.py     data loader workers, pinned memory
uneven.py    streams of different length, each read by one rank
uneven_updates.py   updates over uneven streams: the same number on all ranks
updates.py   the updates of a training, of known or unknown number
parts.py     the samples of a rank in each micro-batch
loader.py    iterates over the batches of a rank
"""

from everyrank.data.fetch import Batch
from everyrank.data.loader import batches_for_evaluation, batches_for_updates
from everyrank.data.order import (
    Epoch,
    Update,
    all_updates,
    batch_of_one,
    samples_per_epoch,
    updates_per_epoch,
)
from everyrank.data.slicing import Slice, cut, micro_batches
from everyrank.data.stream import Streamed, count_samples, is_stream
from everyrank.data.uneven import UnevenStreams, count_streams, epoch_of, find_streams, is_uncounted
from everyrank.data.uneven_updates import OpenUpdates
from everyrank.data.updates import Updates, make_updates, planned_updates, resume_problem

__all__ = [
    "Batch",
    "Epoch",
    "OpenUpdates",
    "Slice",
    "Streamed",
    "UnevenStreams",
    "Update",
    "Updates",
    "all_updates",
    "batch_of_one",
    "batches_for_evaluation",
    "batches_for_updates",
    "count_samples",
    "count_streams",
    "cut",
    "epoch_of",
    "find_streams",
    "is_stream",
    "is_uncounted",
    "make_updates",
    "micro_batches",
    "planned_updates",
    "resume_problem",
    "samples_per_epoch",
    "updates_per_epoch",
]
