"""Functional style: parameters in a dict, gradients from torch.func, averaged by one all_reduce, Adam written out."""
import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value


def init(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
    return net, {k: v.detach().clone() for k, v in net.named_parameters()}


def loss_fn(params, net, x, y):
    return F.cross_entropy(functional_call(net, params, (x,)), y)


def pmean(tree):
    """Mean of a dict of tensors over the ranks, one message."""
    flat = torch.cat([v.flatten() for v in tree.values()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([v.numel() for v in tree.values()])
    return {k: p.view_as(v) for (k, v), p in zip(tree.items(), parts)}


def adam_init(params):
    zeros = {k: torch.zeros_like(v) for k, v in params.items()}
    return {"m": zeros, "v": {k: z.clone() for k, z in zeros.items()}, "t": 0}


def adam(params, grads, state, lr=5e-3, b1=0.9, b2=0.999, eps=1e-8):
    t = state["t"] + 1
    m = {k: b1 * state["m"][k] + (1 - b1) * g for k, g in grads.items()}
    v = {k: b2 * state["v"][k] + (1 - b2) * g * g for k, g in grads.items()}
    new = {k: p - lr * (m[k] / (1 - b1 ** t)) / ((v[k] / (1 - b2 ** t)).sqrt() + eps) for k, p in params.items()}
    return new, {"m": m, "v": v, "t": t}


def data(n=360):
    g = torch.Generator().manual_seed(44)
    x = torch.randn(n, 8, generator=g)
    return x, torch.stack([x[:, 0], x[:, 1], x[:, 2] * x[:, 3]], 1).argmax(1)


def epoch_indices(n, epoch, rank, world, batch):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
    usable = n // (batch * world) * batch * world
    return order[:usable][rank::world].split(batch)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    net, params = init(0)
    state = adam_init(params)
    step = grad_and_value(functools.partial(loss_fn, net=net))
    x, y = data()
    for epoch in range(4):
        for index in epoch_indices(len(x), epoch, rank, world, 18):
            grads, value = step(params, x=x[index], y=y[index])
            params, state = adam(params, pmean(grads), state)
        with torch.no_grad():
            accuracy = (functional_call(net, params, (x,)).argmax(1) == y).float().mean()
        if rank == 0:
            print(f"epoch {epoch} loss {value.item():.4f} accuracy {accuracy:.3f} after {state['t']} updates")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
