"""Hooks of torch in the script's processes. They are installed when torch is imported, and only record events.

inject/             sitecustomize.py on PYTHONPATH, which waits for the first `import torch`
install.py          installs all hooks in order, and ends the run
recorder.py         writes the files of events
source_location.py  finds the line of the user's code that is running
modules.py          forward passes: rows, random state, batch norm, buffers
losses.py           losses, and the factor of each in the gradient
local_tensors.py    local parts of replicated DTensors
gathered_tensors.py results of all_gather, through which no gradient flows back
random_draws.py     random numbers of a training step that are inputs of the model
ratio_metrics.py    numbers of an evaluation that are ratios or exponentials
gradients.py        the gradient of each backward, and the gradient of each optimizer step
deepspeed.py        the gradient of the optimizer step under DeepSpeed
flat_shards.py      the flat parameters of FullyShardedDataParallel (FSDP1)
steps.py            backward, clipping, gradient scaler, optimizer steps, zero_grad, schedules
collectives.py      every collective that torch passes to a backend
loaders.py          the indices that each DataLoader reads, on each rank and in each epoch
restored_dataset.py restores a dataset after samples of it were read
overlay.py          redirects the files that the script writes into the audit's folder
saving.py           redirects libraries that write in C, C++ or Rust, and records torch.save
compilation.py      lets torch.compile return its argument
imports.py          changes a module right after it is imported
frameworks.py       Lightning without a GPU
pretend_cuda.py     runs CUDA calls on the CPU if there is no GPU
sync_batch_norm.py  SyncBatchNorm on pretended GPUs
"""
