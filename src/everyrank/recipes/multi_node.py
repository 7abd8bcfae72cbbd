"""Distributed data parallel on several hosts: torchrun on each host, with checks that the hosts reach each other.

Run: torchrun --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29513 multi_node.py &
Run: torchrun --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port 29513 multi_node.py

These lines simulate two hosts on one. On two hosts with four GPUs each, run one line on each host, with
--nproc-per-node 4 and an address of the first host. Or run the same line on both, without --node-rank (c10d):
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29513 --rdzv-id 7 multi_node.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       you have several hosts and no scheduler. With a scheduler, use slurm.py or mpi.py

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks.
- With c10d, both hosts may wait a minute and fail. If the first host did not recognize the endpoint as its own, pass
  --rdzv-conf is_host=1 there (is_host=0 on the others). If hosts cannot resolve names, pass --local-addr ADDRESS.
- Debian maps a host's own name to 127.0.1.1, which gloo would use. On each host, set GLOO_SOCKET_IFNAME and
  NCCL_SOCKET_IFNAME to the interface of the address that the script prints. The firewall has to allow its ports.
- Use the same data, script and packages on all hosts. This script compares only the version of torch.
- Use LOCAL_RANK for the device and RANK for the samples. With LOCAL_RANK, all hosts would read the same samples.
"""

import argparse
import ipaddress
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it


def refuse(message):  # one line from each host; exit status 2: wrong usage
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{Path(__file__).name}: {message}\n")  # one write, because ranks share the terminal
    raise SystemExit(2)


def rendezvous():
    """Return (store, rank, world size, number of ranks on this host).

    Checks that the hosts reach each other and have the same torch.
    """
    if "GROUP_RANK" not in os.environ:
        refuse("not started by torchrun: the commands are at the top of this file")
    master, host_name, local_rank = os.environ["MASTER_ADDR"], socket.gethostname(), os.environ["LOCAL_RANK"]
    try:
        family, *_, address_of_master = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address_of_master)  # sends nothing, but the system selects the source address
            address = probe.getsockname()[0]
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        store.set(f"host of {rank}", json.dumps([host_name, address, torch.__version__, address_of_master[0]]))
        hosts = [json.loads(store.get(f"host of {other}")) for other in range(world_size)]
    except (dist.DistError, OSError) as error:
        refuse(f"{host_name} did not find all other hosts by MASTER_ADDR={master}: {str(error).splitlines()[0]}")
    if len({version for _, _, version, _ in hosts}) > 1:
        refuse(f"not the same torch: {', '.join(sorted({f'{host} has {version}' for host, _, version, _ in hosts}))}")
    for host, _, _, resolved in hosts:
        if len({name for name, *_ in hosts}) > 1 and ipaddress.ip_address(resolved.partition("%")[0]).is_loopback:
            refuse(f"MASTER_ADDR={master} is {resolved} on {host}, loopback: change --master-addr (c10d: --local-addr)")
    sys.stdout.write(f"rank {rank} of {world_size}: host {host_name}, local rank {local_rank}, address {address}\n")
    num_ranks_here = sum(other[:2] == [host_name, address] for other in hosts)
    return store, rank, world_size, num_ranks_here


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    store, rank, world_size, num_ranks_here = rendezvous()
    # One GPU per rank. Two torchruns on one host both count LOCAL_RANK from 0, so their ranks would share GPUs.
    cuda = torch.cuda.device_count() >= num_ranks_here == int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    limit = timedelta(minutes=5)  # ends the wait for a rank that died
    dist.init_process_group(backend, timeout=limit, world_size=world_size, rank=rank, store=store, device_id=device_id)

    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images), labels, reduction="sum") / batch_size
            (loss * world_size).backward()  # DDP divides the sum over ranks by world_size
            optimizer.step()
            losses.append(loss.detach())

        losses = torch.stack(losses)
        dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
