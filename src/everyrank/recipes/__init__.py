"""Standalone training scripts in plain PyTorch, to copy and to own. Package data: nothing here is imported.

`everyrank new --list` names them; `everyrank new ddp_torchrun train.py` writes one, its data beside it. Each
trains the same network on the same samples in the same order, and prints the losses that the library gets. Where
that network has nothing to cut (tensor, fsdp_tensor, context), it is another one, which plain python trains whole.
"""
