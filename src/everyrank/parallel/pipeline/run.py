"""Runs a schedule: forward and backward of micro-batches in the stages of this rank, and messages between stages.

A stage does not know the shape of the tensor that it receives. So the first tensor for each shape of the batch (which
both sides know) is sent with a header that has its shape; later ones without.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.data import Batch
from everyrank.data.loader import map_tensors
from everyrank.errors import WorkloadError
from everyrank.layout.options import PipelineOptions
from everyrank.parallel.mesh import Mesh
from everyrank.parallel.pipeline.deferred import WeightGradQueue
from everyrank.parallel.pipeline.schedule import bubble, make_schedule
from everyrank.parallel.pipeline.stage import Stages

__all__ = ["PipelineIdle", "PipelineRun"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 10  # dtype, number of dimensions, up to eight sizes


class PipelineIdle(NamedTuple):
    """Idle time of the ranks of a pipeline.

    theory_share      idle fraction of a step if sending takes no time (schedule.py)
    seconds           time of the last step for micro-batches
    waiting_seconds   the part of it spent waiting for other ranks
    """

    theory_share: float
    seconds: float
    waiting_seconds: float


class PipelineRun:
    """Runs the stages of one rank. Stage s is on rank s % size.

    num_micro_batches   number of micro-batches in a schedule
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: Stages,
        options: PipelineOptions,
        weight_grads: WeightGradQueue,
        enter_phase: Callable[[str], None],
    ) -> None:
        self.mesh, self.stages, self.size = mesh, stages, mesh.size("pipeline")
        self.schedule, self.weight_grads, self.enter_phase = options.schedule, weight_grads, enter_phase
        self.num_micro_batches = options.microbatches or 2 * self.size
        self.shapes: dict[tuple[int, Hashable], tuple[torch.dtype, tuple[int, ...]]] = {}
        self.sent: list[tuple[Any, Tensor]] = []
        self.num_run = self.num_micro_batches
        self.seconds = self.waiting = 0.0
        # Forward and backward messages cross each other, so each direction has its own group: NCCL keeps the order of
        # all messages between two ranks of a group, and would deadlock.
        ways = [(kind, wraps) for kind in "FB" for wraps in (False, True)[: 1 + (stages.count > self.size)]]
        self.groups = {way: mesh.group("pipeline", use=f"{way[0]} {way[1]}") for way in ways}

    def run(
        self,
        batches: Sequence[Batch],
        forward: Callable[[int, int, Tensor | None], Tensor],
        backward: Callable[[int, Tensor, Tensor | None], None],
    ) -> None:
        """Run all micro-batches forward and backward.

        `forward(stage, index, received)` returns the output of a stage; `backward(index, output, gradient)` runs
        backward from it (from the loss if `gradient` is None). `index` is the index of the micro-batch.
        """
        started = time.perf_counter()
        self.waiting, self.num_run = 0.0, len(batches)
        saved_activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        schedule = _schedule(self.schedule, self.size, len(batches), self.stages.count // self.size)
        for kind, stage, index in schedule[self.mesh.coordinate["pipeline"]]:
            self.weight_grads.select(stage, index)
            # the time of waiting belongs to this action
            self.enter_phase("forward" if kind == "F" else "backward")
            key = _shapes(batches[index])
            if kind == "F":
                saved_activations[stage, index] = self._forward(stage, index, key, forward)
            elif kind == "W":
                self.weight_grads.compute(stage, index)
            else:
                self._backward(stage, index, key, backward, *saved_activations.pop((stage, index)))
        self._flush()
        self.enter_phase("optimizer")
        self.seconds = time.perf_counter() - started

    def _forward(
        self, stage: int, index: int, key: Hashable, forward: Callable[[int, int, Tensor | None], Tensor]
    ) -> tuple[Tensor | None, Tensor]:
        """Run a stage forward; return its input and output for backward."""
        received = self._receive("F", stage, index, key).requires_grad_() if stage else None
        output = forward(stage, index, received)
        if stage < self.stages.count - 1:
            self._send("F", stage, index, output, key)
        return received, output

    def _backward(
        self,
        stage: int,
        index: int,
        key: Hashable,
        backward: Callable[[int, Tensor, Tensor | None], None],
        received: Tensor | None,
        output: Tensor,
    ) -> None:
        """Run a stage backward; send the gradient of its input to the previous stage."""
        gradient = self._receive("B", stage, index, key) if stage < self.stages.count - 1 else None
        backward(index, output, gradient)
        if received is not None:
            grad = received.grad if received.grad is not None else torch.zeros_like(received)
            self._send("B", stage, index, grad, key)

    def forward_only(self, batch: Batch, run: Callable[[int, Tensor | None], tuple[Any, bool]]) -> Any:
        """Run a batch forward through all stages; return the output of the model on the last one, None elsewhere."""
        final_output = None
        for stage in self.stages.stage_numbers:
            received = self._receive("F", stage, 0, _shapes(batch)) if stage else None
            output, is_end = run(stage, received)
            if is_end:
                final_output = output
            else:
                self._send("F", stage, 0, output, _shapes(batch))
        self._flush()
        return final_output

    def idle(self) -> PipelineIdle:
        """Return the idle time of the last run."""
        chunks = self.stages.count // self.size
        return PipelineIdle(bubble(self.schedule, self.size, self.num_run, chunks), self.seconds, self.waiting)

    def _send(self, kind: str, stage: int, index: int, tensor: Tensor, key: Hashable) -> None:
        """Send a tensor from `stage` to the next (F) or previous one (B), without waiting."""
        other = stage + 1 if kind == "F" else stage - 1
        tensor = tensor.detach().contiguous()
        shape = (tensor.dtype, tuple(tensor.shape))
        if kind == "F" and self.shapes.get((stage, key)) != shape:
            if (stage, key) in self.shapes:
                raise WorkloadError(
                    f"pipeline: a block's output has shape {shape[1]} where it had {self.shapes[stage, key][1]} for "
                    "an input of the same shape; pad to one length"
                )
            self.shapes[stage, key] = shape
            sizes = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            header = torch.tensor(sizes + [0] * (_HEADER - len(sizes)), device=tensor.device)
            self._post(kind, stage, other, header, index)
        self._post(kind, stage, other, tensor, index)

    def _post(self, kind: str, stage: int, other: int, tensor: Tensor, index: int) -> None:
        work = dist.isend(tensor, self._rank(other), group=self._group(kind, stage, other), tag=self._tag(stage, index))
        self.sent.append((work, tensor))

    def _receive(self, kind: str, stage: int, index: int, key: Hashable) -> Tensor:
        """Receive the tensor for `stage` from the previous (F) or next one (B)."""
        started = time.perf_counter()
        source = stage - 1 if kind == "F" else stage + 1
        shape_of = (source, key) if kind == "F" else (stage, key)  # a gradient has the shape of its output
        if shape_of not in self.shapes:
            header = self._wait(kind, source, stage, (_HEADER,), torch.int64, index).tolist()
            self.shapes[shape_of] = _DTYPES[header[0]], tuple(header[2 : 2 + header[1]])
        dtype, shape = self.shapes[shape_of]
        tensor = self._wait(kind, source, stage, shape, dtype, index)
        self.waiting += time.perf_counter() - started
        return tensor

    def _wait(
        self, kind: str, source: int, stage: int, shape: tuple[int, ...], dtype: torch.dtype, index: int
    ) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.mesh.world.device)
        work = dist.irecv(
            tensor, self._rank(source), group=self._group(kind, source, stage), tag=self._tag(source, index)
        )
        assert work is not None
        work.wait()
        return tensor

    def _flush(self) -> None:
        """Wait until all messages have arrived."""
        started = time.perf_counter()
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
        self.waiting += time.perf_counter() - started

    def _rank(self, stage: int) -> int:
        return self.mesh.rank_at(pipeline=stage % self.size)

    def _group(self, kind: str, source: int, target: int) -> dist.ProcessGroup | None:
        return self.groups[kind, source // self.size != target // self.size]

    def _tag(self, stage: int, index: int) -> int:
        return index * self.stages.count + stage


_schedule = functools.lru_cache(maxsize=64)(make_schedule)


def _shapes(batch: Batch) -> Hashable:
    """Return the shapes of the batch, which both sides of a message know."""
    header: list[Any] = [torch.is_grad_enabled()]
    map_tensors(batch.input, lambda tensor: header.append(tuple(tensor.shape)) or tensor)
    return tuple(header)
