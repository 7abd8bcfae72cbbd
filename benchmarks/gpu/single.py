"""A script for one device, to port."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
inputs = torch.randn(330, 16)
targets = (inputs.sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs[:250], targets[:250]), batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(inputs[250:], targets[250:]), batch_size=32)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(3):
    model.train()
    for value, target in loader:
        value, target = value.to(device), target.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(value), target)
        loss.backward()
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for value, target in test_loader:
            correct += (model(value.to(device)).argmax(1) == target.to(device)).sum().item()
    print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {correct / len(test_loader.dataset):.3f}")
torch.save(model.state_dict(), "model.pt")
