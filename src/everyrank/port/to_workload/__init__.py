"""Turns the training of a script into the file of a workload, compared with the script and verified on two ranks.

workload.py         observes the script, writes the text, compares it, tries another choice
observed_run.py     the facts of a run by kind
training_parts.py   finds model, data, loss, optimizer, schedule and numbers in the script
batch_loop.py       finds the statements from a batch to the loss
changing_names.py   finds the variables and objects that the training changes, which a workload cannot have
loop_ends.py        notes early ends of the loops, and refuses a training that changes or freezes its model
slices.py           finds the statements that an expression needs
importable.py       whether the script can be imported without running its training
definitions.py      finds the functions, classes and imports that the file needs
workload_file.py    writes the text of the file
single_training.py  a plain loop over a workload, for the comparison
"""

from everyrank.port.to_workload.workload import WorkloadResult, port_to_workload

__all__ = ["WorkloadResult", "port_to_workload"]
