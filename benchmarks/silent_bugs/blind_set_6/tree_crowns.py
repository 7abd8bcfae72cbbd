"""Tree crown detection on aerial tiles: one box per grid cell, precision and recall of the boxes every epoch."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CELL, CELLS = 8, 5
TILE = CELL * CELLS


class Tiles(Dataset):
    """Round crowns on a ground of changing brightness. Later tiles of a flight are denser and darker."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(TILE), torch.arange(TILE), indexing="ij")
        self.image, self.boxes = [], []
        for i in range(n):
            density = 0.1 + 0.4 * i / n
            image = 0.6 * i / n + 0.35 * torch.randn(TILE, TILE, generator=g)
            boxes = []
            for cell in torch.nonzero(torch.rand(CELLS, CELLS, generator=g) < density):
                cy, cx = (cell * CELL + torch.randint(2, CELL - 2, (2,), generator=g)).tolist()
                r = torch.randint(2, 5, (1,), generator=g).item()
                image = image + ((yy - cy) ** 2 + (xx - cx) ** 2 <= r * r) * 1.2
                boxes.append([cx - r, cy - r, cx + r, cy + r])
            self.image.append(image[None])
            self.boxes.append(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4))

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        target = torch.zeros(5, CELLS, CELLS)
        for box in self.boxes[i]:
            cx, cy = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
            gx, gy = int(cx // CELL), int(cy // CELL)
            target[0, gy, gx] = 1
            target[1:, gy, gx] = torch.stack([cx / CELL - gx, cy / CELL - gy, (box[2] - box[0]) / CELL,
                                              (box[3] - box[1]) / CELL])
        return i, self.image[i], target


class CrownNet(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        layers, c = [], 1
        for _ in range(3):
            layers += [nn.Conv2d(c, ch, 3, stride=2, padding=1), nn.GroupNorm(4, ch), nn.ReLU()]
            c = ch
        self.net = nn.Sequential(*layers, nn.Conv2d(ch, 32, 1), nn.ReLU(), nn.Conv2d(32, 5, 1))

    def forward(self, x):
        return self.net(x)


def decode(out, threshold=0.5):
    """Boxes (x0, y0, x1, y1) of the cells above the threshold."""
    keep = torch.nonzero(out[0].sigmoid() > threshold)
    boxes = []
    for gy, gx in keep.tolist():
        dx, dy, w, h = out[1:, gy, gx].tolist()
        cx, cy = (gx + dx) * CELL, (gy + dy) * CELL
        boxes.append([cx - w * CELL / 2, cy - h * CELL / 2, cx + w * CELL / 2, cy + h * CELL / 2])
    return torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)


def iou(a, b):
    lt = torch.maximum(a[:, None, :2], b[None, :, :2])
    rb = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = lambda x: (x[:, 2:] - x[:, :2]).clamp(min=0).prod(-1)
    return inter / (area(a)[:, None] + area(b)[None] - inter + 1e-6)


def evaluate_boxes(predictions, dataset, threshold=0.4):
    hits = n_pred = n_true = 0
    for i, boxes in predictions.items():
        truth = dataset.boxes[i]
        n_pred, n_true = n_pred + len(boxes), n_true + len(truth)
        if len(boxes) and len(truth):
            match = iou(boxes, truth) > threshold
            hits += int(min(match.any(0).sum(), match.any(1).sum()))
    return hits / max(n_pred, 1), hits / max(n_true, 1), len(predictions)


@torch.no_grad()
def validation_epoch(model, dataset, rank, world):
    model.eval()
    predictions = {}
    size = (len(dataset) + world - 1) // world
    for i in range(rank * size, min((rank + 1) * size, len(dataset))):
        predictions[i] = decode(model.module(dataset.image[i][None])[0])
    gathered = [None] * world
    dist.all_gather_object(gathered, predictions)
    predictions = {i: boxes for part in gathered for i, boxes in part.items()}
    model.train()
    return evaluate_boxes(predictions, dataset)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = Tiles(320, seed=0), Tiles(61, seed=1)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    model = DDP(CrownNet())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(8):
        sampler.set_epoch(epoch)
        for _, image, target in loader:
            out = model(image)
            obj = F.binary_cross_entropy_with_logits(out[:, 0], target[:, 0])
            box = (F.smooth_l1_loss(out[:, 1:], target[:, 1:], reduction="none") * target[:, :1]).mean()
            loss = obj + 4 * box
            opt.zero_grad()
            loss.backward()
            opt.step()
        precision, recall, tiles = validation_epoch(model, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} box_precision {precision:.4f} box_recall {recall:.4f} on {tiles} tiles", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
