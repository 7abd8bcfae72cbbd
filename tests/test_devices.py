"""The device of each rank and the default backend, with mocked GPUs, drivers and CUDA_VISIBLE_DEVICES."""

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

# name of the launch, (host, visible GPUs, local rank) of each rank, expected backend
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
    """Return a Peer for each rank, with the name of its device."""
    peers_of_ranks: list[Peer] = []
    for host, visible_gpus, local_rank in ranks:

        def properties(device: torch.device, visible_gpus: str = visible_gpus) -> Any:
            return types.SimpleNamespace(
                pci_domain_id=0, pci_bus_id=ord(visible_gpus[device.index or 0]), pci_device_id=0
            )

        with mock.patch.object(torch.cuda, "get_device_properties", properties):
            device = torch.device("cuda", local_rank % len(visible_gpus)) if visible_gpus else torch.device("cpu")
            peers_of_ranks.append(Peer(host, f"boot of {host}", None, device_name(device)))
    return peers_of_ranks


@pytest.mark.parametrize(("how", "ranks", "backend"), BINDINGS, ids=[row[0] for row in BINDINGS])
def test_default_backend_depends_on_shared_gpus(how: str, ranks: Sequence[tuple[str, str, int]], backend: str) -> None:
    """GPUs are compared by their PCI address. Their index is not enough: with one visible GPU each, all are cuda:0."""
    all_peers = peers(ranks)
    check_same_device(all_peers)
    chosen, reason = choose_backend(None, "cuda", *count_devices(all_peers))
    assert (chosen, how) == (backend, how)
    if backend == "gloo":
        assert "share" in reason
    requested, reason_for_requested = choose_backend("nccl", "cuda", *count_devices(all_peers))
    assert requested == "nccl"
    assert ("share" in reason_for_requested) == (backend == "gloo")


def test_gpu_is_named_by_uuid_without_pci_address() -> None:
    """Some torch versions do not report the PCI address."""
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=types.SimpleNamespace(uuid="GPU-1")):
        assert device_name(torch.device("cuda", 0)) == "cuda GPU-1"
    assert device_name(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(("broken", "text"), [(1, "rank 1 on b"), (0, "rank 0 on a")])
def test_node_without_a_working_gpu_is_named(broken: int, text: str) -> None:
    """If one node sees no GPU and others do, every rank fails with its name. Otherwise some would hang in NCCL."""
    ranks = [("a", "A", 0), ("b", "B", 0)]
    ranks[broken] = (ranks[broken][0], "", 0)
    with pytest.raises(CannotRunError, match=f"{text}.*--device cpu"):
        check_same_device(peers(ranks))
    check_same_device(peers([("a", "", 0), ("b", "", 0)]))


def test_describe_device_explains_why_the_cpu_is_used() -> None:
    """The text also names an Apple GPU (mps) that is not used."""
    assert describe_device("cpu", "cpu") == "cpu: requested"
    assert describe_device(None, choose_device(None, 2)) == "cuda: torch sees one"
    with mock.patch.object(torch.backends.mps, "is_available", return_value=False):
        assert describe_device(None, "cpu") == "cpu: torch sees no CUDA device"
    with mock.patch.object(torch.backends.mps, "is_available", return_value=True):
        assert describe_device(None, "cpu").count("(mps)") == 1


# --- ranks that share a GPU


def world_on_one_gpu(size: int, backend: str = "gloo") -> Any:
    return types.SimpleNamespace(size=size, backend=backend, device=torch.device("cuda", 0))


SUPPORTED = ["single", "ddp", "zero1", "local_sgd", "ddp:compress=powersgd", "context:method=ulysses", "dataparallel"]
UNSUPPORTED = ["fsdp", "tensor", "pipeline", "context", "expert", "ddp:tensor=2", "ddp:context=2", "parameter_server"]


@pytest.mark.parametrize("layout", [*SUPPORTED, *UNSUPPORTED])
def test_layouts_that_gloo_cannot_run_on_cuda_tensors_are_refused(layout: str) -> None:
    """The error has one line. Without it, torch would fail in the first update."""
    is_refused = layout in UNSUPPORTED
    with pytest.raises(CannotRunError, match="for CUDA tensors") if is_refused else contextlib.nullcontext():
        _check_backend_support(parse_layout(layout), world_on_one_gpu(4))
    _check_backend_support(parse_layout(layout), world_on_one_gpu(4, "nccl"))


def test_every_strategy_is_supported_or_unsupported() -> None:
    """Horovod has its own communication."""
    assert {parse_layout(text).strategy for text in (*SUPPORTED, *UNSUPPORTED)} | {"horovod"} == STRATEGIES.keys()


# --- GPU samples of nvidia-smi

NVIDIA_SMI = """#!/bin/sh
echo 'GPU-1, 00000000:3B:00.0, 50, 1000'
echo 'GPU-2, 00000000:AF:00.0, 90, 7000'
echo 'GPU-3, 00000000:D8:00.0, [N/A], [N/A]'
sleep 60
"""


def test_gpu_samples_are_only_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of the host that no rank of this job uses are left out."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    world = types.SimpleNamespace(rank=0, hosts=("a", "a", "b"), devices=("cuda 0:3b:00",) * 2 + ("cuda 0:af:00",))
    addresses = gpus_of_host(world)  # type: ignore[arg-type]
    assert addresses == ["0:3b:00"]
    gpus = Gpus(addresses)
    try:
        deadline = time.monotonic() + 60
        while not gpus.cards and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # rows of the other GPUs would have been read by now
        assert gpus.read() == (50.0, 1000 * 2**20)
    finally:
        gpus.close()
    assert Gpus([]).read() == (None, None)


# --- optimizers


def step_on_two_meshes(world: World) -> Any:
    """Step a fused optimizer as an update does. Its only group has a sharded and a replicated parameter."""
    mesh = make_device_mesh(world, (("shard", world.size),))
    values = torch.arange(4.0)
    sharded = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(0)]))
    replicated = nn.Parameter(values.clone())
    optimizer = torch.optim.AdamW([sharded, replicated], lr=0.1, fused=True)
    for parameter in (sharded, replicated):
        parameter.grad = torch.ones_like(parameter)
    groups, num_groups_in_step = optimizer.param_groups, list[int]()
    optimizer.register_step_pre_hook(lambda *_: num_groups_in_step.append(len(optimizer.param_groups)))
    with _groups_by_mesh(optimizer):
        optimizer.step()
    return (
        num_groups_in_step,
        optimizer.param_groups is groups,
        groups[0]["fused"],
        bool(torch.equal(sharded.full_tensor(), replicated)),
    )


