import torch
import torch.distributed as dist
from torch import nn

NOISE, BATCH, CRITIC_STEPS, ROUNDS = 4, 32, 3, 15


def mean_gradients(params):
    grads = [p.grad for p in params]
    flat = nn.utils.parameters_to_vector(grads)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), grads)


def same_start(*modules):
    for module in modules:
        for t in module.state_dict().values():
            dist.broadcast(t, 0)


def real(g):
    angle = torch.randint(0, 8, (BATCH, 1), generator=g) * 0.785
    return torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(BATCH, 2, generator=g)


def penalty(critic, a, b, g):
    u = torch.rand(len(a), 1, generator=g)
    x = (u * a + (1 - u) * b).requires_grad_()
    (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).pow(2).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    maker = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    same_start(maker, critic)
    make_opt = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.0, 0.9))
    critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    g = torch.Generator().manual_seed(900 + rank)
    for n in range(ROUNDS):
        for _ in range(CRITIC_STEPS):
            a = real(g)
            with torch.no_grad():
                b = maker(torch.randn(BATCH, NOISE, generator=g))
            loss = critic(b).mean() - critic(a).mean() + 10 * penalty(critic, a, b, g)
            critic_opt.zero_grad()
            loss.backward()
            mean_gradients(list(critic.parameters()))
            critic_opt.step()
        critic.requires_grad_(False)
        cheat = -critic(maker(torch.randn(BATCH, NOISE, generator=g))).mean()
        make_opt.zero_grad()
        cheat.backward()
        critic.requires_grad_(True)
        mean_gradients(list(maker.parameters()))
        make_opt.step()
        if rank == 0 and n % 5 == 4:
            print(f"round {n + 1}: critic {loss.item():.4f} maker {cheat.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
