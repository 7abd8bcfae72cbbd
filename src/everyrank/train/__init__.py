"""Train: a run as a person follows it, and as it survives.

trackers.py   TensorBoard and Weights & Biases behind one small interface
log.py        log.jsonl, log.csv and epochs.csv of a run
pace.py       how fast it goes
watch.py      the progress bar, and the lines a person reads
hook.py       a person's own function after each epoch
subject.py    what is trained, and how good it is
training.py   updates, and between them evaluations, checkpoints, an answer to a request to stop
rank.py       what one rank is asked to do
"""

from everyrank.train.rank import train_rank

__all__ = ["train_rank"]
