"""One mechanism a file, plain functions over a module. Strategies compose them in the one right order.

build.py        the model, seeded and in its precision; recomputation and compilation
rows.py         losses over the whole batch
average.py      a moving average of the weights
batch_norm.py   statistics over all ranks, on CPU too
replicate.py    every rank holds the whole model (DistributedDataParallel)
partition.py    every rank owns a part of the optimizer
shard.py        every rank holds a part of everything (fully_shard)
"""
