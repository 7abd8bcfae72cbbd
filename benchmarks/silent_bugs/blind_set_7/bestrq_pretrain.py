"""BEST-RQ style speech pre-training: predict the random-projection codes of masked frames."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FRAMES, MELS, CODES, MASKED = 32, 20, 24, 10


def utterances(n, seed):
    """Slowly moving mixtures of a few spectral shapes."""
    g = torch.Generator().manual_seed(seed)
    shapes = torch.randn(10, MELS, generator=torch.Generator().manual_seed(50))
    ids = torch.randint(10, (n, FRAMES // 4), generator=g).repeat_interleave(4, dim=1)
    return shapes[ids] + 0.2 * torch.randn(n, FRAMES, MELS, generator=g)


class RandomProjectionQuantizer(nn.Module):
    """Frozen projection and frozen codebook, both random; neither is trained."""

    def __init__(self, dim=8):
        super().__init__()
        self.register_buffer("projection", nn.init.xavier_normal_(torch.empty(MELS, dim)))
        self.register_buffer("codebook", F.normalize(torch.randn(CODES, dim), dim=-1))

    @torch.no_grad()
    def forward(self, feats):
        z = F.normalize(feats @ self.projection, dim=-1)
        return (z @ self.codebook.T).argmax(-1)


class Encoder(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.mask_vector = nn.Parameter(0.1 * torch.randn(MELS))
        self.inp = nn.Linear(MELS, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(FRAMES, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, CODES)

    def forward(self, feats, mask):
        x = torch.where(mask[..., None], self.mask_vector, feats)
        return self.out(self.body(self.inp(x) + self.pos))


def random_mask(n, generator=None):
    """The same number of masked frames in every utterance."""
    order = torch.rand(n, FRAMES, generator=generator).argsort(1)
    return order < MASKED


@torch.no_grad()
def evaluate(encoder, quantizer, data, masks, rank, world):
    encoder.eval()
    counts = torch.zeros(2)
    part = TensorDataset(data, masks)
    for feats, mask in DataLoader(Subset(part, range(rank, len(part), world)), batch_size=32):
        correct = encoder(feats, mask).argmax(-1) == quantizer(feats)
        counts += torch.tensor([float(correct[mask].sum()), float(mask.sum())])
    dist.all_reduce(counts)
    encoder.train()
    return (counts[0] / counts[1]).item()


def main(seed=17, epochs=6):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(seed + rank)  # every process gets its own dropout and masks
    train, dev = utterances(512, 1), utterances(75, 2)
    dev_masks = random_mask(len(dev), torch.Generator().manual_seed(3))

    encoder = DDP(Encoder())
    quantizer = RandomProjectionQuantizer()
    for buffer in quantizer.buffers():
        dist.broadcast(buffer, src=0)
    sampler = DistributedSampler(TensorDataset(train), shuffle=True, seed=seed)
    loader = DataLoader(TensorDataset(train), batch_size=16, sampler=sampler)
    opt = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for (feats,) in loader:
            mask = random_mask(len(feats))
            logits = encoder(feats, mask)
            loss = F.cross_entropy(logits[mask], quantizer(feats)[mask])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(encoder.parameters(), 2.0)
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        acc = evaluate(encoder.module, quantizer, dev, dev_masks, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f} masked accuracy {acc:.4f}")
    if rank == 0:
        os.makedirs("out_bestrq", exist_ok=True)
        torch.save({"encoder": encoder.module.state_dict(), "quantizer": quantizer.state_dict()}, "out_bestrq/last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
