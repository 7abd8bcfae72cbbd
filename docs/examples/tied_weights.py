"""A small language model, and a parallelize function (FSDP2) with a silent mistake: it unties the tied weights.

    everyrank verify docs/examples/tied_weights.py --layout docs/examples/tied_weights.py:shard=2 --processes 2

Several training frameworks had this mistake: https://github.com/verl-project/verl/issues/7834,
https://github.com/Modalities/modalities/issues/357, https://github.com/mosaicml/composer/pull/1856
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from everyrank import Workload

VOCABULARY, WIDTH = 20, 32


class LanguageModel(nn.Module):
    """Tokens (B, T) -> logits (B, T, VOCABULARY). Embedding and head share one tensor."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        """Return the logits of the next token, (B, T, VOCABULARY)."""
        hidden = self.embedding(tokens)
        return self.head(hidden + self.body(hidden)) / 4


def parallelize(model, mesh):
    """Build the model on the meta device, allocate it, shard it with FSDP2, and load a full state dict."""
    weights = model.state_dict()  # as it would come from a checkpoint
    with torch.device("meta"):
        model = LanguageModel()
    model.to_empty(device="cpu")  # the mistake: embedding and head get a tensor each
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    return model


def loss(output, target):
    """Return the sum over all tokens, and their number."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def sequences(num_sequences, seed):
    """Return a dataset of tokens (N, 12) that count up by three, and the next tokens (N, 12)."""
    first = torch.randint(0, VOCABULARY, (num_sequences, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (first + 3 * torch.arange(13)) % VOCABULARY
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


workload = Workload(
    name="tied",
    model=LanguageModel,
    train_data=lambda: sequences(256, seed=1),
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
    global_batch=16,
)
