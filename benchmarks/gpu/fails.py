"""Two ranks of one GPU under nccl: rank 1 asks for too much memory, so rank 0 loses its peer."""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
os.environ["NCCL_HOSTID"] = f"rank {rank}"  # nccl refuses two ranks of one host on one card
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
total = torch.ones(4, device="cuda")
for update in range(5):
    dist.all_reduce(total)
    if update == 3 and rank == 1:
        torch.empty(2**50, device="cuda")
print(total)
