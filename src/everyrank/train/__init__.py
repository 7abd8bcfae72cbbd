"""A training as a person follows it: evaluations, checkpoints, logs, and an end that loses nothing.

trackers.py     TensorBoard and Weights & Biases behind one small interface
log.py          log.jsonl, log.csv and epochs.csv of a run
memberships.py  who takes part in each start, and what the changes cost
display.py      the progress bar, and the lines a person reads
throughput.py   how fast it goes
job.py          what is trained, and how good it is
on_epoch.py     a person's own function after each epoch
stragglers.py   ranks that are slower than the others, and why
guard.py        whether ranks still hold alike what they should, by checksums
saving.py       when a checkpoint is due; a failure to save, said
training.py     updates, and between them evaluations, checkpoints, an answer to a request to stop
rank.py         what one rank does for `everyrank train`
"""
