"""One process, no process group: a small sequence classifier. Start with `python single_process.py`."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Parity(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 24, batch_first=True)
        self.out = nn.Linear(24, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[1][-1])


def bits(n, seed):
    g = torch.Generator().manual_seed(seed)
    b = torch.randint(0, 2, (n, 6), generator=g)
    return TensorDataset(b.float().unsqueeze(-1), (b.sum(1) > 3).long())


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train = DataLoader(bits(256, 0), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(4))
    test = DataLoader(bits(90, 1), batch_size=64)
    model = Parity()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        model.train()
        for x, y in train:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        model.eval()
        with torch.no_grad():
            hits = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
        print(f"epoch {epoch} accuracy {hits / len(test.dataset):.3f}")
    torch.save(model.state_dict(), "/tmp/blind2/correct/single_process.pt")


if __name__ == "__main__":
    main()
