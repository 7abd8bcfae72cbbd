"""DDP in mixed precision (AMP): parameters in float32, matrix products and convolutions in bf16 or fp16.

Run: torchrun --standalone --nproc-per-node 2 ddp_amp.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       devices are faster in bf16 or fp16 (most GPUs since 2017 are), or activations fill their memory

What to change for your own training:
- Set PRECISION to bf16 on CPUs and on CUDA devices since Ampere, and to fp16, which needs loss scaling, on older ones.
- From Apex: O0 is float32 without autocast, and O1 is this script. O2's float32 master weights are the parameters
  themselves. torch.amp has no O3 (weights in fp16, no loss scaling), which loses small updates.
- For fused optimizers you do not need Apex: torch.optim.SGD, Adam and AdamW accept fused=True.
- Leave the parameters in float32. In bf16, rounding discards an update that is much smaller than its weight.
- Call backward outside autocast. Clip gradients after scaler.unscale_() and before scaler.step().
- --float64 turns autocast off. It checks data, scaling and normalization, where low precision would hide mistakes.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
PRECISION = "bf16"  # or "fp16"
AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}[PRECISION]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    # Small gradients are zero in fp16, so the scaler multiplies the loss. It skips an update that overflowed.
    # bf16 has the range of float32 and needs no scaler.
    scaler = torch.amp.GradScaler(device.type, enabled=PRECISION == "fp16" and dtype == torch.float32)
    # Parameters, gradients and the optimizer stay in float32. Autocast converts the inputs of each operation.
    autocast = torch.autocast(device.type, AUTOCAST_DTYPE, enabled=dtype == torch.float32)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with autocast:
                loss_sum = F.cross_entropy(ddp(images), labels, reduction="sum")
            # Backward in low precision uses the sum / BATCH, so that all batches have the same scale. The loop below
            # corrects a smaller last batch, in float32. DDP divides the sum over ranks by world_size.
            scaler.scale(loss_sum * world_size / BATCH).backward()
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                parameter.grad *= BATCH / batch_size
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss_sum.detach() / batch_size)

        losses = torch.stack(losses)
        dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    with autocast:
        correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
