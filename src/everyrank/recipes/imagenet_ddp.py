"""ResNet-18 on ImageNet, or on any folders of images, with DistributedDataParallel.

Run: torchrun --standalone --nproc-per-node 2 imagenet_ddp.py DIR

DIR contains train/<class>/*.jpg and val/<class>/*.jpg. The script needs Pillow, and torchvision for --arch.
--evaluate only evaluates: the weights of --pretrained FILE, or the checkpoint imagenet_ddp.pt in this folder.

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       you train an image classifier, or want an example of a complete script, with loader workers, schedule and
               checkpoint

Differences from the usual example:
- --batch is the batch of all ranks, so adding ranks does not change the training.
- Augmentation depends only on (seed, epoch, image), not on the rank or the loader worker.
- The smaller last batch is kept, and no image is repeated to make ranks even. Top-1 and top-5 are exact.
- Batch norm is synchronized on CUDA. torch cannot synchronize it on CPU, so there the network has group norm.
- The loop does not wait for the device or for other ranks: no .item(), no barrier, no all-reduce of a metric.
- The checkpoint is complete even after a crash. Run the same command again to resume.
"""

import argparse
import contextlib
import math
import os
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

SEED = 0
MEAN, DEVIATION = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


class Images:
    """A dataset of (image, class), with one folder per class. In training, it returns a random crop of each image."""

    def __init__(self, folder, size, training, classes=None):
        folders = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
        self.classes = classes or folders  # evaluation images get the numbers of the training classes
        paths = ((path, i) for i, name in enumerate(self.classes) for path in sorted((folder / name).rglob("*")))
        self.samples = [(path, i) for path, i in paths if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp")]
        self.size, self.training = size, training

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        width, height = image.size
        side = min(width, height) * 224 / 256
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        if self.training:  # 8% to 100% of the area, aspect ratio 3:4 to 4:3
            area = width * height * (0.08 + 0.92 * torch.rand(()).item())
            shape = math.exp((2 * torch.rand(()).item() - 1) * math.log(4 / 3))
            crop_width, crop_height = min(width, math.sqrt(area * shape)), min(height, math.sqrt(area / shape))
            left, top = (torch.rand(2) * torch.tensor([width - crop_width, height - crop_height])).tolist()
            box = (left, top, left + crop_width, top + crop_height)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(self.size, self.size, 3)
        if self.training and torch.rand(()) < 0.5:
            pixels = pixels.flip(1)
        return (pixels.permute(2, 0, 1) / 255 - MEAN) / DEVIATION, label


class Seeded:
    """Maps a key (epoch, index) to images[index], with the random generator seeded by (SEED, epoch, index)."""

    def __init__(self, images):
        self.images = images

    def __getitem__(self, key):
        state = 0  # splitmix64: seeds that differ in one bit give unrelated numbers
        for number in (SEED, *key):
            state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
            state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
            state ^= state >> 31
        torch.manual_seed(state >> 1)
        return self.images[key[1]]


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, in_channels, out_channels, stride, norm):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False), norm(out_channels), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False), norm(out_channels))
        projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm(out_channels)
        self.shortcut = nn.Identity() if stride == 1 and in_channels == out_channels else nn.Sequential(*projection)

    def forward(self, features):
        return F.relu(self.second(self.first(features)) + self.shortcut(features))


def build(num_classes, width, cuda):
    """Return a ResNet-18, (N, 3, H, W) -> (N, num_classes), with the same weights in every process."""
    norm = nn.BatchNorm2d if cuda else lambda channels: nn.GroupNorm(8, channels)
    torch.manual_seed(SEED)
    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    shape = [(width, 1), (width, 1), *((width * 2**i, stride) for i in (1, 2, 3) for stride in (2, 1))]
    blocks = [Block(before, after, s, norm) for (before, _), (after, s) in pairwise([(width, 1), *shape])]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, num_classes))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if cuda else model


def build_arch(name, num_classes, cuda, world_size):
    """Return a network of torchvision by its name, (N, 3, H, W) -> (N, num_classes)."""
    from torchvision.models import get_model, list_models

    if name not in list_models():
        raise SystemExit(f"--arch {name}: torchvision has no such network; for example resnet50 or vit_b_16")
    torch.manual_seed(SEED)
    model = get_model(name, num_classes=num_classes)
    if not cuda and world_size > 1 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        raise SystemExit(f"--arch {name}: torch synchronizes batch norm only on GPUs; on CPU start one rank")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if cuda else model


def load_pretrained(model, file, rank):
    """Load a state dict, or a checkpoint of this script. A classifier for other classes keeps its initial weights."""
    state = torch.load(file, map_location="cpu", weights_only=True)
    state = {name.removeprefix("module."): value for name, value in state.get("model", state).items()}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    matching = {name: value for name, value in state.items() if shapes.get(name) == value.shape}
    if not matching:
        raise SystemExit(f"--pretrained {file}: no tensor has a name and shape of this network; --arch selects another")
    model.load_state_dict(matching, strict=False)
    if rank == 0 and len(matching) < len(shapes):
        print(f"not in {file}: {', '.join(sorted(set(shapes) - set(matching)))}")


