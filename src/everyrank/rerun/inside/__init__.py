"""Hooks in one rank, which impose batches, random numbers and precision, and record each update.

start.py        installs the hooks, and runs the script
session.py      the state that all hooks share, and the end of the run
batches.py      records batches of loaders, merges those of several ranks, or imposes one order
sources.py      functions and loops of the script that yield batches
reads.py        rows that the script takes from its tensors
draws.py        random numbers of torch, and the tensors that each line computes
numbers.py      random numbers of Python and NumPy
steps.py        losses, gradients, parameters, learning rates and states of each update
modules.py      names of parameters and states
objects.py      running statistics and counters of the script's own objects
norms.py        batch norm over the samples of each rank, on one rank
printed.py      lines that the script prints and logs
expressions.py  expressions of the script that construct a loader, call the model, save, draw
setup.py        values of variables, details of loaders, schedules and clipping
clock.py        a deterministic clock
precision.py    float64 instead of float32
"""

from everyrank.rerun.inside.start import run_as_rank

__all__ = ["run_as_rank"]
