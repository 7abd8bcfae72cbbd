"""The mechanisms of parallel training, one a file: plain functions over a module.

Strategies compose them in the one right order, which is parallelize.py's.

mesh.py           where a rank stands on each axis of its layout; process groups along the axes
precision.py      dtypes, autocast, loss scaling
micro_batch.py    what a forward pass knows of its micro-batch
batch_gather.py   losses over the whole batch
loss.py           loss and metrics as (sum, count)
ema.py            a moving average of the weights
gradients.py      gradients over groups of ranks, and their norm
trainable.py      a model with its optimizer: what an update changes
batch_norm.py     statistics over all ranks, on CPU too
file_backed.py    tensors whose numbers lie in a file instead of memory
init_model.py     build the model: seeded, or on the meta device and filled part by part
room.py           where memory does not suffice: one line
dropout/          masks that are a function of where an element stands
tensor/           split matrices
context/          split sequences
parallelize.py    the model of one rank, all of the above in order
compress.py       gradients made smaller before they travel: hooks of DistributedDataParallel
local_sgd.py      replicas that are averaged every few updates
horovod.py        Horovod's optimizer, and its broadcast of the first state
expert.py         experts split over ranks: tokens travel to those that they chose
server/           parameter servers and their trainers
own.py            custom parallel code: a function of the user's
own_precision.py  its mixed precision, left out while it is compared
flat.py           many tensors as one, for one collective
ddp.py            every rank holds the whole model (DistributedDataParallel)
zero1.py          every rank owns a part of the optimizer
fsdp.py           every rank holds a part of everything (fully_shard)
pipeline/         every rank holds some of the blocks
full_state.py     the full state dict of a model that lies in parts
check_equal.py    before the first update: the same in parts as it is as a whole?
"""
