"""What looks on inside the processes of a person's script: hooks of torch, put in when it is imported. Judges nothing.

inject/             sitecustomize.py on PYTHONPATH, which finds the first `import torch`
install.py          all hooks in order, and the end of the run
recorder.py         the files that are written
place.py            which line of the script has called
modules.py          forward passes: rows, random state, batch norm, buffers
losses.py           which tensors are losses, and with which factor each goes into the gradient
gathers.py          what all_gather gave, through which no gradient goes back
noise.py            random numbers of a training step that go into the model
ratios.py           numbers of an evaluation that are no means over samples
gradients.py        what each backward gives, and the gradient that steps
steps.py            backward, clipping, gradient scaler, optimizer steps, zero_grad, schedules
collectives.py      every collective, where torch hands it to its backend
loaders.py          what each DataLoader reads, on each rank and in each epoch
overlay.py          the folder of the audit into which the script's files go
saving.py           libraries that write files in C, C++ or Rust; torch.save
imports.py          a module is changed right after it was imported
keeper.py           --replay: what each backward of the first updates needs
kept.py             --replay: the files of these
replay.py           --replay: runs them once more, in float64
frameworks.py       Lightning, where there is no GPU
pretend_cuda.py     for scripts that say cuda, where there is none
sync_batch_norm.py  SyncBatchNorm on pretended devices
"""
