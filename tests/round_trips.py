"""Checkpoints out of a device's memory and back, under every mesh: what the tests of `--save-async` share.

The training runs on CPU; when it is saved in the background, its tensors are those of a pretended device
(pretended_card.py), so that saving takes the way that it takes on CUDA.
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

import everyrank.checkpoint.saver as copies
import everyrank.checkpoint.saver as saver
import zoo
from checkpointing import Going, everything_in, same, schedule, step
from everyrank import Workload, parse_layout
from everyrank.builtin import DECODER_EXPERTS, DECODER_PLAN, Decoder, DecoderShape
from everyrank.checkpoint import resume
from everyrank.layout import STRATEGIES
from everyrank.parallel.mesh import local_tensor
from everyrank.runs import checkpoint_named, checkpoints_of
from everyrank.world import World
from pretended_card import moved_to_card, pretended_cards

FIRST, SECOND, END = 1, 2, 3  # updates done at the two checkpoints, and at the end
NOT_HERE = {"horovod": "Horovod starts its own ranks; it holds what ddp holds"}


def meshes(size: int) -> list[str]:
    """Every mesh that the table of strategies has for so many ranks: each axis that goes with it has two or one."""
    return [
        ":".join([name, ",".join(f"{axis}=2" for axis in chosen)]).rstrip(":")
        for name, row in STRATEGIES.items()
        if row.axis is not None and name not in NOT_HERE
        for count in range(len(row.also_axes) + 1)
        for chosen in itertools.combinations(row.also_axes, count)
        if 2**count <= size
    ]


class Long(zoo.SentencesWithPositions):
    """Sentences of 16 tokens and their positions: ({"tokens": (16,), "positions": (16,)}, next tokens (16,))."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.tokens = torch.randint(0, 16, (length, 17), generator=torch.Generator().manual_seed(4))

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"tokens": self.tokens[index, :16], "positions": torch.arange(16)}, self.tokens[index, 1:]


def workload_of(layout: str, size: int) -> Workload:
    """A small decoder that eight ranks can split in every way; with experts where the layout splits these."""
    chosen = parse_layout(layout)
    num_blocks = max(2, chosen.mesh(size).get("pipeline", 1))
    shape = {"num_blocks": num_blocks, "num_heads": 8, "width": 16, "hidden": 32, "vocabulary": 16, "tied": True}
    own: dict[str, Any] = {"tensor_plan": DECODER_PLAN}
    if "expert" in layout:
        shape["experts"] = 8
        plan = {key: word for key, word in DECODER_PLAN.items() if ".feed" not in key}
        own = {"tensor_plan": plan, "experts": DECODER_EXPERTS}
    if chosen.strategy != "local_sgd":  # whose replicas would have averages of their own
        own["ema_decay"] = 0.9
    common = {"model": lambda: Decoder(DecoderShape(**shape)), "train_data": lambda: Long(40), "global_batch": 8}
    return zoo.workload("decoder", "adamw", schedule=schedule, eval_data=None, **common, **own)


# --- mistakes that a round trip has to show


def _handed_out(tensor: Tensor) -> Tensor:
    """The device's own memory."""
    local: Any = local_tensor(tensor)
    memory = getattr(local, "memory", local)
    if not isinstance(tensor, DTensor):
        return memory
    mesh = copies._on_cpu(tensor.device_mesh)
    return DTensor.from_local(
        memory, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@contextlib.contextmanager
def _memory_handed_out() -> Iterator[None]:
    with mock.patch.object(copies, "_copied", _handed_out):
        yield


@contextlib.contextmanager
def _not_waited_for() -> Iterator[None]:
    with mock.patch.object(torch.cuda, "synchronize"):
        yield


@contextlib.contextmanager
def _buffers_too_early() -> Iterator[None]:
    """The host's buffers are kept, and filled again while what is in them is still being written."""
    copy, kept = copies.copies_on_cpu, dict[str, Tensor]()

    def into_kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in copy(tensors).items():
            local_tensor(kept.setdefault(name, tensor)).copy_(local_tensor(tensor))
        return kept

    with mock.patch.object(saver, "copies_on_cpu", into_kept), mock.patch.object(saver.Saver, "finish"):
        yield


@contextlib.contextmanager
def _first_ranks() -> Iterator[None]:
    """Every part of a mesh taken for that of its first ranks, as it was before November 2026."""

    def first(mesh: DeviceMesh) -> DeviceMesh:
        ranks = torch.arange(mesh.mesh.numel()).reshape(mesh.mesh.shape)
        return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)

    with mock.patch.object(copies, "_twin_on_cpu", first):
        yield


@contextlib.contextmanager
def _parts_taken_for_copies() -> Iterator[None]:
    """Who writes a tensor is asked by its name alone."""
    with mock.patch.object(copies, "_part", return_value=[]):
        yield


