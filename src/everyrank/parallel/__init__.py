"""The mechanisms of parallel training, one per file: plain functions over a module.

Strategies compose them; parallelize.py applies them in the right order.

mesh.py           the device mesh: a rank's coordinate on each axis, process groups along axes
precision.py      dtypes, autocast, loss scaling
micro_batch.py    the micro-batch of the current forward pass
batch_gather.py   all-gather for losses over the whole batch
loss.py           loss and metrics as (sum, count)
ema.py            exponential moving average of the weights
gradients.py      gradient reduction over groups of ranks, and gradient norms
same_gradients.py checks that all ranks have gradients of the same parameters
trainable.py      model, optimizer, schedule, loss scaler and averages: the state that an update changes
batch_norm.py     synchronised batch norm, on CPU too
file_backed.py    tensors stored in a file instead of memory
init_model.py     build the model: seeded, or on the meta device and materialised part by part
state_memory.py   refuses a training whose state exceeds the memory, before its first update
oom.py            out-of-memory errors with advice
dropout/          dropout masks that are the same under every layout
tensor/           tensor parallelism: split weight matrices
context/          context parallelism: split sequences
parallelize.py    the model of one rank: all of the above in order
compress.py       gradient compression: communication hooks of DistributedDataParallel
local_sgd.py      averaging of replicas every few updates
horovod.py        Horovod's optimizer and its broadcast of the initial state
expert.py         expert parallelism: tokens are sent to the ranks of their experts
server/           parameter servers and their trainers
custom.py         custom parallelize functions
custom_precision.py   disables the mixed precision of a custom function during a check
flat.py           flatten many tensors into one for a single collective
ddp.py            DistributedDataParallel: the whole model on every rank
zero1.py          ZeRO-1: every rank owns a part of the optimizer state
fsdp.py           fully_shard: every rank holds a part of parameters, gradients and optimizer state
pipeline/         pipeline parallelism: every rank holds some of the blocks
full_state.py     gather the full state dict of a sharded model
check_equal.py    compares the sharded model with the whole one before the first update
"""
