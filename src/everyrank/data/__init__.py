"""Which rank reads which samples, in which order, exactly once.

slicing.py   arithmetic: cut a batch into micro-batches, then over ranks
order.py     the order of the samples: a function of seed, epoch and step alone
seeds.py     randomness as a function of (seed, epoch, sample)
stream.py    datasets that can only be gone through
parts.py     which samples a rank reads for each micro-batch
loader.py    read them: data loader workers, pinned memory
"""

from everyrank.data.loader import Batch, batches_for_evaluation, batches_for_updates
from everyrank.data.order import Update, all_updates, lone_sample, samples_before, samples_per_epoch, updates_per_epoch
from everyrank.data.slicing import Slice, cut, micro_batches
from everyrank.data.stream import Streamed, count_samples, is_stream

__all__ = [
    "Batch",
    "Slice",
    "Streamed",
    "Update",
    "all_updates",
    "batches_for_evaluation",
    "batches_for_updates",
    "count_samples",
    "cut",
    "is_stream",
    "lone_sample",
    "micro_batches",
    "samples_before",
    "samples_per_epoch",
    "updates_per_epoch",
]