MISTAKES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "the device's memory is handed out": _memory_handed_out,
    "nobody waits for the device": _not_waited_for,
    "a buffer is filled again too early": _buffers_too_early,
    "a part of a mesh is its first ranks": _first_ranks,
    "parts are taken for copies": _parts_taken_for_copies,
}

# --- the trip


def _on_card(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As on CUDA: torch's optimizers keep the number of steps on the host, and so are Python's generators."""
    stay = ("/step", "#int", "#float", "#bool")
    return {
        name: tensor if name.startswith("generators/") or name.endswith(stay) else moved_to_card(tensor)
        for name, tensor in tensors.items()
    }


class _Held:
    """Checkpoints in the background are held up: the first until the second is asked for, that until the end."""

    def __init__(self) -> None:
        self.gates, self.number = [threading.Event(), threading.Event()], itertools.count()
        self.write, self.bytes = saver.write, 0

    def __call__(self, tensors: dict[str, Tensor], *others: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.bytes = sum(local_tensor(tensor).nbytes for tensor in tensors.values())
            assert self.gates[next(self.number)].wait(60)
        return self.write(tensors, *others)


def saves_on_the_way(world: World, layout: str, folder: Path, mistake: str = "") -> tuple[int, list[str], bool]:
    """Train, and save at two updates: at once, and out of a device's memory while the training goes on.

    Gives (bytes that this rank has copied, what it has waited for on the device, whether both were still being written
    when the training had gone on).
    """
    going = Going(world, workload_of(layout, world.size), layout)
    going.updates(0, FIRST)
    at_once = going.saver(folder / "at once")
    at_once.save(FIRST, {})
    held, tensors_of = _Held(), saver.tensors_of
    with contextlib.ExitStack() as stack:
        waits = stack.enter_context(pretended_cards())
        stack.enter_context(mock.patch.object(saver, "write", held))
        stack.enter_context(mock.patch.object(saver, "tensors_of", lambda *own: _on_card(tensors_of(*own))))
        stack.callback(lambda: [gate.set() for gate in held.gates])
        if mistake:
            stack.enter_context(MISTAKES[mistake]())
        later = going.saver(folder / "later", in_background=True)
        later.save(FIRST, {})
        going.updates(FIRST, SECOND)
        was_held = not checkpoints_of(later.run)
        with mock.patch.object(saver, "tensors_of", tensors_of):
            at_once.save(SECOND, {})
        # by then a `save` that does not wait for the one before has gone on
        timer = threading.Timer(0.2, held.gates[0].set)
        timer.start()
        later.save(SECOND, {})
        timer.join()
        going.updates(SECOND, END)
        was_held = was_held and len(checkpoints_of(later.run)) < 2
        held.gates[1].set()
        assert later.thread is not None
        later.thread.shutdown()
        later.finish()
        return held.bytes, list(waits), was_held


def goes_on(world: World, layout: str, saved_by: tuple[str, int], folder: Path) -> list[str]:
    """Names of what differs between going on from what was saved in the background, and at once; on this rank."""
    found: list[dict[str, Tensor]] = []
    for name in ("at once", "later"):
        going = Going(world, workload_of(*saved_by), layout)
        checkpoint = checkpoint_named(step(folder / name, SECOND))
        assert resume(going.prepared, world, checkpoint, going.about()) == SECOND
        found.append(going.state()[0])
    one, other = found
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value.nan_to_num(), other[name].nan_to_num())]


def compare(folder: Path) -> int:
    """Whether both checkpoints out of a device's memory are, to the last bit, those written at once; bytes of one."""
    for number in (FIRST, SECOND):
        one, other = (checkpoint_named(step(folder / name, number)) for name in ("at once", "later"))
        (tensors, values), (later, values_later) = everything_in(one), everything_in(other)
        same(tensors, later)
        assert values == values_later
    return sum(tensor.nbytes for tensor in tensors.values())


def round_trip(ranks: Any, size: int, layout: str, folder: Path, mistake: str = "") -> None:
    """Saved twice while the training goes on, compared on one process, and gone on from by one process and by all."""
    rows = ranks(size, saves_on_the_way, layout, folder, mistake)
    assert all(was_held for _, _, was_held in rows)
    num_bytes = compare(folder)
    assert all(waits == ["synchronize"] * 2 for _, waits, _ in rows), "one wait for each save, not for each tensor"
    assert sum(copied for copied, _, _ in rows) == num_bytes, "each part is copied by one rank alone"
    saved_by = layout, size
    assert ranks(size, goes_on, layout, saved_by, folder) == [[]] * size
    assert ranks(1, goes_on, "single", saved_by, folder) == [[]]
