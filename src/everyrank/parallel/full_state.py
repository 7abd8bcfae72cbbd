"""Gather the full state dict of a model whose tensors are spread over ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from everyrank.parallel.file_backed import file_backed
from everyrank.parallel.mesh import full_tensor
from everyrank.parallel.parallelize import ParallelModel
from everyrank.parallel.pipeline.blocks import RemoteBlock
from everyrank.parallel.pipeline.stage import Stages

__all__ = ["full_state_dict", "quiet_logger", "replicated_state_dict", "state_tensors", "without_advice"]


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict. What a `get_extra_state` returns may be any other value."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def replicated_state_dict(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Return the state of a replicated model: on rank 0's CPU, {} elsewhere."""
    if rank != 0:
        return {}
    return {name: tensor.detach().cpu().clone() for name, tensor in state_tensors(model).items()}


def full_state_dict(parallel: ParallelModel, stages: Stages | None = None) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers: on rank 0's CPU, {} elsewhere. A collective.

    Sharded tensors are gathered one at a time; blocks of other `stages` are sent to rank 0. For a model with meta=true,
    which does not fit into memory, the tensors are stored in files.
    """
    model, mesh = parallel.model, parallel.mesh
    rank, group = mesh.world.rank, mesh.world.group
    keep = file_backed if parallel.is_meta else _on_cpu
    result: dict[str, Tensor] = {}
    sends = stages is not None and rank != 0 and mesh.is_first("replicate", "shard", "context", "tensor")
    for name, tensor in state_tensors(model).items():
        with without_advice():
            whole = full_tensor(tensor)
        if rank == 0:
            result[name] = keep(whole)
        elif sends and stages is not None and name.startswith(f"{stages.path}."):
            dist.send(whole.detach().contiguous(), dst=0, group=group)
    if rank == 0:
        for block, absent in model.named_modules():
            if isinstance(absent, RemoteBlock):
                for name, (shape, dtype) in absent.held_elsewhere.items():
                    received = torch.empty(shape, dtype=dtype, device=mesh.world.device)
                    dist.recv(received, src=mesh.rank_at(pipeline=absent.coordinate), group=group)
                    result[f"{block}.{name}"] = keep(received)
    return result


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def without_advice() -> contextlib.AbstractContextManager[None]:
    """Silence torch's warning about gathering over two axes one after the other, which is intended here."""
    return quiet_logger("torch.distributed.tensor._redistribute", logging.ERROR)


@contextlib.contextmanager
def quiet_logger(name: str, level: int) -> Generator[None]:
    """Let a logger of torch's print only messages of at least this level.

    By a filter, because `setLevel` also clears the caches of all loggers, of which torch has hundreds.
    """
    logger = logging.getLogger(name)

    def is_severe(record: logging.LogRecord) -> bool:
        return record.levelno >= level

    logger.addFilter(is_severe)
    try:
        yield
    finally:
        logger.removeFilter(is_severe)
