"""`everyrank plan`: which layouts fit, how long a step takes and which are worth trying, before you rent GPUs.

hardware.py       GPU kinds and links with the source of each number
decoder.py        the sizes of a decoder: from text, by name, or from a config.json
configuration.py  configurations as columns, and the bytes of a training stack for each parameter and token
memory.py         memory of the fullest rank in closed form, by category
step_time.py      seconds of a step in closed form, by part
rows.py           measured rows of published tables
calibration.py    three fitted numbers for each GPU kind and stack, and intervals
machine.py        a measured machine, and the seconds of a traced step on it
kernels.py        measures the curves of kernels on this machine, from the caches and from memory
calibrate.py      measures this machine: kernels, links, and the overhead of each strategy
validate.py       compares predictions with measured rows
candidates.py     layouts as configurations, all layouts of a cluster, the choice and the smallest change
changes.py        changes of a layout that take less memory, smallest first
whole_run.py      hours, cost and energy of a run, with checkpoints and failures
answer.py         the answer of the command as one JSON object
trace.py          every storage, operator and collective of a rank, recorded on fake tensors
caching_allocator.py  torch's caching allocator, replayed: reserved memory
roofline.py       seconds of a traced step on a kind of GPU that was not measured
as_on_gpu.py      replaces operators that are one kernel on a GPU and several on a CPU
even_counts.py    the tokens of each expert on fake tensors, which have no values
pretend.py        runs the real prepare and step of any layout on fake tensors, for any rank and world size
traced.py         the answer for a user's own workload, traced
"""
