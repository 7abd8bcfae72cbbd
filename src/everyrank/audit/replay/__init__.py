"""`audit --replay`: runs the first updates again, in one process and float64, to get their exact gradient.

state.py      data classes: the recorded backwards, and the model before an update
recording.py  records the inputs of each forward, and the torch functions from its output to the loss
run.py        runs the recorded updates again on rank 0 when the script has ended

The rule that compares the gradients is `rules/replay.py`.
"""
