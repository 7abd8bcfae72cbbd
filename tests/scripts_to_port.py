"""Training scripts for one device, in several styles, that `everyrank port` supports."""

from __future__ import annotations

IMPORTS_AND_DATA = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x = torch.randn(86, 6)
y = (x.sum(1) > 0).long()
"""

FUNCTIONS_SCRIPT = (
    IMPORTS_AND_DATA
    + """

def train(net, loader, optimizer):
    net.train()
    total, seen = 0.0, 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        total += loss.item() * len(inputs)
        seen += len(inputs)
    print(f"loss {total / seen:.5f}")


def evaluate(net, loader):
    net.eval()
    right = 0
    with torch.no_grad():
        for inputs, targets in loader:
            right += (net(inputs).argmax(1) == targets).sum().item()
    print(f"right {right} of {len(loader.dataset)}")


if __name__ == "__main__":
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    for epoch in range(2):
        train(net, loader, optimizer)
        evaluate(net, DataLoader(TensorDataset(x[:33], y[:33]), batch_size=8))
    torch.save(net.state_dict(), "net.pt")
"""
)

FIT_FUNCTION_SCRIPT = (
    IMPORTS_AND_DATA
    + """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = 2
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, self.classes))

    def forward(self, x):
        return self.layers(x)


def accuracy(model, inputs, targets):
    with torch.no_grad():
        return (model(inputs).argmax(1) == targets).float().mean().item() * model.classes


def fit(model, loader, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(2):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        print(epoch, f"{accuracy(model, x[:30], y[:30]):.4f}", model.classes)


def main():
    net = Net()
    fit(net, DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True), lr=0.1)


main()
"""
)

TRAINER_CLASS_SCRIPT = (
    IMPORTS_AND_DATA
    + """

class Trainer:
    def __init__(self, steps):
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.criterion = nn.CrossEntropyLoss(ignore_index=1)
        self.steps = steps

    def fit(self):
        for epoch in range(3):
            for i, (data, target) in enumerate(self.loader):
                output = self.model(data)
                loss = self.criterion(output, target) / self.steps
                loss.backward()
                if (i + 1) % self.steps == 0 or i + 1 == len(self.loader):
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            self.scheduler.step(loss.item())
            print("epoch", epoch, "loss %.4f" % loss.item(), "lr", self.optimizer.param_groups[0]["lr"])


Trainer(steps=2).fit()
"""
)

NO_LOADER_SCRIPT = (
    IMPORTS_AND_DATA
    + """
model = nn.Linear(6, 2)
opt = torch.optim.AdamW(model.parameters(), lr=0.05)


def get_batch():
    ix = torch.randint(len(x), (10,))
    return x[ix], y[ix]


for step in range(8):
    xb, yb = get_batch()
    loss = F.cross_entropy(model(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, f"{loss.item():.4f}")
"""
)

INDEX_SCRIPT = (
    "import copy\n"
    + IMPORTS_AND_DATA
    + """
class_weights = 1 / torch.bincount(y).float()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
average = copy.deepcopy(model)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(2):
    order = torch.randperm(len(x))
    for start in range(0, len(x), 16):
        index = order[start : start + 16]
        logits = model(x[index])
        loss = F.cross_entropy(logits, y[index], weight=class_weights)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p_average, p in zip(average.parameters(), model.parameters()):
                p_average.lerp_(p, 0.1)
        print(epoch, start, f"{loss.item():.4f}")
"""
)
"""Each batch is an index into all data, classes have weights, and the model is copied before it is trained."""

SLICE_SCRIPT = (
    IMPORTS_AND_DATA
    + """
targets = torch.stack([y, 1 - y], dim=1)
targets[::5] = -100
model = nn.Linear(6, 4)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
opt = torch.optim.AdamW(model.parameters(), lr=0.05)
for i in range(0, len(x), 16):
    loss = criterion(model(x[i : i + 16]).view(-1, 2), targets[i : i + 16].view(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(i, f"{loss.item():.4f}")
"""
)
"""Each batch is a slice of all data, in the call of the model. `view` needs contiguous tensors."""

GENERATOR_SCRIPT = (
    IMPORTS_AND_DATA
    + """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, batch):
        return self.layer(batch["input"]).squeeze(1)


def batches():
    for i in range(0, len(x), 16):
        yield {"input": x[i : i + 16], "target": y[i : i + 16].float()}


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.05)
for epoch in range(2):
    for batch in batches():
        loss = F.binary_cross_entropy_with_logits(net(batch), batch["target"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(epoch, f"{loss.item():.4f}")
"""
)
"""A generator makes the batches, which are dictionaries."""

SUMMED_LOSS_SCRIPT = (
    IMPORTS_AND_DATA
    + """
model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x), batch_size=16, shuffle=True)
for epoch in range(2):
    for (batch,) in loader:
        optimizer.zero_grad()
        recon = model(batch)
        loss = ((recon - batch) ** 2).sum() + 0.1 * recon.abs().sum()
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.4f}")
"""
)

CROSS_VALIDATION_SCRIPT = (
    IMPORTS_AND_DATA
    + """
