"""GRPO on a toy task: repeat the prompt token, one step higher each time."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

VOCAB, ANSWER = 12, 5
GROUP = 8               # completions for each prompt
PROMPTS_PER_STEP = 6    # per process
EPOCHS = 5
CLIP, BETA = 0.2, 0.01


class Policy(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


@torch.no_grad()
def rollout(model, prompts):
    ids = prompts[:, None]
    for _ in range(ANSWER):
        probs = torch.softmax(model(ids)[:, -1], dim=-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
    return ids


def reward_fn(sequences):
    wanted = (sequences[:, :1] + torch.arange(1, ANSWER + 1)) % VOCAB
    return (sequences[:, 1:] == wanted).float().mean(dim=1)


def token_logps(logits, sequences):
    return torch.log_softmax(logits, dim=-1).gather(2, sequences[:, 1:, None]).squeeze(2)


def grpo_loss(policy, ref, sequences, old_logps, advantages):
    logits = policy(sequences[:, :-1])
    logps = token_logps(logits, sequences)
    with torch.no_grad():
        ref_logps = token_logps(ref(sequences[:, :-1]), sequences)
    ratio = (logps - old_logps).exp()
    adv = advantages[:, None]
    surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv)
    kl = (ref_logps - logps).exp() - (ref_logps - logps) - 1
    return -(surrogate - BETA * kl).mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(9)
    policy = DistributedDataParallel(Policy())
    ref = Policy()
    ref.load_state_dict(policy.module.state_dict())
    ref.requires_grad_(False)
    torch.manual_seed(9000 + rank)      # every process samples its own completions

    prompts = torch.arange(240) % VOCAB
    sampler = DistributedSampler(prompts, shuffle=True, seed=9)
    loader = DataLoader(prompts, batch_size=PROMPTS_PER_STEP, sampler=sampler)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3, weight_decay=0.0)

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            sequences = rollout(policy.module, batch.repeat_interleave(GROUP))
            rewards = reward_fn(sequences)
            grouped = rewards.view(-1, GROUP)
            advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
            with torch.no_grad():
                old_logps = token_logps(policy.module(sequences[:, :-1]), sequences)

            for _ in range(2):      # inner updates
                loss = grpo_loss(policy, ref, sequences, old_logps, advantages.flatten())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()

            step += 1
            if step % 10 == 0:
                stats = torch.stack([rewards.mean(), loss.detach()])
                dist.all_reduce(stats)
                stats /= world
                if rank == 0:
                    print(f"step {step:4d}  reward {stats[0]:.4f}  loss {stats[1]:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
