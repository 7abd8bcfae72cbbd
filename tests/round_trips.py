"""Helpers for the tests of `--save-async`: save from device memory under every mesh, and resume some of them.

The training runs on CPU. For a background save, its tensors are those of a simulated GPU (simulated_gpu.py). So saving
uses the code path of CUDA.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import everyrank.checkpoint.saver as saver
import zoo
from checkpointing import TrainingSession, assert_equal_tensors, read_checkpoint, schedule, step_folder
from everyrank import Workload, parse_layout
from everyrank.builtin import DECODER_EXPERTS, DECODER_PLAN, Decoder, DecoderShape
from everyrank.checkpoint import resume
from everyrank.layout import STRATEGIES
from everyrank.parallel.mesh import local_tensor
from everyrank.runs import checkpoint_named, checkpoints_of
from everyrank.world import World
from simulated_gpu import simulated_gpus, to_simulated_gpu

FIRST_SAVE, SECOND_SAVE, END_STEP = 1, 2, 3  # the steps of the two checkpoints, and the number of updates
# All layouts compare the files of both checkpoints bit by bit, so it is enough to resume these layouts.
RESUMED = ("zero1", "local_sgd", "fsdp:tensor=2", "pipeline:shard=2", "pipeline:replicate=2,tensor=2", "ddp:expert=2")
NOT_TESTED = {"horovod": "Horovod starts its own ranks; its training state is that of ddp"}


def meshes(size: int) -> list[str]:
    """Return a layout for each mesh that `size` ranks allow: a strategy with any of its further axes, of degree 2."""
    return [
        ":".join([name, ",".join(f"{axis}=2" for axis in axes)]).rstrip(":")
        for name, row in STRATEGIES.items()
        if row.axis is not None and name not in NOT_TESTED
        for num_axes in range(len(row.also_axes) + 1)
        for axes in itertools.combinations(row.also_axes, num_axes)
        if 2**num_axes <= size
    ]


class LongSentences(zoo.SentencesWithPositions):
    """SentencesWithPositions of 16 tokens: ({"tokens": (16,), "positions": (16,)}, next tokens (16,))."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.tokens = torch.randint(0, 16, (length, 17), generator=torch.Generator().manual_seed(4))

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"tokens": self.tokens[index, :16], "positions": torch.arange(16)}, self.tokens[index, 1:]


def workload_of(layout_text: str, size: int) -> Workload:
    """Return a small decoder that eight ranks can split along each axis. It has experts if the layout splits them."""
    layout = parse_layout(layout_text)
    num_blocks = layout.mesh(size).get("pipeline", 1)
    shape = {"num_blocks": num_blocks, "num_heads": 8, "width": 16, "hidden": 32, "vocabulary": 16, "tied": True}
    layout_fields: dict[str, Any] = {"tensor_plan": DECODER_PLAN}
    if "expert" in layout_text:
        shape["experts"] = 8
        tensor_plan = {name: style for name, style in DECODER_PLAN.items() if ".feed" not in name}
        layout_fields = {"tensor_plan": tensor_plan, "experts": DECODER_EXPERTS}
    if layout.strategy != "local_sgd":  # its replicas would each have their own average
        layout_fields["ema_decay"] = 0.9
    common_fields = {
        "model": lambda: Decoder(DecoderShape(**shape)),
        "train_data": lambda: LongSentences(40),
        "global_batch": 8,
    }
    return zoo.workload("decoder", "adamw", schedule=schedule, eval_data=None, **common_fields, **layout_fields)


# --- mistakes in the code that saves, which a round trip has to detect


def _without_copy(tensor: Tensor) -> Tensor:
    """Return a CPU tensor that shares the memory of the device."""
    local: Any = local_tensor(tensor)
    memory = getattr(local, "memory", local)
    if not isinstance(tensor, DTensor):
        return memory
    mesh = saver._on_cpu(tensor.device_mesh)
    return DTensor.from_local(
        memory, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@contextlib.contextmanager
def _device_memory_not_copied() -> Iterator[None]:
    """Save tensors that share the memory of the device, not copies."""
    with mock.patch.object(saver, "_copied", _without_copy):
        yield


@contextlib.contextmanager
def _no_synchronize() -> Iterator[None]:
    """Save without waiting for the device."""
    with mock.patch.object(torch.cuda, "synchronize"):
        yield


@contextlib.contextmanager
def _buffers_reused_too_early() -> Iterator[None]:
    """Copy each checkpoint into the same host buffers, even while the previous one is being written."""
    copies_on_cpu, buffers = saver.copies_on_cpu, dict[str, Tensor]()

    def copy_to_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in copies_on_cpu(tensors).items():
            local_tensor(buffers.setdefault(name, tensor)).copy_(local_tensor(tensor))
        return buffers

    with mock.patch.object(saver, "copies_on_cpu", copy_to_buffers), mock.patch.object(saver.Saver, "finish"):
        yield


@contextlib.contextmanager
def _first_ranks_of_mesh() -> Iterator[None]:
    """Replace the ranks of each submesh by the first ranks of the world. Earlier versions had this mistake."""

    def mesh_of_first_ranks(mesh: DeviceMesh) -> DeviceMesh:
        ranks = torch.arange(mesh.mesh.numel()).reshape(mesh.mesh.shape)
        return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)

    with mock.patch.object(saver, "_twin_on_cpu", mesh_of_first_ranks):
        yield


@contextlib.contextmanager
def _shards_treated_as_replicas() -> Iterator[None]:
    """Choose the rank that writes a tensor only by the tensor's name, not by its shard."""
    with mock.patch.object(saver, "_part", return_value=[]):
        yield