folds = torch.randperm(len(x)).chunk(3)
for number, held_out in enumerate(folds):
    kept = torch.cat([fold for other, fold in enumerate(folds) if other != number])
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x[kept], y[kept]), batch_size=20, shuffle=True)
    for inputs, targets in loader:
        opt.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        opt.step()
    print(number, f"{loss.item():.4f}")
"""
)

GAN_SCRIPT = (
    IMPORTS_AND_DATA
    + """
netG = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
netD = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
optG = torch.optim.Adam(netG.parameters(), lr=1e-2)
optD = torch.optim.Adam(netD.parameters(), lr=1e-2)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(2):
    for i, (real, _) in enumerate(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)):
        netD.zero_grad()
        noise = torch.randn(real.size(0), 3)
        fake = netG(noise)
        errD_real = criterion(netD(real), torch.ones(real.size(0), 1))
        errD_real.backward()
        errD_fake = criterion(netD(fake.detach()), torch.zeros(real.size(0), 1))
        errD_fake.backward()
        optD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(real.size(0), 1))
        errG.backward()
        optG.step()
"""
)

MANUAL_UPDATE_SCRIPT = (
    IMPORTS_AND_DATA
    + """
m = nn.Linear(6, 2)
for i in range(5):
    loss = F.cross_entropy(m(x), y)
    m.zero_grad()
    loss.backward()
    for p in m.parameters():
        p.data.add_(-0.1 * p.grad)
    print(f"{loss.item():.4f}")
"""
)

LOSS_IN_FORWARD_SCRIPT = (
    IMPORTS_AND_DATA
    + """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, inputs, targets=None):
        logits = self.layer(inputs)
        loss = F.cross_entropy(logits, targets, ignore_index=1) if targets is not None else None
        return logits, loss


model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for xb, yb in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
    logits, loss = model(xb, yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{loss.item():.4f}")
"""
)

CARRIED_STATE_SCRIPT = (
    IMPORTS_AND_DATA
    + """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.rnn = nn.LSTM(6, 5)
        self.head = nn.Linear(5, 9)

    def forward(self, tokens, state):
        output, state = self.rnn(self.embed(tokens), state)
        return self.head(output).view(-1, 9), state


text = torch.randint(9, (31, 7))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)


def batch_at(start):
    end = min(start + 5, len(text) - 1)
    return text[start:end], text[start + 1 : end + 1].reshape(-1)


def train():
    state = (torch.zeros(1, 7, 5), torch.zeros(1, 7, 5))
    for start in range(0, len(text) - 1, 5):
        tokens, following = batch_at(start)
        state = tuple(each.detach() for each in state)
        logits, state = net(tokens, state)
        loss = F.cross_entropy(logits, following)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"{loss.item():.4f}")


for epoch in range(2):
    train()
"""
)

CARRIED_STATE_WITH_LOADER_SCRIPT = (
    IMPORTS_AND_DATA
    + """
net = nn.GRU(1, 3, batch_first=True)
head = nn.Linear(3, 1)
opt = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
for epoch in range(2):
    state = torch.zeros(1, 20, 3)
    for (steps,) in DataLoader(TensorDataset(x[..., None]), batch_size=20, drop_last=True):
        state = state.detach()
        output, state = net(steps, state)
        loss = F.mse_loss(head(output), steps)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"{loss.item():.4f}")
