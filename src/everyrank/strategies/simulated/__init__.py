"""Single-process simulations of the strategies that are not equivalent to one device; `verify` compares with them.

Each file has one function, `simulate(workload, layout, world) -> Prepared`, for a layout with `simulated=K`. Its step
gets the micro-batches of all K ranks. Model, loss and optimizer are shared with the strategy. The communication is not:
reductions over ranks are written again as arithmetic over a list.
"""