def test_fused_optimizer_steps_parameters_of_several_meshes(ranks: Any) -> None:
    """During the step the group is split by mesh. Outside the step it is one group."""
    for result in ranks(2, step_on_two_meshes):
        assert result == ([2], True, True, True)


# --- recipes

# single has one rank, and Slurm assigns GPUs to each rank. ddp_by_hand compares the ranks (tested below).
USE_CUDA_IF_AVAILABLE = {"single", "slurm"}


def test_recipes_never_share_a_gpu(repository: Path) -> None:
    """Two ranks on one GPU fail in NCCL, so the other recipes use CUDA only with a GPU for each local rank."""
    recipes = (repository / "src/everyrank/recipes").glob("*.py")
    using_cuda_if_available = {path.stem for path in recipes if "cuda.is_available()" in path.read_text()}
    assert using_cuda_if_available == USE_CUDA_IF_AVAILABLE


def device_of_recipe(world: World, recipe: str, devices: list[int], hosts: str, visible: list[str]) -> str:
    """Return the device that the recipe chooses on this rank.

    `devices`, `hosts` and `visible` have the device count, host name and CUDA_VISIBLE_DEVICES of each rank.
    """
    with mock.patch.object(sys, "path", [str(Path(recipe).parent / "shared"), *sys.path]):  # for digits.py
        choose = runpy.run_path(recipe)["choose_device"]
    rank = world.rank
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=devices[rank]),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(socket, "gethostname", return_value=hosts[rank]),
        mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": visible[rank]}),
    ):
        return str(choose(rank, world.size))


@pytest.mark.parametrize(
    ("devices", "hosts", "visible", "expected"),
    [
        ([2, 2, 2], "aba", ["0,1"] * 3, ["cuda:0", "cuda:0", "cuda:1"]),
        ([1, 1, 1], "aba", ["0"] * 3, ["cpu"] * 3),  # one host has too few GPUs, so all ranks use the CPU
        ([0, 2, 2], "abb", ["0,1"] * 3, ["cpu"] * 3),
        ([1, 1, 1], "aaa", ["0", "1", "2"], ["cuda:0"] * 3),  # each rank has a different CUDA_VISIBLE_DEVICES
        ([2, 2, 1], "aaa", ["0,1", "0,1", "2"], ["cuda:0", "cuda:1", "cuda:0"]),
    ],
)
def test_ranks_started_by_hand_never_share_a_gpu(
    ranks: Any, repository: Path, devices: list[int], hosts: str, visible: list[str], expected: list[str]
) -> None:
    recipe = str(repository / "src/everyrank/recipes/ddp_by_hand.py")
    assert ranks(3, device_of_recipe, recipe, devices, hosts, visible) == expected


# --- Ray


def test_visible_devices_of_ray_ranks() -> None:
    """A rank sees the GPUs of all ranks of its node. On ROCm, Ray may set HIP_VISIBLE_DEVICES instead."""
    assert visible_devices("0,1", {"CUDA_VISIBLE_DEVICES": "1"}) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    both = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}
    assert visible_devices("0,1", {"HIP_VISIBLE_DEVICES": "1"}) == both
    assert visible_devices("", {"HIP_VISIBLE_DEVICES": ""}) == {}