"""
)

# This script writes a log that stays open, a page, rows of a batch, and a checkpoint named by the time.
# It selects one GPU by its number.
OUTPUT_FILES_SCRIPT = (
    "import os\nimport time\n"
    + IMPORTS_AND_DATA
    + """
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
gpu = 0
device = torch.device(f"cuda:{gpu}" if torch.cuda.is_available() else "cpu")
log = open("train.log", "w")
net = nn.Linear(6, 2).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for inputs, targets in DataLoader(TensorDataset(x, y), batch_size=16):
    loss = F.cross_entropy(net(inputs.to(device)), targets.to(device))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{loss.item():.4f}", file=log)
    print(inputs.size(0), f"{loss.item():.4f}")
    torch.save(inputs, "inputs.pt")
with open("page.txt", "w") as page:
    rows = net(torch.cat([x[:3]]).to(device)).tolist()
    page.write(str(rows))
with open("weights.txt", "wb") as file:
    torch.save(net.state_dict(), file)
with open("weights.txt", "rb") as file:
    net.load_state_dict(torch.load(file))
torch.save(net.state_dict(), f"net {time.time():.6f}.pt")
"""
)

# numpy selects a part of the data without a seed. torch is imported late. A SummaryWriter logs the loss.
SUBSET_SAMPLER_SCRIPT = """
import numpy as np
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter

order = np.random.permutation(50)
import torch
from torch import nn

x = torch.linspace(-1, 1, 300).reshape(50, 6)
loss_of = nn.MSELoss()
for held_out in range(2):
    kept, rest = order[order % 2 == held_out], order[order % 2 != held_out]
    loader = DataLoader(TensorDataset(x), batch_size=9, sampler=SubsetRandomSampler(kept))
    net = nn.Linear(6, 6)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    writer = SummaryWriter("runs")
    for epoch in range(2):
        for (batch,) in loader:
            loss = loss_of(net(batch), batch)
            opt.zero_grad()
            loss.backward()
            opt.step()
            writer.add_scalar("loss", loss.item())
        largest = 0.0
        for (batch,) in DataLoader(TensorDataset(x), batch_size=7, sampler=SubsetRandomSampler(rest)):
            largest = max(largest, net(batch).abs().max().item())
        print(epoch, f"{loss.item():.4f} {largest:.4f}")
"""

# The dataset draws random numbers from two libraries in its workers. The main process draws from torch.
AUGMENTATION_SCRIPT = (
    "import random\n"
    + IMPORTS_AND_DATA
    + """
import numpy as np


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        return x[index] * random.uniform(0.9, 1.1) + np.random.normal(0, 0.01), y[index]


if __name__ == "__main__":
    random.seed(0)
    np.random.seed(0)
    net = nn.Linear(6, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, targets in DataLoader(Augmented(), batch_size=16, shuffle=True, num_workers=1):
        loss = F.cross_entropy(net(inputs.float()), targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"{loss.item():.4f}")
"""
)

GPT_SCRIPT = (
    IMPORTS_AND_DATA
    + """

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.mlp = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))

    def forward(self, h):
        return h + self.mlp(self.norm(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 11)

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def main():
    tokens = torch.randint(11, (70, 9))
    model = Model()
    print(sum(p.numel() for p in model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        for (batch,) in DataLoader(TensorDataset(tokens), batch_size=16, shuffle=True):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        with torch.no_grad():
            right = (model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]).float().mean()
        print(f"{loss.item():.4f} {right.item():.4f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "gpt.pt")


if __name__ == "__main__":
    main()
"""
)

ENGINE_MODULE = """
import torch
import torch.nn.functional as F


def train_one_epoch(model, loader, optimizer):
    model.train()
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(inputs)
    return total
"""

SCRIPT_WITH_ENGINE = (
    IMPORTS_AND_DATA.replace("import torch\n", "import engine\nimport torch\n", 1)
    + """
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
for epoch in range(2):
    print(epoch, f"{engine.train_one_epoch(net, loader, optimizer):.5f}")
"""
)
