"""Standalone training scripts in plain PyTorch, to copy and to change. Package data: everyrank does not import them.

`everyrank new --list` lists them; `everyrank new ddp_torchrun train.py` writes one, and next to it the data and
shared/digits.py, which most of them import. They train the same network on the same samples in the same order, in
float32; with --float64 they print the losses that the library gets. Those that split a large network (tensor, fsdp,
hsdp, fsdp_tensor) share a small one with blocks, shared/transformer.py: `python tensor.py` trains it in one process.
context, expert and contrastive have networks of their own, and are compared with the same script in one process.
Three over RPC (ddp_rpc, rpc_rnn, rpc_reinforcement) have networks of their own; tests/recipes/test_rpc.py trains those.
"""
