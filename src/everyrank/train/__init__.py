"""A training as a person follows it: evaluations, checkpoints, logs, and an end that loses nothing.

trackers.py     TensorBoard and Weights & Biases behind one small interface
kernels.py      which kernels torch takes: the fastest, or those that repeat
log.py          log.jsonl, log.csv and epochs.csv of a run
memberships.py  who takes part in each start, and what the changes cost
display.py      the progress bar, and the lines a person reads
throughput.py   how fast it goes
job.py          what is trained, and how good it is
about.py        what a checkpoint says of it
announce.py     what it says of itself before its first update, and at its end
course.py       the updates before it, from the start or from a checkpoint
on_epoch.py     a person's own function after each epoch
look.py         what ranks tell each other every few updates
stragglers.py   ranks that are slower than the others, and why
guard.py        whether ranks still hold alike what they should, by checksums
saving.py       when a checkpoint is due; a failure to save, said
training.py     updates, and between them evaluations, checkpoints, an answer to a request to stop
"""