def make_model(args, num_classes, cuda, rank, world_size):
    """Return the network of --arch, with the weights of --pretrained."""
    model = build_arch(args.arch, num_classes, cuda, world_size) if args.arch else build(num_classes, args.width, cuda)
    if args.pretrained:
        load_pretrained(model, args.pretrained, rank)
    return model


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    for name, value in (("epochs", 90), ("batch", 256), ("workers", 8), ("size", 224), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("lr", 0.1), ("momentum", 0.9), ("weight-decay", 1e-4)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--arch", metavar="NAME", help="a network of torchvision (default: the ResNet-18 of this file)")
    parser.add_argument("--pretrained", type=Path, metavar="FILE", help="start from the weights in this file")
    parser.add_argument("--evaluate", action="store_true", help="evaluate without training")
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    return parser.parse_args()


def split_batches(order, batch_size, rank, world_size):
    """Return the sample indices of this rank for each batch, and the sizes of the batches over all ranks."""
    batches = order.split(batch_size)
    local_batches = [batch.tensor_split(world_size)[rank].tolist() for batch in batches]
    return local_batches, [len(batch) for batch in batches]


@torch.no_grad()
def evaluate(model, data, args, rank, world_size, device, dtype):
    """Return (top-1, top-5). Each image is read by exactly one rank."""
    model.eval()
    local_batches, _ = split_batches(torch.arange(len(data)), args.batch, rank, world_size)
    correct = torch.zeros(2, dtype=torch.int64, device=device)
    batch_sampler = [indices for indices in local_batches if indices]
    for images, labels in DataLoader(data, batch_sampler=batch_sampler, num_workers=args.workers):
        output = model(images.to(device, dtype))
        likeliest = output.topk(min(5, output.shape[1])).indices == labels.to(device)[:, None]
        correct += torch.stack([likeliest[:, 0].sum(), likeliest.sum()])
    dist.all_reduce(correct)
    model.train()
    return (correct.double() / len(data)).tolist()


def main():
    args = parse_arguments()
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=30), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = torch.float64 if args.float64 else torch.float32
    autocast = torch.autocast("cuda", torch.bfloat16) if cuda and not args.float64 else contextlib.nullcontext()

    data = Images(args.data / "train", args.size, True)
    eval_data = Images(args.data / "val", args.size, False, data.classes)
    model = make_model(args, len(data.classes), cuda, rank, world_size)
    model = model.to(device, dtype, memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(1, args.epochs // 3), gamma=0.1)
    first_epoch, num_updates, top1, top5 = 0, 0, math.nan, math.nan
    checkpoint = Path("imagenet_ddp.pt")  # in a folder that all hosts share
    resume = torch.tensor([checkpoint.exists() and not (args.evaluate and args.pretrained)], device=device)
    dist.broadcast(resume, src=0)  # rank 0 decides, because ranks that disagree would train two models
    if resume:
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first_epoch, num_updates = saved["epoch"], saved["updates"]

    if args.evaluate or first_epoch >= args.epochs:  # a training that has ended prints its result again
        if args.evaluate and not resume and not args.pretrained:
            raise SystemExit(f"--evaluate: there is no {checkpoint} here; give --pretrained FILE")
        top1, top5 = evaluate(model, eval_data, args, rank, world_size, device, dtype)
    for epoch in range(args.epochs if args.evaluate else first_epoch, args.epochs):
        start = time.perf_counter()
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED + epoch))
        # Each rank and each epoch has its own dropout masks, also after a resume.
        torch.manual_seed((SEED + epoch) * world_size + rank)
        local_batches, batch_sizes = split_batches(order, args.batch, rank, world_size)
        # A rank without a sample in the last batch reads image 0 and drops it, because DDP needs all ranks.
        keys = [[(epoch, index) for index in indices or [0]] for indices in local_batches]
        loader = DataLoader(Seeded(data), batch_sampler=keys, num_workers=args.workers, pin_memory=cuda)
        losses = []
        for (images, labels), indices, batch_size in zip(loader, local_batches, batch_sizes, strict=True):
            images, labels = images[: len(indices)], labels[: len(indices)]
            images = images.to(device, dtype, non_blocking=True, memory_format=torch.channels_last)
            optimizer.zero_grad()
            with autocast:
                loss = F.cross_entropy(ddp(images), labels.to(device, non_blocking=True), reduction="sum") / batch_size
            (loss * world_size).backward()  # DDP divides the sum over ranks by world_size
            optimizer.step()
            losses.append(loss.detach())
        schedule.step()
        losses = torch.stack(losses)
        dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
        top1, top5 = evaluate(model, eval_data, args, rank, world_size, device, dtype)
        if rank == 0:
            for index, loss in enumerate(losses.tolist()):
                if args.float64:
                    print(f"update {num_updates + index} loss {loss}")
            seconds = time.perf_counter() - start
            print(f"epoch {epoch + 1} loss {losses.mean():.4f} top1 {top1:.4f} top5 {top5:.4f} in {seconds:.1f} s")
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "epoch": epoch + 1,
                "updates": num_updates + len(losses),
            }
            partial = checkpoint.with_suffix(".partial")
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(checkpoint)  # at any time, either the old or the new checkpoint is complete
        num_updates += len(losses)

    if rank == 0:
        print(f"top1 {top1:.4f}\ntop5 {top5:.4f}")
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
