"""Standalone training scripts in plain PyTorch, to copy and change. Package data: everyrank does not import them.

`everyrank new --list` lists them. `everyrank new ddp_torchrun train.py` writes a script, its data, and digits.py, which
most scripts import. Most train the same network on the same samples in the same order, in float32. With --float64
they print the losses that the library gets. tensor, fsdp, hsdp and fsdp_tensor train shared/transformer.py, a network
with larger blocks, and `python tensor.py` trains it in one process. context, expert and contrastive have their own
networks, and tests compare them with the same script in one process. ddp_rpc, rpc_rnn and rpc_reinforcement have their
own networks, too, and tests/recipes/test_rpc.py trains these for comparison.
"""
