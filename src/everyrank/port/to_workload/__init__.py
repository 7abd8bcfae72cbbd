"""The training of a script as the file of a workload, compared with the script and verified before it is written.

workload.py         observes the script, writes the text, compares it, tries another choice
observed_run.py     the facts of a run by their kinds
training_parts.py   model, data, loss, optimizer, schedule and numbers in the script
batch_loop.py       the loop over the batches: from a batch to the loss
slices.py           the statements that an expression needs
workload_file.py    the text of the file
single_training.py  a plain loop over a workload, for the comparison
"""

from everyrank.port.to_workload.workload import WorkloadResult, port_to_workload

__all__ = ["WorkloadResult", "port_to_workload"]
