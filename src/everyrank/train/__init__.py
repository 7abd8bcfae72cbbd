"""`everyrank train`: the training loop with its evaluations, checkpoints, logs and clean stop.

trackers.py     TensorBoard and Weights & Biases behind one small interface
log.py          writes log.jsonl, log.csv and epochs.csv of a run
memberships.py  records the ranks and hosts of each start, and the time of a restart
display.py      the progress bar and the printed lines
throughput.py   samples per second
job.py          the prepared model with its data; evaluates it
on_epoch.py     calls the user's `Workload.on_epoch`
stragglers.py   finds ranks that are slower than the others, and why
buffers.py      finds buffers that differ between ranks after the first update
guard.py        compares replicas by checksums
saving.py       when a checkpoint is due; reports a failure to save
training.py     the loop: updates, evaluations, checkpoints, stop requests
rank.py         what one rank does for `everyrank train`
"""
