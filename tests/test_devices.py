"""Which device each rank computes on, and which backend follows; pretended: cards, drivers, and who sees which."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import socket
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from everyrank import parse_layout
from everyrank.audit.script import without_gpus
from everyrank.backends import PythonGroup
from everyrank.collectives.operations.point_to_point import make_send
from everyrank.errors import CannotRunError
from everyrank.launch.ray import visible_devices
from everyrank.layout import STRATEGIES
from everyrank.measure.provenance import _cuda_details
from everyrank.measure.resources import Gpus
from everyrank.parallel.mesh import make_device_mesh, open_mesh
from everyrank.parallel.trainable import _groups_by_mesh
from everyrank.strategies import _check_backend_support
from everyrank.world import World, choose_backend, choose_device
from everyrank.world.heartbeat import Peer, check_same_device, count_devices
from everyrank.world.world import describe_device, device_name, gpus_of_host, let_nccl_share

# (how ranks are started, host of each rank, cards that it sees, its local rank) -> backend
BINDINGS: list[tuple[str, Sequence[tuple[str, str, int]], str]] = [
    ("spawn or torchrun, a card for each", [("a", "AB", 0), ("a", "AB", 1)], "nccl"),
    ("spawn or torchrun, two ranks of one card", [("a", "A", 0), ("a", "A", 1)], "gloo"),
    ("torchrun, three ranks of two cards", [("a", "AB", 0), ("a", "AB", 1), ("a", "AB", 2)], "gloo"),
    ("srun --gpus-per-task=1", [("a", "A", 0), ("a", "B", 1), ("b", "A", 0), ("b", "B", 1)], "nccl"),
    ("srun --gpu-bind=single:2", [("a", "A", 0), ("a", "A", 1), ("a", "B", 2), ("a", "B", 3)], "gloo"),
    ("srun --gpus-per-node, no binding", [("a", "AB", 0), ("a", "AB", 1), ("b", "AB", 0), ("b", "AB", 1)], "nccl"),
    ("mpirun, CUDA_VISIBLE_DEVICES by local rank", [("a", "A", 0), ("a", "B", 1)], "nccl"),
    ("Ray, each sees the cards of its node's ranks", [("a", "CD", 0), ("a", "CD", 1), ("b", "A", 0)], "nccl"),
    ("horovodrun, one host shares and the other does not", [("a", "A", 0), ("a", "A", 1), ("b", "A", 0)], "gloo"),
    ("CUDA_VISIBLE_DEVICES in another order", [("a", "BA", 0), ("a", "AB", 0)], "nccl"),
]


def peers(ranks: Sequence[tuple[str, str, int]]) -> list[Peer]:
    """The ranks as each introduces itself."""
    found: list[Peer] = []
    for host, cards, local_rank in ranks:

        def properties(device: torch.device, cards: str = cards) -> Any:
            return types.SimpleNamespace(pci_domain_id=0, pci_bus_id=ord(cards[device.index or 0]), pci_device_id=0)

        with mock.patch.object(torch.cuda, "get_device_properties", properties):
            device = torch.device("cuda", local_rank % len(cards)) if cards else torch.device("cpu")
            found.append(Peer(host, f"boot of {host}", None, device_name(device)))
    return found


@pytest.mark.parametrize(("how", "ranks", "backend"), BINDINGS, ids=[row[0] for row in BINDINGS])
def test_backend_by_cards(how: str, ranks: Sequence[tuple[str, str, int]], backend: str) -> None:
    """Cards are compared, not their numbers or their count: with one visible card each, all ranks are on cuda:0."""
    others = peers(ranks)
    check_same_device(others)
    found, why = choose_backend(None, "cuda", *count_devices(others))
    assert (found, how) == (backend, how)
    if backend == "gloo":
        assert "share" in why
    asked, why_asked = choose_backend("nccl", "cuda", *count_devices(others))
    assert asked == "nccl"
    assert ("share" in why_asked) == (backend == "gloo")


def test_card_by_uuid() -> None:
    """Where a torch does not say the place on the bus."""
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=types.SimpleNamespace(uuid="GPU-1")):
        assert device_name(torch.device("cuda", 0)) == "cuda GPU-1"
    assert device_name(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(("broken", "text"), [(1, "rank 1 on b"), (0, "rank 0 on a")])
def test_dead_driver(broken: int, text: str) -> None:
    """A node that sees no card among nodes that do is named, on every rank; else some would wait in nccl for ever."""
    ranks = [("a", "A", 0), ("b", "B", 0)]
    ranks[broken] = (ranks[broken][0], "", 0)
    with pytest.raises(CannotRunError, match=f"{text}.*--device cpu"):
        check_same_device(peers(ranks))
    check_same_device(peers([("a", "", 0), ("b", "", 0)]))


def test_what_is_said_of_the_device() -> None:
    """A job that was to have a GPU says at its start that it has none; that of Apple is named."""
    assert describe_device("cpu", "cpu") == "cpu: requested"
    assert describe_device(None, choose_device(None, 2)) == "cuda: torch sees one"
    with mock.patch.object(torch.backends.mps, "is_available", return_value=False):
        assert describe_device(None, "cpu") == "cpu: torch sees no CUDA device"
    with mock.patch.object(torch.backends.mps, "is_available", return_value=True):
        assert describe_device(None, "cpu").count("(mps)") == 1


# --- ranks that share a card


def shared(size: int, backend: str = "gloo") -> Any:
    return types.SimpleNamespace(size=size, backend=backend, device=torch.device("cuda", 0))


CARRIED = ["single", "ddp", "zero1", "local_sgd", "ddp:compress=powersgd", "context:method=ulysses", "dataparallel"]
NOT_CARRIED = ["fsdp", "tensor", "pipeline", "context", "expert", "ddp:tensor=2", "ddp:context=2", "parameter_server"]


@pytest.mark.parametrize("layout", [*CARRIED, *NOT_CARRIED])
def test_what_gloo_carries(layout: str) -> None:
    """One line where gloo has no such collective for CUDA tensors; torch's own error comes in the first update."""
    refused = layout in NOT_CARRIED
    with pytest.raises(CannotRunError, match="for CUDA tensors") if refused else contextlib.nullcontext():
        _check_backend_support(parse_layout(layout), shared(4))
    _check_backend_support(parse_layout(layout), shared(4, "nccl"))
    assert {parse_layout(text).strategy for text in (*CARRIED, *NOT_CARRIED)} | {"horovod"} == STRATEGIES.keys()


