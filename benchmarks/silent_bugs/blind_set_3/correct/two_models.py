"""Domain adaptation: encoder and classifier with two wrappers and two optimizers at different rates."""
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return self.layers(x)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, h):
        return self.fc(torch.relu(h))


def domains(n=256):
    g = torch.Generator().manual_seed(12)
    centre = torch.randn(4, 30, generator=g)
    y = torch.randint(0, 4, (n,), generator=g)
    source = centre[y] + torch.randn(n, 30, generator=g)
    target = centre[torch.randint(0, 4, (n,), generator=g)] + torch.randn(n, 30, generator=g) + 0.8
    return TensorDataset(source, y, target)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    torch.set_num_threads(1)
    data = domains()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    encoder, classifier = DDP(Encoder()), DDP(Classifier())
    opt_encoder = optim.Adam(encoder.parameters(), lr=1e-3)
    opt_classifier = optim.Adam(classifier.parameters(), lr=5e-3)
    cross_entropy = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for source, y, target in loader:
            opt_encoder.zero_grad()
            opt_classifier.zero_grad()
            h = encoder(torch.cat([source, target]))
            logits = classifier(h)
            on_source, on_target = logits.chunk(2)
            p = on_target.softmax(1)
            entropy = -(p * p.clamp(min=1e-8).log()).sum(1).mean()
            loss = cross_entropy(on_source, y) + 0.1 * entropy
            loss.backward()
            opt_encoder.step()
            opt_classifier.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} target entropy {entropy.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
