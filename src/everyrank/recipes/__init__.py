"""Standalone training scripts in plain PyTorch, to copy and to own. Package data: nothing here is imported.

`everyrank new --list` names them; `everyrank new ddp_torchrun train.py` writes one, its data beside it. Each
trains the same network on the same samples in the same order, in float32; with --float64 it prints the losses that the
library gets. Where that network has nothing to split (tensor, fsdp_tensor, context), or the loss is another one
(contrastive), plain python or another recipe trains the same in one process. Three over RPC (ddp_rpc, rpc_rnn,
rpc_reinforcement) have networks of their own, which tests/recipes/test_rpc.py trains in one process.
"""
