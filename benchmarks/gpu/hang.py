"""Two ranks of one GPU under nccl: rank 1 leaves out an all_reduce, so rank 0 waits for it."""

import os
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
os.environ["NCCL_HOSTID"] = f"rank {rank}"  # nccl refuses two ranks of one host on one card
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
total = torch.ones(4, device="cuda")
for update in range(5):
    dist.all_reduce(total)
    torch.cuda.synchronize()
    if update == 3 and rank == 1:
        time.sleep(40)
print(total)
