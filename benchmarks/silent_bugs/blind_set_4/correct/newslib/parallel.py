import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def start():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def stop():
    dist.destroy_process_group()


@torch.no_grad()
def broadcast_module(module):
    for t in list(module.parameters()) + list(module.buffers()):
        dist.broadcast(t, src=0)


@torch.no_grad()
def mean_gradients(module):
    grads = [p.grad for p in module.parameters()]
    flat = _flatten_dense_tensors(grads)
    work = dist.all_reduce(flat, async_op=True)
    work.wait()
    flat /= dist.get_world_size()
    for g, new in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(new)
