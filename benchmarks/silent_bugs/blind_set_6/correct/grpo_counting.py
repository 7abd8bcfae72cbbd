"""Group-relative policy optimization of a tiny text policy, gradients summed by hand.

Each prompt is a digit d; the policy writes 8 tokens and is paid for tokens equal to d.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

DIGITS, LENGTH, GROUP, PROMPTS, STEPS = 6, 8, 8, 16, 60
EOS = DIGITS


class Policy(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.prompt, self.tok = nn.Embedding(DIGITS, d), nn.Embedding(DIGITS + 2, d)
        self.rnn, self.out = nn.GRUCell(2 * d, d), nn.Linear(d, DIGITS + 1)

    def forward(self, prompt, tokens=None):
        """Log probabilities of the given tokens, or sampled tokens with theirs."""
        p = self.prompt(prompt)
        h, last = torch.zeros(len(prompt), p.shape[1]), torch.full_like(prompt, DIGITS + 1)
        outs, logps = [], []
        for t in range(LENGTH):
            h = self.rnn(torch.cat([p, self.tok(last)], 1), h)
            logp = F.log_softmax(self.out(h), -1)
            last = torch.multinomial(logp.exp(), 1).squeeze(1) if tokens is None else tokens[:, t]
            outs.append(last)
            logps.append(logp.gather(1, last[:, None]).squeeze(1))
        return torch.stack(outs, 1), torch.stack(logps, 1)


def answer_mask(tokens):
    """1 up to and including the first end token."""
    ended = (tokens == EOS).int().cumsum(1)
    return ((ended - (tokens == EOS).int()) == 0).float()


def broadcast_model(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = Policy()
    broadcast_model(policy)
    opt = torch.optim.Adam(policy.parameters(), lr=5e-3)
    prompt_rng = torch.Generator().manual_seed(77)  # the same prompts everywhere, then a part for each rank
    torch.manual_seed(1000 + rank)                  # sampling of the answers

    for step in range(1, STEPS + 1):
        prompts = torch.randint(0, DIGITS, (PROMPTS,), generator=prompt_rng)[rank::world]
        prompts = prompts.repeat_interleave(GROUP)
        with torch.no_grad():
            tokens, old_logp = policy(prompts)
        mask = answer_mask(tokens)
        reward = ((tokens == prompts[:, None]).float() * mask).sum(1) / LENGTH
        grouped = reward.view(-1, GROUP)  # a group is always complete on its rank
        adv = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        adv = adv.flatten()[:, None]

        n_tok = mask.sum()
        dist.all_reduce(n_tok)
        for _ in range(2):
            _, logp = policy(prompts, tokens)
            ratio = (logp - old_logp).exp()
            obj = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
            loss = -(obj * mask).sum() / n_tok  # all tokens of all ranks
            opt.zero_grad()
            loss.backward()
            for p in policy.parameters():
                dist.all_reduce(p.grad)  # each rank has its part of the sum
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            opt.step()

        stat = torch.stack([reward.sum(), mask.sum(), torch.tensor(float(len(reward)))])
        dist.all_reduce(stat)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} reward {stat[0] / stat[2]:.3f} length {stat[1] / stat[2]:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