# --- who looks at which card

SMI = """#!/bin/sh
echo 'GPU-1, 00000000:3B:00.0, 50, 1000'
echo 'GPU-2, 00000000:AF:00.0, 90, 7000'
echo 'GPU-3, 00000000:D8:00.0, [N/A], [N/A]'
sleep 60
"""


def test_gpu_samples_of_own_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host's cards those that ranks of this job compute on: the others are somebody else's."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    world = types.SimpleNamespace(rank=0, hosts=("a", "a", "b"), devices=("cuda 0:3b:00",) * 2 + ("cuda 0:af:00",))
    cards = gpus_of_host(world)  # type: ignore[arg-type]
    assert cards == ["0:3b:00"]
    gpu = Gpus(cards)
    try:
        deadline = time.monotonic() + 60
        while not gpu.cards and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # the other rows are there by now, if they are ever taken
        assert gpu.read() == (50.0, 1000 * 2**20)
    finally:
        gpu.close()
    assert Gpus([]).read() == (None, None)


# --- optimizers


def step_on_two_meshes(world: World) -> Any:
    """A fused optimizer over one group with a split and a whole parameter, stepped as an update does it."""
    mesh = make_device_mesh(world, (("shard", world.size),))
    values = torch.arange(4.0)
    split = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(0)]))
    whole = nn.Parameter(values.clone())
    optimizer = torch.optim.AdamW([split, whole], lr=0.1, fused=True)
    for parameter in (split, whole):
        parameter.grad = torch.ones_like(parameter)
    groups, seen = optimizer.param_groups, list[int]()
    optimizer.register_step_pre_hook(lambda *_: seen.append(len(optimizer.param_groups)))
    with _groups_by_mesh(optimizer):
        optimizer.step()
    return seen, optimizer.param_groups is groups, groups[0]["fused"], bool(torch.equal(split.full_tensor(), whole))


