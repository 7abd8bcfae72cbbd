"""Runs a user's script again, on one or several ranks, with the batches, random numbers and rates of an earlier run.

host.py       one process that imports torch once and forks the ranks of each run
batch_sizes.py  changes the batch sizes in the source of a script
recording.py  the result of a run: losses, gradients, parameters, states and printed lines of each update
shards.py     joins the shards of a tensor
process.py    the program of that process
inside/       the hooks in each rank, which record and impose values

Only process.py and inside/ import torch at their top level.
"""

from everyrank.rerun.host import ScriptHost
from everyrank.rerun.recording import Imposed, Printed, RankRecording, RecordedUpdate, ScriptRecording

__all__ = ["Imposed", "Printed", "RankRecording", "RecordedUpdate", "ScriptHost", "ScriptRecording"]
