"""Hooks of torch in the script's processes, installed when torch is imported. They record events and judge nothing.

inject/             sitecustomize.py on PYTHONPATH, which waits for the first `import torch`
install.py          installs all hooks in order, and ends the run
recorder.py         writes the files of events
place.py            finds the line of the script that is running
modules.py          forward passes: rows, random state, batch norm, buffers
losses.py           losses, and the factor of each in the gradient
local_tensors.py    local parts of replicated DTensors
gathers.py          results of all_gather, through which no gradient flows
noise.py            random numbers of a training step that go into the model
ratios.py           numbers of an evaluation that are ratios or exponentials
gradients.py        the gradient of each backward, and the one that steps
deepspeed.py        the gradients that step under DeepSpeed
flat_shards.py      the flat parameters of FullyShardedDataParallel (FSDP1)
steps.py            backward, clipping, gradient scaler, optimizer steps, zero_grad, schedules
collectives.py      every collective, where torch hands it to its backend
loaders.py          the indices that each DataLoader reads, on each rank and in each epoch
overlay.py          redirects the files that the script writes into the audit's folder
saving.py           redirects libraries that write in C, C++ or Rust; records torch.save
imports.py          changes a module right after it is imported
frameworks.py       Lightning without a GPU
pretend_cuda.py     CUDA calls on the CPU, if there is no GPU
sync_batch_norm.py  SyncBatchNorm on pretended GPUs
"""
