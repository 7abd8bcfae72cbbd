"""What the numbers say: one kind of mistake a file, each a function of the evidence that adds findings.

data.py          which samples the ranks read
gradients.py     what each backward weighs in the gradient that steps
loss_terms.py    what each term of a loss weighs in it
clipping.py      whether gradients are clipped when they are whole
replay.py        whether that is the gradient of one process; how far batch norm couples samples
replicas.py      whether the ranks hold the same model
evaluation.py    what an evaluation counts
collectives.py   whether the ranks call the same, and where a run that hangs stands
randomness.py    whose random numbers
schedule.py      how often the learning rate changes
saving.py        which rank writes which file
speed.py         what costs time for nothing
"""
