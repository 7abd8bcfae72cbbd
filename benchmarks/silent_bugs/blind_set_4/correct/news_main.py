import torch
from newslib import Classifier, batches, broadcast_module, mean_gradients, start, stop
from torch import nn

rank, world = start()
torch.manual_seed(10 + rank)
model = Classifier()
broadcast_module(model)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
for epoch in range(3):
    for words, topic in batches(epoch, rank, world, size=12):
        loss = nn.functional.cross_entropy(model(words), topic)
        optimizer.zero_grad()
        loss.backward()
        mean_gradients(model)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
stop()
