"""nn.DataParallel: one process with several CUDA devices, which copies the network to all of them in every update.

Run: python dataparallel.py

Memory         the model, gradients and optimizer state on the first device; copies of the model on the others
Communication  per update, parameters and inputs from the first device to all, outputs and gradients back to it
Use when       never in new code: ddp_torchrun.py is faster on one host, too (no copies, one interpreter per device)

What to change for your own training:
- Compute the loss on the gathered output. A mean of the means of the devices is wrong if their parts differ in size.
- Save model.state_dict(). In parallel.state_dict(), all names begin with "module.".
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from digits import build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update
SEED = 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    num_devices = torch.cuda.device_count()
    device = torch.device("cuda", 0) if num_devices else torch.device("cpu")
    train_data, eval_data = load(dtype)
    generator = torch.Generator()
    sampler = RandomSampler(train_data, generator=generator)
    loader = DataLoader(train_data, BATCH, sampler=sampler, pin_memory=device.type == "cuda")
    model = build().to(device, dtype)
    parallel = model
    if num_devices >= 2:
        # Inputs are split over device_ids; outputs are gathered on output_device, where the parameters live.
        parallel = nn.DataParallel(model, device_ids=list(range(num_devices)), output_device=0)
    else:
        print(f"DataParallel needs 2 CUDA devices, found {num_devices}: using {device}", file=sys.stderr)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # a different order in each epoch, as with DistributedSampler
        losses = []
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        print_losses(epoch, torch.stack(losses), every_update=args.float64)  # waits for the device, once per epoch

    print(f"top1 {count_correct(parallel, eval_data, device).item() / len(eval_data):.4f}")


if __name__ == "__main__":
    main()
