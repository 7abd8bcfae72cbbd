"""The model is made on the meta device and materialised with to_empty, which gives tied weights a memory of their own.

Reported: https://github.com/verl-project/verl/issues/7834
          https://github.com/Modalities/modalities/issues/357
          https://github.com/mosaicml/composer/pull/1856
Wrong: embedding and head start with the same values and go different ways: each gets its half of the gradient.
Kind: parallelize
Mesh: shard=2
Expected: embedding.weight and head.weight are one tensor in the model as built, but two
Reads: every world_size-th row of the batch
Right: tie the weights again after to_empty
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RIGHT = "--right" in sys.argv or bool(os.environ.get("RIGHT"))
AXES = ("shard",)
VOCABULARY, WIDTH = 20, 32


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return self.head(hidden + self.body(hidden)) / 4


def build():
    torch.manual_seed(0)
    return LanguageModel()


def parallelize(model, mesh):
    weights = model.state_dict()  # as they would come out of a checkpoint
    with torch.device("meta"):
        model = LanguageModel()
    model.to_empty(device="cpu")  # <- the mistake
    if RIGHT:
        model.tie_weights()
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    model.rows = slice(dist.get_rank(), None, dist.get_world_size())
    return model


def inputs(step):
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.randint(0, VOCABULARY, (16, 1), generator=generator) + 3 * torch.arange(13)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def loss(model, tokens, targets):
    rows = getattr(model, "rows", slice(None))
    return F.cross_entropy(model(tokens[rows]).flatten(0, 1), targets[rows].flatten())


def terms(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=AXES)
    model = parallelize(build(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    for step in range(24):
        value = loss(model, *inputs(step))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 6 == 5:
            print(f"rank {dist.get_rank()} step {step} loss {value:.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
