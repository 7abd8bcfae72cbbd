"""Hooks in one rank: they impose batches, draws and precision, and record each update.

start.py        installs the hooks, and runs the script
session.py      the state that all hooks share, and the end of the run
batches.py      what loaders yield: recorded, put together from several ranks, or in one order
sources.py      functions of the script that draw batches
reads.py        rows that the script takes out of its tensors
draws.py        random numbers, and the tensors that each line computes
numbers.py      random numbers of Python and NumPy
steps.py        losses, gradients, parameters, learning rates and states of each update
modules.py      names of parameters and states
objects.py      running statistics and counters of the script's own objects
norms.py        batch norm over the samples of each rank, on one rank
printed.py      lines that the script prints and logs
expressions.py  which expression of the script makes a loader, calls the model, saves, draws
setup.py        values of names, details of loaders, schedules and clipping
clock.py        a clock that ticks with each question
precision.py    float64 in place of float32
"""

from everyrank.rerun.inside.start import run_as_rank

__all__ = ["run_as_rank"]
