"""Compare a layout with one device, and name the first divergence and its likely cause.

The rules (section 5 of the design, docs/parity.md):

- In float64 the loss of every update equals `single` to 1e-10 relative, the count of loss terms is equal, and each
  final tensor, relative to its largest element, is within ten times its noise floor: `single` against `single` with
  the samples of every micro-batch in reverse. (A parameter whose true gradient is zero, such as a key's bias, moves by
  noise alone under Adam, so no fixed tolerance is right.)
- The layout's own precision is compared too, within ten times the band of perturbed runs of `single`: samples
  reversed, and the initial weights moved by one unit in the last place of that precision.
- Ranks that hold whole replicas hold the same bits.
- Evaluation adds up to the same sums and counts.

    trace.py      run a workload for a few updates and keep what it leaves
    compare.py    the rules: pure arithmetic on two traces
    diagnose.py   the first tensor that differs, and the likely cause
    check.py      all of it for one layout
"""

from everyrank.parity.check import check_layout
from everyrank.parity.trace import Subject, Trace, subject_of, trace

__all__ = ["Subject", "Trace", "check_layout", "subject_of", "trace"]