MISTAKES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "the device's memory is handed out": _device_memory_not_copied,
    "nobody waits for the device": _no_synchronize,
    "a buffer is filled again too early": _buffers_reused_too_early,
    "a part of a mesh is its first ranks": _first_ranks_of_mesh,
    "parts are taken for copies": _shards_treated_as_replicas,
}

# --- the round trip


def _to_simulated_gpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as a training on CUDA has them.

    The step counts of torch's optimizers, Python numbers and random generators stay on the host.
    """
    host_suffixes = ("/step", "#int", "#float", "#bool")
    return {
        name: tensor if name.startswith("generators/") or name.endswith(host_suffixes) else to_simulated_gpu(tensor)
        for name, tensor in tensors.items()
    }


class _DelayedWrite:
    """A replacement for `saver.write` that delays background writes.

    The first background write waits for `gates[0]`, and the second for `gates[1]`. `num_bytes` is the local size of
    the latest one.
    """

    def __init__(self) -> None:
        self.gates, self.write_index = [threading.Event(), threading.Event()], itertools.count()
        self.write, self.num_bytes = saver.write, 0

    def __call__(self, tensors: dict[str, Tensor], *other_args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.num_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors.values())
            assert self.gates[next(self.write_index)].wait(60)
        return self.write(tensors, *other_args)


def save_while_training(world: World, layout: str, folder: Path, mistake: str = "") -> tuple[int, list[str], bool]:
    """Train, and save two steps both synchronously on CPU and in the background from a simulated GPU.

    Return the bytes that this rank copied, the waits of the host, and whether the training continued during the writes.
    """
    session = TrainingSession(world, workload_of(layout, world.size), layout)
    session.train(0, FIRST_SAVE)
    sync_saver = session.make_saver(folder / "at once")
    sync_saver.save(FIRST_SAVE, {})
    delayed_write, tensors_of = _DelayedWrite(), saver.tensors_of
    with contextlib.ExitStack() as stack:
        waits = stack.enter_context(simulated_gpus())
        stack.enter_context(mock.patch.object(saver, "write", delayed_write))
        stack.enter_context(mock.patch.object(saver, "tensors_of", lambda *args: _to_simulated_gpu(tensors_of(*args))))
        stack.callback(lambda: [gate.set() for gate in delayed_write.gates])
        if mistake:
            stack.enter_context(MISTAKES[mistake]())
        async_saver = session.make_saver(folder / "later", in_background=True)
        async_saver.save(FIRST_SAVE, {})
        session.train(FIRST_SAVE, SECOND_SAVE)
        training_continued = not checkpoints_of(async_saver.run)
        with mock.patch.object(saver, "tensors_of", tensors_of):
            sync_saver.save(SECOND_SAVE, {})
        # if the next `save` did not wait for the previous one, it would copy its tensors before the timer ends
        timer = threading.Timer(0.2, delayed_write.gates[0].set)
        timer.start()
        async_saver.save(SECOND_SAVE, {})
        timer.join()
        session.train(SECOND_SAVE, END_STEP)
        training_continued = training_continued and len(checkpoints_of(async_saver.run)) < 2
        delayed_write.gates[1].set()
        assert async_saver.thread is not None
        async_saver.thread.shutdown()
        async_saver.finish()
        return delayed_write.num_bytes, list(waits), training_continued


def resume_both(world: World, layout: str, saved_by: tuple[str, int], folder: Path) -> list[str]:
    """Resume from the synchronous and from the background checkpoint. Return the names of local tensors that differ.

    `saved_by` is the layout and the number of ranks of the training that saved.
    """
    resumed_tensors: list[dict[str, Tensor]] = []
    for name in ("at once", "later"):
        session = TrainingSession(world, workload_of(*saved_by), layout)
        checkpoint = checkpoint_named(step_folder(folder / name, SECOND_SAVE))
        assert resume(session.prepared, world, checkpoint, session.metadata()) == SECOND_SAVE
        resumed_tensors.append(session.state()[0])
    sync_tensors, async_tensors = resumed_tensors
    assert sync_tensors.keys() == async_tensors.keys()
    return [
        name
        for name, tensor in sync_tensors.items()
        if not torch.equal(tensor.nan_to_num(), async_tensors[name].nan_to_num())
    ]


def compare_checkpoints(folder: Path) -> int:
    """Check that background and synchronous checkpoints are bitwise equal. Return the bytes of one checkpoint."""
    for step in (FIRST_SAVE, SECOND_SAVE):
        sync_checkpoint, async_checkpoint = (
            checkpoint_named(step_folder(folder / name, step)) for name in ("at once", "later")
        )
        sync_tensors, sync_values = read_checkpoint(sync_checkpoint)
        async_tensors, async_values = read_checkpoint(async_checkpoint)
        assert_equal_tensors(sync_tensors, async_tensors)
        assert sync_values == async_values
    return sum(tensor.nbytes for tensor in sync_tensors.values())


def round_trip(ranks: Any, size: int, layout: str, folder: Path, mistake: str = "") -> None:
    """Save twice during a training and compare the checkpoints. Resume the layouts in `RESUMED`."""
    rank_results = ranks(size, save_while_training, layout, folder, mistake)
    assert all(training_continued for _, _, training_continued in rank_results)
    num_bytes = compare_checkpoints(folder)
    assert all(waits == ["synchronize"] * 2 for _, waits, _ in rank_results), "one wait for each save, not each tensor"
    assert sum(copied_bytes for copied_bytes, _, _ in rank_results) == num_bytes, "only one rank copies each shard"
    if layout in RESUMED and size == 4:
        assert ranks(4, resume_both, layout, (layout, 4), folder) == [[]] * 4
        assert ranks(1, resume_both, "single", (layout, 4), folder) == [[]]
