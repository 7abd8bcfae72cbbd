"""Runs a user's script again, on one or several ranks, with the batches, draws and learning rates of an earlier run.

host.py       one process that imports torch once and forks the ranks of each run
batch_sizes.py  batch sizes that stand in the script
recording.py  what a run gives: losses, gradients, parameters, states and printed lines of each update
shards.py     parts of a tensor that ranks hold
process.py    the program of that process
inside/       the hooks in each rank: they impose and record

Only process.py and inside/ import torch when they are imported.
"""

from everyrank.rerun.host import ScriptHost
from everyrank.rerun.recording import Imposed, Printed, RankRecording, RecordedUpdate, ScriptRecording

__all__ = ["Imposed", "Printed", "RankRecording", "RecordedUpdate", "ScriptHost", "ScriptRecording"]
