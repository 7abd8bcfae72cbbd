"""Dropout whose masks are a function of (seed, update, call, sample, position): the same with every layout.

masks.py       the function: a hash of integers, the same bits on every device
exact.py       the samples, positions and features of this rank, and the calls of this forward pass
attention.py   dropout of attention weights
apply.py       finds the dropouts of a model and replaces them
"""