def test_groups_by_mesh(ranks: Any) -> None:
    """A group on several meshes is stepped mesh by mesh, by the fused kernel, and is one group to everybody else."""
    for found in ranks(2, step_on_two_meshes):
        assert found == ([2], True, True, True)


# --- recipes

# single has one rank, and Slurm shows each rank its GPUs. Ranks that are started by hand ask each other (below).
USE_CUDA_IF_AVAILABLE = {"single", "slurm"}


def test_recipes_share_no_card(repository: Path) -> None:
    """Two ranks on one GPU end in nccl's error, so the other recipes use CUDA only with a GPU for each local rank."""
    recipes = (repository / "src/everyrank/recipes").glob("*.py")
    names = {path.stem for path in recipes if "cuda.is_available()" in path.read_text()}
    assert names == USE_CUDA_IF_AVAILABLE


def device_of_recipe(world: World, recipe: str, devices: list[int], names: list[str], visible: list[str]) -> str:
    """What a rank takes that sees so many devices, on the host of this name."""
    with mock.patch.object(sys, "path", [str(Path(recipe).parent / "shared"), *sys.path]):  # for digits.py
        choose = runpy.run_path(recipe)["choose_device"]
    rank = world.rank
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=devices[rank]),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(socket, "gethostname", return_value=names[rank]),
        mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": visible[rank]}),
    ):
        return str(choose(rank, world.size))


@pytest.mark.parametrize(
    ("devices", "names", "visible", "expected"),
    [
        ([2, 2, 2], "aba", ["0,1"] * 3, ["cuda:0", "cuda:0", "cuda:1"]),
        ([1, 1, 1], "aba", ["0"] * 3, ["cpu"] * 3),  # one host has too few: nobody takes one
        ([0, 2, 2], "abb", ["0,1"] * 3, ["cpu"] * 3),
        ([1, 1, 1], "aaa", ["0", "1", "2"], ["cuda:0"] * 3),  # each terminal shows another device
        ([2, 2, 1], "aaa", ["0,1", "0,1", "2"], ["cuda:0", "cuda:1", "cuda:0"]),
    ],
)
def test_ranks_started_by_hand_share_no_card(
    ranks: Any, repository: Path, devices: list[int], names: str, visible: list[str], expected: list[str]
) -> None:
    recipe = str(repository / "src/everyrank/recipes/ddp_by_hand.py")
    assert ranks(3, device_of_recipe, recipe, devices, names, visible) == expected


# --- Ray


def test_what_ray_shows() -> None:
    """A rank sees the cards of all ranks of its node: on ROCm, too, where Ray shows its actor one by another name."""
    assert visible_devices("0,1", {"CUDA_VISIBLE_DEVICES": "1"}) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    both = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}
    assert visible_devices("0,1", {"HIP_VISIBLE_DEVICES": "1"}) == both
    assert visible_devices("", {"HIP_VISIBLE_DEVICES": ""}) == {}


# --- groups


def timeouts(world: World) -> list[float]:
    """Of every group that meshes of some layouts make."""
    short = dataclasses.replace(world, timeout_seconds=77.0, group_cache=type(world.group_cache)())
    for text, axes in [("fsdp:replicate=2,shard=2", ("replicate", "shard")), ("pipeline:shard=2", ("shard",))]:
        mesh = open_mesh(parse_layout(text), short)
        mesh.device_mesh(*axes)
        mesh.group(*axes[:1])
    found = [group for group in short.group_cache.groups.values() if group is not None]
    for made in short.group_cache.device_meshes.values():
        found += [made.get_group(name) for name in made.mesh_dim_names or ()]
    return [_timeout_of(group) for group in found]


