"""Which rank reads which samples, in which order, exactly once.

slicing.py   arithmetic: cut a batch into micro-batches, then over ranks
order.py     the order of the samples: a function of seed, epoch and step alone
loader.py    read them: data loader workers, augmentation randomness, pinned memory
"""

from everyrank.data.loader import Batch, batches_for_evaluation, batches_for_updates
from everyrank.data.order import Update, all_updates, samples_before, updates_per_epoch
from everyrank.data.slicing import Slice, cut, micro_batches

__all__ = [
    "Batch",
    "Slice",
    "Update",
    "all_updates",
    "batches_for_evaluation",
    "batches_for_updates",
    "cut",
    "micro_batches",
    "samples_before",
    "updates_per_epoch",
]
