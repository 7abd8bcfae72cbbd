import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU())
        self.box_head = nn.Linear(40, 4)
        self.cls_head = nn.Linear(40, 3)

    def forward(self, x):
        h = self.backbone(x)
        return self.box_head(h), self.cls_head(h)


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad = flag


def batches(rank, count, size=12):
    g = torch.Generator().manual_seed(31 + rank)
    for _ in range(count):
        x = torch.randn(size, 24, generator=g)
        yield x, x[:, :4] * x[:, 4:8], x[:, 8:11].argmax(1)


def criterion(outputs, boxes, labels):
    return F.smooth_l1_loss(outputs[0], boxes) + F.cross_entropy(outputs[1], labels)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = BoxNet()
    set_trainable(net.backbone, False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for iteration, (x, boxes, labels) in enumerate(batches(rank, 24)):
        if iteration == 8:
            set_trainable(net.backbone, True)
            model = DistributedDataParallel(net)
        loss = criterion(model(x), boxes, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and iteration % 6 == 5:
            print(f"iteration {iteration + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