def _timeout_of(group: Any) -> float:
    if isinstance(group, PythonGroup):
        (seconds,) = {queue.timeout_seconds for queue in group.transport.queues()}
        return seconds
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_timeout_of_every_group(ranks: Any) -> None:
    """--timeout holds in groups that torch makes for a mesh, too: its own is half an hour."""
    for found in ranks(4, timeouts):
        assert len(found) >= 5
        assert set(found) == {77.0}


def groups_of_a_bound_world(world: World) -> Any:
    """Groups of a world whose ranks are bound to a device: how they were split, this rank's, and what it carries."""
    splits: list[list[list[int]]] = []

    def split_group(split_ranks: list[list[int]], timeout: Any) -> Any:
        splits.append(split_ranks)
        assert timeout.total_seconds() == world.timeout_seconds
        return dist.new_subgroups_by_enumeration(split_ranks)[0]

    bound = types.SimpleNamespace(bound_device_id=torch.device("cuda", world.rank))
    bound_world = dataclasses.replace(world, group=bound, group_cache=type(world.group_cache)())
    found: list[Any] = []
    with mock.patch.object(dist, "split_group", split_group):
        mesh = open_mesh(parse_layout("fsdp:replicate=2,shard=2"), bound_world)
        for axes, use in [(("shard",), ""), (("replicate",), ""), (("shard",), "again"), (("shard",), "")]:
            group = mesh.group(*axes, use=use)
            total = torch.tensor(float(world.rank))
            dist.all_reduce(total, group=group)
            found.append((dist.get_process_group_ranks(group), total.item()))
    return splits, found


def test_groups_of_nccl_are_split_at_once(ranks: Any) -> None:
    """One split for each use of an axis, not one for each group of it: a thousand ranks would wait for minutes."""
    shard, replicate = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    for rank, (splits, found) in enumerate(ranks(4, groups_of_a_bound_world)):
        assert splits == [shard, replicate, shard]
        own, beside = shard[rank // 2], replicate[rank % 2]
        assert found == [(own, sum(own)), (beside, sum(beside)), (own, sum(own)), (own, sum(own))]


def test_nccl_takes_ranks_of_one_card_for_hosts() -> None:
    """It refuses two ranks with the same host and card; `--backend nccl` gives each rank a host id of its own."""
    names = set[str]()
    for rank in range(2):
        with mock.patch.dict(os.environ):
            os.environ.pop("NCCL_HOSTID", None)
            let_nccl_share(rank)
            names.add(os.environ["NCCL_HOSTID"])
    assert len(names) == 2


@pytest.mark.parametrize(
    ("visible", "ranks", "hides"),
    [
        (None, 2, False),
        (None, 3, True),
        ("0", 1, False),
        ("0", 2, True),
        ("", 1, True),
        ("-1", 1, True),
        ("1,0", 2, False),
    ],
)
def test_ranks_without_a_gpu_each_see_none(
    visible: str | None, ranks: int, hides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one GPU, the second of two ranks of a script would fail with an invalid device; all use the CPU."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert without_gpus(ranks, tmp_path) == ({"CUDA_VISIBLE_DEVICES": ""} if hides else {})


def test_details_of_cuda_need_no_private_name() -> None:
    """They are in the Record of every run on a GPU; torch 2.11 lacks a private function for the driver."""
    assert set(_cuda_details()) >= {"nccl", "driver", "cudnn"}


def test_nccl_receives_from_a_named_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo receives from any rank, nccl does not: the receiver fails, and the sender waits."""
    seen: list[int | None] = []
    monkeypatch.setattr(torch.distributed, "recv", lambda _, group, group_src, tag: seen.append(group_src))
    tensor = torch.zeros(1)
    case: Any = types.SimpleNamespace(rank=1, group=None, is_async=False, empty=lambda: tensor, values=lambda _: tensor)
    for device in ("cpu", "cuda"):
        case.device = torch.device(device)
        make_send(case).run()
    assert seen == [None, 0]
