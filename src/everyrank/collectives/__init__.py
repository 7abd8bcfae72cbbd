"""What the links between ranks give: every operation of torch.distributed timed and checked, and reductions to read.

question.py     what is asked: operations, sizes, dtype, groups; without torch
messages.py        messages between two ranks, counted
algorithms/     an all-reduce in plain sends and receives: ring, halving, tree, server, hierarchical
operations/     every point-to-point and collective operation, with the answer that each rank must have
cost.py         latency and bandwidth, fitted from a sweep of sizes
sweep.py        one operation after the other, one size after the other, backends and algorithms in turns
rank.py         what one rank does for `everyrank comm`
strides.py      whether tensors that are not contiguous are taken, refused, or wrong without a word
"""
