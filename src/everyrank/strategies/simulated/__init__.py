"""What layouts that change the mathematics are compared with: one process that does what each of their ranks would do.

Each file has one function, `simulate(workload, layout, world) -> Prepared`, for a layout with `simulated=K`: its step
gets the micro-batches of all K ranks. It shares model, loss and optimizer with the strategy, and nothing of what
travels: what ranks make of their gradients together is written down once more, as arithmetic over a list of them.
"""
