"""Every rank saves to one path, and what is in the file in the end is what the last one wrote.

Reported: https://github.com/NVIDIA/apex/issues/886
          https://github.com/tczhangzhi/pytorch-distributed (distributed_slurm_main.py, save_checkpoint)
Wrong: the batch-norm statistics of whichever rank came last are kept; writing at one time can also tear the file.
Kind: script
Expected: save.race
Right: rank 0 saves, the others wait
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RIGHT = "--right" in sys.argv
PATH = Path(tempfile.gettempdir()) / "saved_by_every_rank.pt"


def save_checkpoint(model, optimizer, epoch):
    if RIGHT and dist.get_rank() != 0:
        return
    state = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, PATH)  # <- the mistake


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features = torch.randn(320, 12)
    labels = features[:, :4].argmax(1)
    dataset = TensorDataset(features[:256], labels[:256])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32 // world_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save_checkpoint(model, optimizer, epoch)
        dist.barrier()
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.6f}")
    if rank == 0:
        own = model.module[1].running_mean.clone()
        saved = torch.load(PATH)["model"]["1.running_mean"]
        print(f"running mean in the file is off from that of rank 0 by {(saved - own).abs().max():.6f}")
        PATH.unlink()
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
