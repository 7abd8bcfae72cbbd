"""Which rank reads which samples, in which order, exactly once.

slicing.py   arithmetic: cut a batch into micro-batches, then over ranks
order.py     the order of the samples: a function of seed, epoch and step alone
seeds.py     randomness as a function of (seed, epoch, sample)
stream.py    datasets that can only be gone through
fetch.py     data loader workers, pinned memory
uneven.py    streams of which each is read by one rank, as long as they last
uneven_updates.py   the updates over those, of which all ranks make as many
updates.py   the updates of a training, of known or unknown number
parts.py     which samples a rank reads for each micro-batch
loader.py    read them
"""

from everyrank.data.fetch import Batch
from everyrank.data.loader import batches_for_evaluation, batches_for_updates
from everyrank.data.order import (
    Epoch,
    Update,
    all_updates,
    lone_sample,
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
    "batches_for_evaluation",
    "batches_for_updates",
    "count_samples",
    "count_streams",
    "cut",
    "epoch_of",
    "find_streams",
    "is_stream",
    "is_uncounted",
    "lone_sample",
    "make_updates",
    "micro_batches",
    "planned_updates",
    "resume_problem",
    "samples_per_epoch",
    "updates_per_epoch",
]
