import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass
class Settings:
    vocab: int = 16
    width: int = 32
    new_tokens: int = 8
    prompts: int = 4
    samples: int = 6
    updates: int = 25
    lr: float = 3e-3
    seed: int = 3


class Speaker(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])

    @torch.no_grad()
    def speak(self, ids, count, g):
        for _ in range(count):
            p = self(ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=g)], 1)
        return ids


def score(ids):
    """Rising words are liked."""
    return (ids[:, 1:] > ids[:, :-1]).float().mean(1)


class Trainer:
    def __init__(self, s):
        self.s = s
        torch.manual_seed(s.seed)
        self.policy = DistributedDataParallel(Speaker(s.vocab, s.width))
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=s.lr)
        self.g = torch.Generator().manual_seed(s.seed + 1 + dist.get_rank())

    def update(self):
        s, speaker = self.s, self.policy.module
        prompts = torch.randint(0, s.vocab, (s.prompts, 2), generator=self.g).repeat_interleave(s.samples, 0)
        said = speaker.speak(prompts, s.new_tokens, self.g)
        reward = score(said[:, 2:])
        groups = reward.view(s.prompts, s.samples)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        logits = self.policy(said[:, :-1])
        logp = logits.log_softmax(-1).gather(2, said[:, 1:, None]).squeeze(2)[:, 1:]
        ratio = (logp - logp.detach()).exp()
        loss = -(ratio * advantage[:, None]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return reward.mean().item()


def main():
    dist.init_process_group("gloo")
    settings = Settings()
    trainer = Trainer(settings)
    for n in range(settings.updates):
        reward = trainer.update()
        if dist.get_rank() == 0 and n % 6 == 0:
            print(f"update {n}: reward {reward:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
