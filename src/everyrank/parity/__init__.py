"""Compare a layout with one device, and name the first divergence and its likely cause.

The rules (docs/parity.md):

- In float64 the loss of every update equals `single` to 1e-10 relative, the count of loss terms is equal, and each
  final tensor is as far from `single` as rounding explains: a ten-millionth of how far it moved, or ten times what
  perturbed runs of `single` are apart. An element whose true gradient is zero is not compared: rounding alone moves it.
- Rounding grows along a training. What is compared are the updates over which `single` stays close to itself,
  perturbed; where those are not all, the updates at the end of the epoch are run from the initial state again.
- The layout's own precision is compared too, over fewer updates, within ten times the band of perturbed runs.
- Ranks that hold whole replicas hold the same bits.
- Evaluation adds up to the same sums and counts.

    case.py        what is compared: a workload made quiet, few updates
    samples.py     each sample is read once in an epoch, and counted once in the evaluation
    rows.py        which samples were computed on, told from what they hold
    trace.py       run a workload for these updates and keep what it leaves
    cache.py       runs of `single` on the disk
    reference.py   `single`, and how far rounding alone moves it
    compare.py     the rules: pure arithmetic
    probes.py      why a workload is not the same in parts as it is as a whole
    async_reads.py an asynchronous collective that is read before it is waited for
    initial_state.py   a custom parallelize function: what it changes before the first update
    by_rank.py     what each rank has of a tensor, beside one device: a sum or mean along which axes
    own_code.py    its gradients first, and which axis or norm is wrong
    module_events.py   what goes into modules and comes out, with gradients, beside one process
    outputs.py     the first module inside which its forward pass goes wrong
    backward.py    the same of its backward pass
    diagnose.py    the first tensor that differs, and the likely cause
    check.py       all of it for one layout
    rank.py        what one rank does for `everyrank verify`
"""

from everyrank.parity.case import ParityCase, parity_case
from everyrank.parity.check import check_layout
from everyrank.parity.own_code import gradients_of
from everyrank.parity.trace import Trace, trace

__all__ = ["ParityCase", "Trace", "check_layout", "gradients_of", "parity_case", "trace"]