# --- process groups


def timeouts_of_groups(world: World) -> list[float]:
    """Return the timeout in seconds of every group that the meshes of two layouts create."""
    world_with_timeout = dataclasses.replace(world, timeout_seconds=77.0, group_cache=type(world.group_cache)())
    for text, axes in [("fsdp:replicate=2,shard=2", ("replicate", "shard")), ("pipeline:shard=2", ("shard",))]:
        mesh = open_mesh(parse_layout(text), world_with_timeout)
        mesh.device_mesh(*axes)
        mesh.group(*axes[:1])
    groups = [group for group in world_with_timeout.group_cache.groups.values() if group is not None]
    for device_mesh in world_with_timeout.group_cache.device_meshes.values():
        groups += [device_mesh.get_group(name) for name in device_mesh.mesh_dim_names or ()]
    return [_timeout_of(group) for group in groups]


def _timeout_of(group: Any) -> float:
    if isinstance(group, PythonGroup):
        (seconds,) = {queue.timeout_seconds for queue in group.transport.queues()}
        return seconds
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_timeout_applies_to_every_group(ranks: Any) -> None:
    """--timeout also applies to groups that torch creates for a mesh. Their default is 30 minutes."""
    for seconds in ranks(4, timeouts_of_groups):
        assert len(seconds) >= 5
        assert set(seconds) == {77.0}


def splits_of_a_bound_world(world: World) -> Any:
    """Return the group splits of a world whose ranks are bound to a device.

    Also return the ranks and the all-reduce sum of each group of this rank.
    """
    splits: list[list[list[int]]] = []

    def split_group(split_ranks: list[list[int]], timeout: Any) -> Any:
        splits.append(split_ranks)
        assert timeout.total_seconds() == world.timeout_seconds
        return dist.new_subgroups_by_enumeration(split_ranks)[0]

    bound = types.SimpleNamespace(bound_device_id=torch.device("cuda", world.rank))
    bound_world = dataclasses.replace(world, group=bound, group_cache=type(world.group_cache)())
    ranks_and_sums: list[Any] = []
    with mock.patch.object(dist, "split_group", split_group):
        mesh = open_mesh(parse_layout("fsdp:replicate=2,shard=2"), bound_world)
        for axes, use in [(("shard",), ""), (("replicate",), ""), (("shard",), "again"), (("shard",), "")]:
            group = mesh.group(*axes, use=use)
            total = torch.tensor(float(world.rank))
            dist.all_reduce(total, group=group)
            ranks_and_sums.append((dist.get_process_group_ranks(group), total.item()))
    return splits, ranks_and_sums


def test_nccl_groups_of_an_axis_are_created_by_one_split(ranks: Any) -> None:
    """Each use of an axis needs one split. One split for each group would take minutes on a thousand ranks."""
    shard, replicate = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    for rank, (splits, ranks_and_sums) in enumerate(ranks(4, splits_of_a_bound_world)):
        assert splits == [shard, replicate, shard]
        shard_group, replicate_group = shard[rank // 2], replicate[rank % 2]
        assert ranks_and_sums == [
            (shard_group, sum(shard_group)),
            (replicate_group, sum(replicate_group)),
            (shard_group, sum(shard_group)),
            (shard_group, sum(shard_group)),
        ]


def test_ranks_of_one_gpu_get_distinct_nccl_host_ids() -> None:
    """NCCL refuses two ranks with the same host and GPU. With `--backend nccl` each rank gets its own NCCL_HOSTID."""
    host_ids = set[str]()
    for rank in range(2):
        with mock.patch.dict(os.environ):
            os.environ.pop("NCCL_HOSTID", None)
            let_nccl_share(rank)
            host_ids.add(os.environ["NCCL_HOSTID"])
    assert len(host_ids) == 2


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
def test_script_ranks_use_the_cpu_without_a_gpu_for_each(
    visible: str | None, ranks: int, hides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one GPU, the second of two ranks of a script would fail with an invalid device."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert without_gpus(ranks, tmp_path) == ({"CUDA_VISIBLE_DEVICES": ""} if hides else {})


def test_cuda_details_need_no_private_function() -> None:
    """The Record of every run on a GPU has them. torch 2.11 lacks a private function for the driver version."""
    assert set(_cuda_details()) >= {"nccl", "driver", "cudnn"}


def test_nccl_receives_from_a_named_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo can receive from any rank. With NCCL that would fail, and the sender would hang."""
    source_ranks: list[int | None] = []
    monkeypatch.setattr(torch.distributed, "recv", lambda _, group, group_src, tag: source_ranks.append(group_src))
    tensor = torch.zeros(1)
    case: Any = types.SimpleNamespace(rank=1, group=None, is_async=False, empty=lambda: tensor, values=lambda _: tensor)
    for device in ("cpu", "cuda"):
        case.device = torch.device(device)
        make_send(case).run()
    assert source_ranks == [None, 0]
