"""Dropout whose masks are a function of (seed, update, call, sample, position): alike under every layout.

masks.py       the function: a hash of integers, the same bits on every device
exact.py       what of it is here: samples, positions and features of this rank, calls of this forward pass
attention.py   dropout of attention weights
apply.py       the dropouts of a model, found and made exact
"""
