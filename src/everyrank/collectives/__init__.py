"""`everyrank comm`: times and checks every operation of torch.distributed, and readable all-reduce algorithms.

options.py       CommOptions: operations, sizes, dtype, groups; without torch
messages.py      send and receive between two ranks, counted
algorithms/      all-reduce written with send and receive: ring, halving, tree, server, hierarchical
operations/      every point-to-point and collective operation, with the expected result of each rank
cost.py          latency and bandwidth, fitted from a sweep of sizes
sweep.py         times every operation at every size; backends and algorithms take turns
rank.py          the part of one rank in `everyrank comm`
stride_check.py  tests whether operations accept, refuse or corrupt non-contiguous tensors
"""
