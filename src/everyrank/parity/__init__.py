"""Compare a layout with one device, and name the first divergence and its likely cause.

The rules (docs/parity.md):

- In float64 the loss of every update equals `single` to 1e-10 relative, and the count of loss terms is equal. Each
  final tensor is within the tolerance for rounding: 1e-7 of the distance it moved, or ten times the distance between
  perturbed runs of `single`. Elements whose true gradient is zero are not compared, because only rounding moves them.
- Rounding errors grow during training. The comparison covers the updates over which perturbed runs of `single` stay
  close to it. If that is not all of them, the updates at the end of the epoch run again from the initial state.
- The precision of the layout is compared too, over fewer updates, within ten times the spread of perturbed runs.
- Whole replicas are identical bit by bit.
- Evaluation has the same sums and counts.

    case.py            the workload without dropout, its data, and the few updates to compare
    samples.py         checks that each sample is read once in an epoch and counted once in the evaluation
    rows.py            identifies the samples of a batch by their values
    trace.py           runs the updates and keeps losses, counts, evaluation and tensors
    cache.py           runs of `single` on disk
    reference.py       `single` and its perturbed runs: how far rounding moves the results
    compare.py         the tolerances and the comparison, plain arithmetic
    probes.py          finds the part of a workload that is not a sum over samples
    async_reads.py     finds the asynchronous collective whose result is read before `wait()`
    initial_state.py   what a custom parallelize function changes before the first update
    rank_comparison.py   the ranks' values of a tensor compared with one device: the axes of a missing sum or mean
    custom_gradients.py  the gradients of a custom parallelize function: the axis or norm that is wrong
    module_events.py   records inputs, outputs and gradients of each module
    outputs.py         the first module whose forward pass differs
    backward.py        the first module whose backward pass differs
    diagnose.py        the first tensor that differs, and the likely cause
    check.py           the whole check of one layout
    kept.py            traces in files: compares today's code, torch or machine with an earlier one
    rank.py            the work of one rank for `everyrank verify`
"""

from everyrank.parity.case import ParityCase, parity_case
from everyrank.parity.check import check_layout
from everyrank.parity.custom_gradients import gradient_case
from everyrank.parity.trace import Trace, trace

__all__ = ["ParityCase", "Trace", "check_layout", "gradient_case", "parity_case", "trace"]
