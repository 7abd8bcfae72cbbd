"""What looks on inside the processes of a person's script: hooks of torch, put in when it is imported. Judges nothing.

inject/sitecustomize.py   on PYTHONPATH: finds the first `import torch`
install.py                all hooks in order, and the end of the run
recorder.py               the files that are written
place.py                  whose line is it
losses.py, gathers.py, noise.py, ratios.py, modules.py, gradients.py, steps.py, collectives.py, loaders.py
                          one kind of event each
overlay.py, saving.py     where the files go that the script writes
imports.py                a module is changed right after it was imported
keeper.py, kept.py          --replay: what the first updates need to be run once more
replay.py, union.py         running them, also as one batch
stand_in.py                 what stands in for other ranks and for dropout meanwhile
frameworks.py             Lightning, where there is no GPU
pretend_cuda.py           for scripts that say cuda, where there is none
sync_batch_norm.py        of these, on CPU
"""
