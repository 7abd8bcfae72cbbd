"""Each recipe gives the losses of the library; a mutation of it does not.

The ranks are forked here, where a plain torchrun starts them. tests/integration runs each by the command in its own
header, and those that need another launcher.
"""

from __future__ import annotations

import ast
import gzip
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import everyrank
from everyrank import Record, read_records
from everyrank.cli import main
from forkserver import ForkServer
from processes import LOOPBACK, Cli, by_hand, free_port

pytestmark = pytest.mark.integration

PACKAGE = Path(everyrank.__file__).parent
RECIPES = PACKAGE / "recipes"
SHARED = RECIPES / "shared"
PROGRAMS = Path(sys.executable).parent  # `python` and `torchrun`
OURS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}  # in the environment of what is typed
ALL = sorted(path.stem for path in RECIPES.glob("*.py") if not path.stem.startswith("_"))
# what starts them: their tests are in integration
NEEDS = {"slurm": "srun", "mpi": "mpirun", "ray_actors": "Ray", "horovod_ddp": "horovodrun"}
ALONE = {  # with a network of their own: what trains the same whole, by plain python, is compared
    "tensor": "tensor",
    "fsdp_tensor": "tensor",
    "fsdp": "tensor",
    "hsdp": "tensor",
    "context": "context",
    "contrastive": "contrastive",
    "expert": "expert",
}
REPLAYED = {"parameter_server_async"}  # another training than any layout's: tests/recipes/test_asynchronous.py
OPERATIONS = {"point_to_point", "collectives", "process_groups"}  # they train nothing: tests/recipes/test_operations.py
COMPRESSED = {"ddp_compressed"}  # which rounds: tests/recipes/test_compressed.py
RPC_ONLY = {"ddp_rpc", "rpc_rnn", "rpc_reinforcement"}  # with a network of their own, too: tests/recipes/test_rpc.py
# lines; the others have 175 at most
LONG = {
    "collectives": 280,
    "context": 245,
    "ddp_by_hand": 185,
    "ddp_rpc": 195,
    "ddp_uneven": 190,
    "expert": 205,
    "imagenet_ddp": 280,
    "parameter_server_async": 200,
    "pipeline": 185,
    "point_to_point": 200,
    "rpc_batched": 195,
    "rpc_pipeline": 195,
    "rpc_reinforcement": 195,
}
OWN_TESTS = {"imagenet_ddp", "ddp_uneven", *NEEDS, *ALONE, *OPERATIONS, *COMPRESSED, *REPLAYED, *RPC_ONLY}
NAMES = [name for name in ALL if name not in OWN_TESTS]  # imagenet_ddp reads images: see the end
DIGITS = gzip.decompress((PACKAGE / "builtin" / "digits.csv.gz").read_bytes()).splitlines(keepends=True)
# The recipes read the first of them: 365 to train with and 91 held out, which 2, 3 and 4 ranks do not divide. An epoch
# is 6 updates, the last of 45 samples.
NUM_ROWS = 456
WHOLE = {"checkpoint_resume", "elastic_torchrun"}  # all 1,797: their headers name updates of the second epoch
# What has data of its own is shortened in its text, the same in the split training and in the whole one.
SHORTER = {
    "context": [("UPDATES = 40", "UPDATES = 12"), (".encode()))", ".encode()[:40_000]))")],
    "rpc_rnn": [("UPDATES = 60", "UPDATES = 12"), (".encode()))", ".encode()[:80_000]))")],
}

# The layout that is the same training. Recipes are compared in float64; the low precisions have a test of their own.
LAYOUTS = {
    "single": "single:precision=float64",
    "dataparallel": "single:precision=float64",
    "ddp_spawn": "ddp:precision=float64",
    "ddp_torchrun": "ddp:precision=float64",
    "ddp_amp": "ddp:precision=float64",
    "ddp_accumulate": "ddp:accumulate=4,precision=float64",
    "distributed_evaluation": "ddp:precision=float64",
    "zero1": "zero1:precision=float64",
    "pipeline": "single:precision=float64",
    "model_parallel_two_devices": "single:precision=float64",
    "iterable_sharding": "ddp:precision=float64",
    "checkpoint_resume": "ddp:precision=float64",
    "ddp_by_hand": "ddp:precision=float64",
    "multi_node": "ddp:precision=float64",
    "elastic_torchrun": "ddp:precision=float64",
    "ring_allreduce": "ddp:precision=float64",
    "local_sgd": "local_sgd:every=4,precision=float64",
    "slurm": "ddp:precision=float64",
    "mpi": "ddp:precision=float64",
    "ray_actors": "ddp:precision=float64",
    "parameter_server": "single:precision=float64",
    "parameter_server_rpc": "single:precision=float64",
    "rpc_autograd": "single:precision=float64",
    "rpc_batched": "single:precision=float64",
    "rpc_pipeline": "single:precision=float64",
    "horovod_ddp": "ddp:precision=float64",
    "ddp_syncbn": "ddp:precision=float64",
    "weighted_sampler": "ddp:precision=float64",
}

# What people get wrong, in each: (what stands there, what they write).
MUTATIONS = {
    "single": (
        "F.cross_entropy(model(images), labels)",
        "F.cross_entropy(model(images), labels, reduction='sum') / BATCH",
    ),  # the ragged batch divided by the full size
    "dataparallel": ("manual_seed(SEED + epoch)", "manual_seed(SEED)"),  # every epoch in the same order
    "ddp_spawn": ("/ batch_size", "/ len(labels)"),  # averages once too often
    "ddp_torchrun": ("ddp(images)", "model(images)"),  # past the wrapper: no gradient is sent
    "ddp_amp": ("parameter.grad *= BATCH / batch_size", "pass"),  # and then multiplied as if it were a sum
    "weighted_sampler": ("SEED + self.epoch)", "SEED + self.epoch + self.rank)"),  # each rank draws by itself
    "ddp_accumulate": ("is_last = index + 1 == ACCUMULATE", "is_last = index == 0"),
    "distributed_evaluation": (
        "range(rank, len(data), world_size)",
        "range(-(-len(data) // world_size))",  # every rank reads the first half
    ),
    "zero1": ("BATCH, rank, world_size)", "BATCH, 0, world_size)"),  # every rank reads the same
    "fsdp": ("(loss * world_size)", "loss"),  # the average taken for the sum
    "iterable_sharding": (  # divided twice: by rank and worker, and then by worker again
        "batch.tensor_split(self.world_size)[self.rank]",
        "batch.tensor_split(self.world_size * WORKERS)[self.rank * WORKERS + update % WORKERS]",
    ),
    "checkpoint_resume": (  # the order of the samples is drawn anew where the training goes on
        "sampler.set_epoch(epoch)",
        "sampler.set_epoch(epoch + sampler.first_batch)",
    ),
    "ddp_by_hand": ("            optimizer.zero_grad()\n", ""),  # the gradients of all updates before stay in
    "multi_node": (  # the first rank of every host reads the same samples
        "BATCH, rank, world_size)",
        'BATCH, int(os.environ["LOCAL_RANK"]), world_size)',
    ),
    "elastic_torchrun": ('optimizer.load_state_dict(checkpoint["optimizer"])', "pass"),  # the momentum is lost
    "local_sgd": ("num_samples += len(labels)", "num_samples += 1"),  # a rank with fewer samples counts as much
    "ring_allreduce": ("manual_seed(SEED + epoch)", "manual_seed(SEED)"),  # what its own checks cannot see
    "slurm": ("/ batch_size", "/ BATCH"),
    "ddp_syncbn": ("synchronize(build(), cuda)", "build()"),  # each rank normalises by its own samples
    "mpi": ("        dist.all_reduce(losses)", "        pass"),  # rank 0 prints the losses of its own half
    "ray_actors": ("ddp(images)", "model(images)"),
    "rpc_autograd": ("for part in (first, second) for", "for part in (second,) for"),  # half of it is trained
    "rpc_batched": ("/ len(labels)", "/ len(labels[local_part])"),  # means of the trainers, added up
    "rpc_pipeline": ("wait_all(outputs)", "wait_all(outputs[::-1])"),  # the scores of one are taken for another's
    "horovod_ddp": ("        op=hvd.Sum,\n", ""),  # the default averages what is a sum already
    "hsdp": ("loss * world_size", "loss * SHARDS"),  # averaged over copies too
    "tensor": ("manual_seed(SEED + epoch)", "manual_seed(SEED + epoch + rank)"),  # every rank has its own order
    "fsdp_tensor": ("BATCH, shard, num_shards)", "BATCH, 0, num_shards)"),  # both shards read the same samples
    "pipeline": ("/ len(labels)", "/ len(micro_labels) / MICRO_BATCHES"),  # a mean of means, of ragged pieces
    "model_parallel_two_devices": ("network.parameters()", "network.first_half.parameters()"),  # half of it is trained
    "parameter_server": ("/ count  # a sum", "/ BATCH  # a sum"),  # the ragged batch divided by the full size
    "parameter_server_rpc": ("/ count  # a sum", "/ BATCH  # a sum"),
    "contrastive": ("        dist.all_reduce(grad)\n", ""),  # what the other ranks' losses say of a row is lost
    "expert": ("dist.all_reduce(squares)", "squares *= world_size"),  # each rank clips by a norm of its own
    "context": (
        "= local_positions(rank, world_size)",
        "= torch.arange(LENGTH).chunk(world_size)[rank]",
    ),  # but the ring thinks so
}

BATCH_NORM = {"ddp_syncbn"}  # the others have group norm

# What else goes wrong where more is written by hand.
MORE_MUTATIONS = [
    ("ddp_syncbn", "grad.clone()\n        dist.all_reduce(total)\n", "grad.clone()\n"),  # what others' losses say of it
    (
        "ddp_syncbn",
        "squares / count +",
        "squares / local_count / dist.get_world_size() +",
    ),  # uneven parts taken for even
    (  # what DistributedSampler would repeat gets into the statistics, and not into the loss
        "ddp_syncbn",
        "F.cross_entropy(ddp(images), labels",
        "F.cross_entropy(ddp(torch.cat([images, images[:1]]))[: len(labels)], labels",
    ),
    ("contrastive", "sum(sizes[:rank])", "0"),  # every rank takes the first rows for its own
    ("contrastive", "zip(rows, sizes", "zip(rows[::-1], sizes"),  # rows of others where the own ones are counted
    ("tensor", "        dist.all_reduce(squares)\n", "        pass\n"),  # every rank scales by a norm of its own
    ("tensor", "(1 if split else world_size)", "1"),  # what is whole counts as often as there are ranks
    ("fsdp_tensor", "* pieces / dist.get_world_size()", ""),
    ("fsdp_tensor", "dist.all_reduce(losses, group=shards.get_group())", "dist.all_reduce(losses)"),
    (
        "pipeline",
        "zip(images.tensor_split(MICRO_BATCHES), labels.tensor_split(MICRO_BATCHES)",
        "zip(images.tensor_split(MICRO_BATCHES + 1), labels.tensor_split(MICRO_BATCHES + 1)",
    ),  # one too few
    ("context", "            dist.all_reduce(flat)\n", ""),
    ("context", "self.positions(positions)", "self.positions(torch.arange(len(positions)))"),  # counted by the rank
    (
        "context",
        "ring_send_recv(kv_dkv)()",
        "(kv_dkv if step else ring_send_recv(kv_dkv)())",
    ),  # gradients stay with the neighbour
    ("context", "return slice(length // 2, length), slice(length)", "return slice(length), slice(length)"),
    ("expert", "for parameter in shared])\n        dist", "for parameter in shared]) / world_size\n        dist"),
    (
        "expert",
        "AllToAll.apply(grad, ctx.receive_counts, ctx.send_counts)",
        "torch.zeros(sum(ctx.send_counts), WIDTH, dtype=grad.dtype)",
    ),
    ("expert", "[order].split", ".split"),  # rows of one expert are taken for another's
    ("expert", "outputs[order.argsort()]", "outputs"),  # the outputs for one token are taken for another's
    ("weighted_sampler", "sampler.set_epoch(epoch)", "sampler.set_epoch(0)"),
    ("weighted_sampler", "1 / labels.bincount()[labels].double()", "torch.ones(len(labels), dtype=torch.float64)"),
    ("ddp_torchrun", "sampler.set_epoch(epoch)", "sampler.set_epoch(0)"),  # every epoch in the order of the first
    (  # a part does not have the weights that it has in the whole network
        "rpc_autograd",
        "build()[start:stop]",
        "build()[start:stop].apply(lambda module: getattr(module, 'reset_parameters', int)())",
    ),
    (
        "rpc_batched",
        "local_part = slice(trainer, None, len(WORKERS) - 1)",
        "local_part = slice(0, None, len(WORKERS) - 1)",
    ),
    ("rpc_pipeline", "for stage in stages for", "for stage in stages[1:] for"),
    ("local_sgd", "[*model.parameters(), *states]", "[*model.parameters()]"),  # momentum differs between ranks
    ("ddp_by_hand", "lr=0.05", "lr=0.05 * world_size"),  # the batch does not grow with the ranks: no reason to scale
    ("ddp_by_hand", "sampler.set_epoch(epoch)", "sampler.set_epoch(epoch + rank)"),  # every rank has its own order
    ("parameter_server_rpc", "[self.pushed[trainer] for trainer in sorted(self.pushed)]", "[self.pushed[0]] * 2"),
    ("parameter_server", "[loss.item(), len(labels)]", "[loss.item(), BATCH // num_trainers]"),  # as if all were full
    (
        "parameter_server",
        "dist.recv(flat, 0)\n            vector_to_parameters(flat, parameters)",
        "dist.recv(flat, 0)",
    ),
    (  # each rank draws its own shards
        "fsdp",
        "set_model_state_dict(model, build().to(dtype).state_dict() if rank == 0 else {}, options=options)",
        "[m.reset_parameters() for m in model.modules() if hasattr(m, 'reset_parameters')]",
    ),
]

# On other numbers of ranks, or with the other commands of their headers; what is changed in the text before.
OTHER_STARTS = [
    ("ddp_syncbn", 4, ("", "")),
    ("weighted_sampler", 3, ("", "")),
    ("ddp_torchrun", 4, ("", "")),  # which do not divide the samples
    ("tensor", 4, ("", "")),
    ("fsdp_tensor", 2, ("", "")),
    ("fsdp_tensor", 4, ("TENSOR = 2", "TENSOR = 1")),
    ("hsdp", 4, ("SHARDS = 2", "SHARDS = 1")),
    ("fsdp", 3, ("", "")),
    ("ddp_accumulate", 3, ("", "")),
    ("ddp_torchrun", 3, ("", "")),  # which do not divide the batch
    ("pipeline", 1, ("", "")),
    ("pipeline", 4, ("", "")),
    ("pipeline", 3, ("MICRO_BATCHES = 7", "MICRO_BATCHES = 50")),  # of the last batch, of 45, some are empty
    ("pipeline", 4, ("MICRO_BATCHES = 7", "MICRO_BATCHES = 2")),  # fewer than stages
    ("parameter_server", 2, ("", "")),
    ("parameter_server", 5, ("", "")),
    ("ring_allreduce", 3, ("", "")),
    ("ring_allreduce", 4, ("", "")),
    ("contrastive", 3, ("", "")),
    ("context", 3, ("", "")),
    ("context", 4, ("", "")),
    ("model_parallel_two_devices", 2, ("", "")),
    ("expert", 4, ("", "")),
]


# What a task of srun finds, one on each of two nodes.
TASK = {f"SLURM_{name}": "0" for name in ("STEP_ID", "PROCID", "LOCALID")}
TASK |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.fixture(scope="module", autouse=True)
def _forked_programs(python: ForkServer) -> Iterator[None]:
    """`python` and `torchrun` that start in no time; tests/integration types the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PROGRAMS", python.programs)
        patch.setitem(OURS, "PYTHON_EXEC", str(python.programs / "python"))  # torchrun starts its ranks by it
        yield


@dataclass(frozen=True)
class Printed:
    """What a recipe printed: losses by update, and the named numbers at the end."""

    losses: list[float]
    numbers: dict[str, float]


BY_THE_LIBRARY = """
from pathlib import Path
from everyrank.builtin import digits

digits.DATA = Path(__file__).with_name("digits.csv.gz")
workload = digits.workload(norm="{norm}", epochs=2)
{more}
"""
MORE = {  # that the workload has
    "weighted_sampler": """
import dataclasses
labels = digits.Digits(held_out=False).tensors[1]
workload = dataclasses.replace(workload, weights=lambda: 1 / labels.bincount()[labels].double())
"""
}


def library(cli: Cli, name: str) -> Record:
    """The same training by the library, on the same samples."""
    norm = "batch" if name in BATCH_NORM else "group"
    num_rows = len(DIGITS) if name in WHOLE else NUM_ROWS
    return by_the_library(cli, LAYOUTS[name], num_rows, norm, MORE.get(name, ""))


@cache
def by_the_library(cli: Cli, layout: str, num_rows: int, norm: str = "group", more: str = "") -> Record:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "workload.py").write_text(BY_THE_LIBRARY.format(norm=norm, more=more))
        write_digits(Path(folder), num_rows)
        record = train_workload(cli, Path(folder), layout, size=1 if layout.startswith("single") else 2)
    num_samples = num_rows - num_rows // 5
    assert len(record.loss) == 2 * -(-num_samples // 64)
    return record


def train_workload(cli: Cli, folder: Path, layout: str, size: int) -> Record:
    """The training of the workload file in that folder, by the library."""
    done = cli.on_ranks(
        folder, "train", "workload.py", "--layout", layout, "--save-every", "0", "--out", "out", size=size
    )
    assert done.status == 0, done.err
    return read_records(folder / "out" / "record.json")[0]


def write_digits(folder: Path, num_rows: int) -> None:
    (folder / "digits.csv.gz").write_bytes(gzip.compress(b"".join(DIGITS[:num_rows]), 1))


def text_of(name: str) -> str:
    """The recipe, shortened where it has data of its own."""
    text = (RECIPES / f"{name}.py").read_text()
    for before, after in SHORTER.get(name, []):
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


def beside(folder: Path, name: str, text: str = "") -> None:
    """The recipe, or this text of it, the file that it imports and its data in this folder."""
    (folder / f"{name}.py").write_text(text or text_of(name))
    for module in SHARED.glob("*.py"):
        (folder / module.name).write_text(module.read_text())
    write_digits(folder, len(DIGITS) if name in WHOLE else NUM_ROWS)


def printed(cli: Cli, folder: Path, name: str, text: str) -> Printed:
    """Run a recipe with its data beside it, as the commands in its header say."""
    beside(folder, name, text)
    commands = in_float64(text)
    if any(command.endswith(" &") or command.startswith("export ") for command in commands):
        return read(typed(folder, "\n".join(commands)).stdout)  # lines that only one shell can run
    return read("".join(output(cli, folder, command) for command in commands))


def in_float64(text: str) -> list[str]:
    """The commands in the header of a recipe, with the flag for comparing."""
    commands = re.findall(r"^Run: (.*)$", text, re.MULTILINE)
    return [re.sub(r"(\.py\b.*?)( &)?$", r"\1 --float64\2", command) for command in commands]


def output(cli: Cli, folder: Path, command: str) -> str:
    """What a command prints in this folder: forked where torchrun would start it, started where it starts itself."""
    program, *words = shlex.split(command)
    if program == "torchrun":
        place = next(index for index, word in enumerate(words) if word.endswith(".py"))
        size = int(words[words.index("--nproc-per-node") + 1])
        done = cli.on_ranks(folder, *words[place + 1 :], size=size, script=words[place])
        assert done.status == 0, done.err
        return done.out
    return typed(folder, command).stdout


def typed(folder: Path, commands: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run lines as a person types them, with `python` and all else of this environment first on the path."""
    environment = {**os.environ, **OURS, "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", **variables}
    commands = re.sub(r"\b2951\d\b", free_port(), commands)  # another test may be at the port of the header
    shell = subprocess.Popen(
        ["/bin/sh", "-e"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = shell.communicate(commands, timeout=120)  # until those in the background have ended too
    except BaseException:
        os.killpg(shell.pid, signal.SIGKILL)  # and whatever it started
        shell.wait()
        raise
    assert shell.returncode == status, err
    return subprocess.CompletedProcess(commands, shell.returncode, out, err)


def read(stdout: str) -> Printed:
    """The losses in it; of an update that was done twice, after a checkpoint, the later one."""
    found = {
        int(update): float(loss) for update, loss in re.findall(r"^update (\d+) loss (\S+)$", stdout, re.MULTILINE)
    }
    assert sorted(found) == list(range(len(found)))
    numbers = re.findall(r"^(top1|top5|eval_loss|eval_samples) (\S+)$", stdout, re.MULTILINE)
    return Printed([found[update] for update in sorted(found)], {key: float(value) for key, value in numbers})


def distance(found: Printed, record: Record) -> float:
    """The largest relative difference of a loss; inf where a number of the evaluation differs."""
    assert len(found.losses) == len(record.loss)
    right = round(record.metrics["top1"], 4) == found.numbers["top1"]
    if "eval_loss" in found.numbers:
        right = right and abs(found.numbers["eval_loss"] / record.metrics["eval_loss"] - 1) <= 1e-12
        right = right and found.numbers["eval_samples"] == NUM_ROWS // 5
    gaps = [abs(a - b) / abs(b) for a, b in zip(found.losses, record.loss, strict=True)]
    return max(gaps) if right else float("inf")


@pytest.mark.parametrize("name", NAMES)
def test_mutation_differs(cli: Cli, tmp_path: Path, name: str) -> None:
    """With a mistake that people make, the script still runs, and its numbers differ.

    As it is, each recipe is compared by its own command, in tests/integration/test_recipe_commands.py.
    """
    text = text_of(name)
    before, after = MUTATIONS[name]
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    assert distance(printed(cli, tmp_path, name, text.replace(before, after)), library(cli, name)) > 1e-9


# --- those with a network of their own


@cache
def alone(name: str) -> Printed:
    """What the script prints when plain python starts it: one process, without a process group."""
    with tempfile.TemporaryDirectory() as folder:
        beside(Path(folder), name)
        return read(typed(Path(folder), f"python {name}.py --float64").stdout)


def gap(found: Printed, whole: Printed) -> float:
    """The largest relative difference of a loss or of the evaluation's."""
    assert len(found.losses) == len(whole.losses) == 12
    assert found.numbers.keys() == whole.numbers.keys() >= {"top1"}
    pairs = [
        *zip(found.losses, whole.losses, strict=True),
        *((found.numbers[k], whole.numbers[k]) for k in found.numbers),
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


TRANSFORMER = """
import tensor as recipe
import torch, torch.nn.functional as F
from everyrank import Workload

workload = Workload(
    name="rows", model=recipe.build,
    train_data=lambda: recipe.load(torch.float32)[0],
    eval_data=lambda: recipe.load(torch.float32)[1],
    loss=lambda output, target: (F.cross_entropy(output, target, reduction="sum"), len(target)),
    metrics={"top1": lambda output, target: ((output.argmax(1) == target).sum(), len(target))},
    optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4),
    clip_norm=1.0, global_batch=64, epochs=2)
"""


def test_network_of_its_own_is_trained_as_the_library_would(cli: Cli, tmp_path: Path) -> None:
    """What the others are compared with is itself compared: the same network, as a workload on one device."""
    beside(tmp_path, "tensor")
    (tmp_path / "workload.py").write_text(TRANSFORMER)
    assert distance(alone("tensor"), train_workload(cli, tmp_path, "single:precision=float64", size=1)) <= 1e-12


@pytest.mark.parametrize("name", ALONE)
def test_mutation_differs_from_one_process(cli: Cli, tmp_path: Path, name: str) -> None:
    text = text_of(name)
    before, after = MUTATIONS[name]
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    assert gap(printed(cli, tmp_path, name, text.replace(before, after)), alone(ALONE[name])) > 1e-9


def difference(cli: Cli, folder: Path, name: str, text: str) -> float:
    """From the losses and the evaluation that this recipe is to have."""
    found = printed(cli, folder, name, text)
    return gap(found, alone(ALONE[name])) if name in ALONE else distance(found, library(cli, name))


@pytest.mark.parametrize(("name", "before", "after"), MORE_MUTATIONS)
def test_more_mutations_differ(cli: Cli, tmp_path: Path, name: str, before: str, after: str) -> None:
    text = text_of(name)
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    assert difference(cli, tmp_path, name, text.replace(before, after)) > 1e-9


@pytest.mark.parametrize(("name", "size", "change"), OTHER_STARTS)
def test_other_starts_are_equal(cli: Cli, tmp_path: Path, name: str, size: int, change: tuple[str, str]) -> None:
    text = text_of(name)
    assert change[0] in text
    text = re.sub(
        "^Run: .*$",
        f"Run: torchrun --nproc-per-node {size} {name}.py",
        text.replace(*change),
        count=1,
        flags=re.MULTILINE,
    )
    assert difference(cli, tmp_path, name, text) <= 1e-12


@pytest.mark.parametrize(
    ("name", "words", "before", "after"),
    [
        ("ddp_amp", "", "enabled=dtype == torch.float32", "enabled=False"),
        ("fsdp", "--bf16", "if bf16 else", "if not bf16 else"),
    ],
)
def test_low_precision_is_low_and_trains(
    cli: Cli, tmp_path: Path, name: str, words: str, before: str, after: str
) -> None:
    """The first losses differ from float64's by about a thousandth; without bf16, by what float32 rounds.

    Later on, a unit of a ReLU may end up on the other side of zero, on some processors in the second epoch.
    """
    text = text_of(name)
    assert text.count(before) == 1
    if name in ALONE:
        beside(tmp_path, ALONE[name])
        write_digits(tmp_path, len(DIGITS))
        exact = read(typed(tmp_path, f"python {ALONE[name]}.py --float64").stdout).losses
    else:
        exact = by_the_library(cli, LAYOUTS[name], len(DIGITS)).loss
    gaps = []
    for written in (text, text.replace(before, after)):
        beside(tmp_path, name, written)
        write_digits(tmp_path, len(DIGITS))
        (tmp_path / "digits.py").write_text(
            (SHARED / "digits.py").read_text().replace("    if every_update:", "    if True:")
        )
        losses = read(output(cli, tmp_path, f"torchrun --nproc-per-node 2 {name}.py {words}")).losses
        assert len(losses) == len(exact)
        gaps.append(statistics.median(abs(a - b) / abs(b) for a, b in zip(losses[:12], exact[:12], strict=True)))
    assert 1e-4 < gaps[0] < 0.2
    assert 1e-9 < gaps[1] < 1e-5


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("tensor", 3, "4 heads cannot be divided over 3 ranks"),
        ("expert", 3, "4 experts cannot be divided over 3 ranks"),
        ("fsdp_tensor", 3, "TENSOR=2 has to divide the 3 ranks"),
        ("hsdp", 3, "SHARDS=2 has to divide the 3 ranks"),
        ("pipeline", 5, "needs 1 to 4 ranks"),
        ("context", 5, "LENGTH=96"),
    ],
)
def test_number_of_ranks_that_does_not_fit_is_refused(tmp_path: Path, name: str, size: int, said: str) -> None:
    """By rank 0 in one line, before it looks for the others; these say nothing, and end as it does."""
    beside(tmp_path, name)
    line = refusal(tmp_path, f"python {name}.py", **by_hand(0, "1", size))
    assert line.startswith(f"{name}.py: {said}")
    assert str(size) in line
    assert typed(tmp_path, f"python {name}.py", 2, **by_hand(1, "1", size)).stderr == ""
    if name not in ALONE or ALONE[name] != name:  # those that plain python does not train
        assert refusal(tmp_path, f"python {name}.py") == line.replace(str(size), "0", 1)


def test_batch_with_fewer_samples_than_ranks_is_refused(tmp_path: Path) -> None:
    """Of 321 samples the last batch has one: one of two ranks would have none."""
    beside(tmp_path, "ddp_torchrun")
    write_digits(tmp_path, 401)
    # torchrun ends those that still wait for one that has left
    done = typed(tmp_path, "torchrun --standalone --nproc-per-node 2 ddp_torchrun.py", 1)
    assert "2 ranks share a batch of 1 samples" in done.stderr
    assert not done.stdout


# Mistakes in the files that the recipes share: (file, recipe, the right text, the wrong one).
SHARED_MUTATIONS = [
    # all ranks read the same samples
    ("digits", "ddp_torchrun", "tensor_split(self.world_size)[self.rank]", "tensor_split(self.world_size)[0]"),
    ("digits", "ddp_torchrun", "manual_seed(SEED + self.epoch)", "manual_seed(SEED)"),  # every epoch in the same order
    # the last batch divided by the full size
    ("digits", "ddp_torchrun", "min(batch_size, num_samples - start)", "batch_size"),
    ("digits", "ddp_torchrun", "(predicted.to(device) == labels.to(device)).sum()", "len(labels)"),
    # the halves of two heads are taken for heads
    ("transformer", "tensor", "(-1, WIDTH // HEADS)", "(HEADS, -1)"),
]


@pytest.mark.parametrize(("file", "recipe", "before", "after"), SHARED_MUTATIONS)
def test_mutation_of_a_shared_file_differs(
    cli: Cli, tmp_path: Path, file: str, recipe: str, before: str, after: str
) -> None:
    text = (SHARED / f"{file}.py").read_text()
    assert text.count(before) == 1
    beside(tmp_path, recipe)
    (tmp_path / f"{file}.py").write_text(text.replace(before, after))
    losses = read(output(cli, tmp_path, f"torchrun --nproc-per-node 2 {recipe}.py --float64"))
    if recipe in ALONE:
        assert gap(losses, alone(ALONE[recipe])) > 1e-9
    else:
        assert distance(losses, library(cli, recipe)) > 1e-9


def test_average_after_every_update_equals_ddp(cli: Cli, tmp_path: Path) -> None:
    beside(tmp_path, "local_sgd")
    found = read(output(cli, tmp_path, "torchrun --nproc-per-node 2 local_sgd.py --every 1 --float64"))
    assert distance(found, library(cli, "ddp_torchrun")) <= 1e-12


@pytest.mark.parametrize("way", ["file", "env"])
def test_other_ways_to_meet(cli: Cli, tmp_path: Path, way: str) -> None:
    """What the header's own command does over TCP; without --init under a launcher, too."""
    beside(tmp_path, "ddp_by_hand")
    line = "python ddp_by_hand.py --float64"
    if way == "file":
        lines = [f"{line} --rank {rank} --world-size 2 --init file://{tmp_path}/meeting" for rank in range(2)]
    else:
        place = f"WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
        lines = [f"RANK={rank} {place} {line}" for rank in range(2)]
    found = read(typed(tmp_path, " &\n".join(lines)).stdout)
    assert distance(found, library(cli, "ddp_by_hand")) <= 1e-12
    assert not list(tmp_path.glob("meeting*"))


@pytest.mark.parametrize("name", ALL)
def test_recipe_is_standalone(name: str) -> None:
    """torch, digits.py and the standard library only, never everyrank; short, with a command to run it by."""
    text = (RECIPES / f"{name}.py").read_text()
    tree = ast.parse(text)
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.partition(".")[0] for module in modules}
    extra = {"imagenet_ddp": {"PIL", "torchvision"}, "ray_actors": {"ray"}, "horovod_ddp": {"horovod"}}.get(name, set())
    assert roots <= {"torch", "digits", "transformer", *extra, *sys.stdlib_module_names}
    assert len(text.splitlines()) <= LONG.get(name, 175)
    said = ast.get_docstring(tree) or ""
    assert all(re.search(rf"^{word}  +\S", said, re.MULTILINE) for word in ("Memory", "Communication", "Use when"))
    assert name in OPERATIONS or '"--float64"' in text  # float32 without it
    command = re.search(r"^Run: (?:[A-Z_]+=\S+ )*(\S+) ", said, re.MULTILINE)
    assert command is not None
    assert command[1] in {"python", "torchrun", "export", "srun", "mpirun", "horovodrun"}


# --- what the recipes that are started by hand say of a start that cannot work


def refusal(folder: Path, command: str, **variables: str) -> str:
    """The one line that it says, with status 2, at once."""
    began = time.monotonic()
    done = typed(folder, command, 2, **variables)
    assert time.monotonic() - began < 60
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    return line


def test_file_of_a_killed_run_is_recognised(tmp_path: Path) -> None:
    """Rank 0 is killed while it waits; after that both ranks of the next run name the file, in any order."""
    beside(tmp_path, "ddp_by_hand")
    meeting = tmp_path / "meeting"
    words = f"ddp_by_hand.py --world-size 2 --init file://{meeting} --rank"
    killed = subprocess.Popen([PROGRAMS / "python", *shlex.split(words), "0"], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not meeting.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "in use by another run" in refusal(tmp_path, f"python {words} 0")  # it lives still
    killed.kill()
    killed.wait()
    for rank in (1, 0):
        line = refusal(tmp_path, f"python {words} {rank}")
        assert line.startswith(f"ddp_by_hand.py: {meeting} ")
        assert "remove it" in line
    meeting.unlink()
    typed(tmp_path, f"python {words} 0 &\npython {words} 1")
    assert not list(tmp_path.glob("meeting*"))  # neither the file nor its lock


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "lacks RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "lacks MASTER_ADDR: "),
        ({**by_hand(0, "1"), "WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        (by_hand(2, "1"), "rank 2 of 2: ranks count from 0 to 1"),
    ],
)
def test_incomplete_environment_is_named(tmp_path: Path, change: dict[str, str], said: str) -> None:
    beside(tmp_path, "ddp_by_hand")
    assert said in refusal(tmp_path, "python ddp_by_hand.py", **change)


@pytest.mark.parametrize(
    ("change", "gpus", "said"),
    [
        ({"SLURM_JOB_ID": "7"}, 0, "srun --ntasks 2 --cpu-bind=none python slurm.py"),
        ({}, 0, "not in a job of Slurm"),
        ({}, 4, "not in a job of Slurm"),
        ({**TASK, "SLURM_NTASKS": "2"}, 4, "4 GPUs: srun --ntasks-per-node 4"),
        ({**TASK, "PATH": ""}, 1, "set MASTER_ADDR"),
    ],
)
def test_start_without_srun_is_refused(tmp_path: Path, change: dict[str, str], gpus: int, said: str) -> None:
    """In an allocation srun is forgotten easily; one task per node leaves GPUs idle."""
    beside(tmp_path, "slurm")
    count = (
        f"import runpy, torch; torch.cuda.device_count = lambda: {gpus}; runpy.run_path('slurm.py', None, '__main__')"
    )
    assert said in refusal(tmp_path, f"{PROGRAMS}/python -c {shlex.quote(count)}", **change)


def test_mpi_without_mpirun_is_refused(tmp_path: Path) -> None:
    beside(tmp_path, "mpi")
    assert "not started by mpirun" in refusal(tmp_path, "python mpi.py")
    two_hosts = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    two_hosts |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert "set MASTER_ADDR and MASTER_PORT" in refusal(tmp_path, "python mpi.py", **two_hosts)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("socket.gethostname()", "'host' + os.environ['GROUP_RANK']", "MASTER_ADDR=127.0.0.1 is 127.0.0.1 on host0"),
        ("torch.__version__", "'2.1' + os.environ['GROUP_RANK']", "not the same torch"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(tmp_path: Path, before: str, after: str, said: str) -> None:
    """Each of two torchruns says it, before anything is trained. On one machine the difference is pretended."""
    beside(tmp_path, "multi_node")
    text = (tmp_path / "multi_node.py").read_text()
    assert text.count(before) == 1
    (tmp_path / "multi_node.py").write_text(text.replace(before, after))
    commands = "\n".join(re.findall(r"^Run: (.*)$", text, re.MULTILINE))
    # the first torchrun that ends takes the store with it: not before the other's rank has spoken
    done = typed(tmp_path, commands.replace("torchrun ", "torchrun --monitor-interval 2 "), 1)  # torchrun's own status
    lines = done.stderr.split("multi_node.py: ")[1:]  # two processes write to one screen
    assert len(lines) == 2
    assert all(said in line for line in lines)
    assert not done.stdout
    if "torch" in said:
        vm = socket.gethostname()
        assert f"{vm} has 2.10, {vm} has 2.11" in lines[0]


def test_restart_goes_on_with_another_number_of_ranks(cli: Cli, tmp_path: Path) -> None:
    """Two ranks, of which one dies; the three that go on from the checkpoint print the losses of all updates."""
    beside(tmp_path, "elastic_torchrun")
    share = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = "torchrun --standalone --nproc-per-node {} elastic_torchrun.py --float64"
    done = typed(tmp_path, words.format(2) + " --fail-at 25", 1, **share)
    assert "resumes" not in done.stderr
    assert not done.stdout
    done = typed(tmp_path, words.format(3), **share)
    assert "of 3 resumes from update 20" in done.stderr
    assert distance(read(done.stdout), library(cli, "elastic_torchrun")) <= 1e-12
    assert not list(tmp_path.glob("elastic.p*"))


def test_new_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script, its data, and a batch script that starts it by its name; nothing is written over."""
    assert main(["new", "slurm", str(tmp_path / "train.py")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "digits.csv.gz",
        "digits.py",
        "train.py",
        "train.sbatch",
    ]
    assert str(tmp_path / "train.sbatch") in capsys.readouterr().out
    batch = (tmp_path / "train.sbatch").read_text()
    assert "python train.py" in batch
    assert "slurm." not in batch
    subprocess.run(["sh", "-n", str(tmp_path / "train.sbatch")], check=True)
    (tmp_path / "train.py").unlink()
    assert main(["new", "slurm", str(tmp_path / "train.py")]) == 2
    assert "train.sbatch: this file exists already" in capsys.readouterr().err
    assert not (tmp_path / "train.py").exists()
    assert main(["new", "slurm", str(tmp_path / "other.sbatch")]) == 2
    assert "give a name like train.py" in capsys.readouterr().err


# --- imagenet_ddp: images in folders, made of the shipped digits

WORKLOAD = """
from pathlib import Path
import torch, torch.nn.functional as F
import imagenet_ddp as recipe
from everyrank import Workload

folder = Path(__file__).parent / "images"
workload = Workload(
    name="images", model=lambda: recipe.build(10, 8, False),
    train_data=lambda: recipe.Images(folder / "train", 32, True),
    eval_data=lambda: recipe.Images(folder / "val", 32, False),
    loss=lambda output, target: (F.cross_entropy(output, target, reduction="sum"), len(target)),
    metrics={"top1": lambda output, target: ((output.argmax(1) == target).sum(), len(target))},
    optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4),
    schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.1), global_batch=16, epochs=2)
"""
COMMAND = (
    "torchrun --standalone --nproc-per-node {} imagenet_ddp.py images --batch 16 --size 32 --width 8 --workers {} "
    "--epochs {} --float64"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 images for training (so that batches are ragged), 23 held out, of 8 x 8 pixels enlarged to 40 x 40."""
    image = pytest.importorskip("PIL.Image", reason="not verified here: needs Pillow")
    from everyrank.builtin.digits import Digits

    folder = tmp_path_factory.mktemp("images")
    for kind, held_out, count in (("train", False, 50), ("val", True, 23)):
        for number in range(count):
            pixels, label = Digits(held_out)[number]
            place = folder / kind / str(int(label))
            place.mkdir(parents=True, exist_ok=True)
            small = image.fromarray((pixels[0] * 255).byte().numpy())
            small.resize((40, 40)).save(place / f"{number:03d}.png")
    return folder


def trained(cli: Cli, folder: Path, images: Path, text: str, *commands: str) -> Printed:
    (folder / "imagenet_ddp.py").write_text(text)
    if not (folder / "images").exists():
        (folder / "images").symlink_to(images)
    return read("".join(output(cli, folder, command) for command in commands))


@pytest.fixture(scope="module")
def by_library(cli: Cli, images: Path) -> Record:
    """The same training in one process by the library, of the script's own model, images and loss."""
    (images.parent / "my_images").mkdir()
    folder = images.parent / "my_images"
    (folder / "imagenet_ddp.py").write_text((RECIPES / "imagenet_ddp.py").read_text())
    (folder / "images").symlink_to(images)
    (folder / "workload.py").write_text(WORKLOAD)
    return train_workload(cli, folder, "single:precision=float64", size=1)


def test_imagenet_equals_the_library(cli: Cli, tmp_path: Path, images: Path, by_library: Record) -> None:
    """Two ranks with a loader worker each, stopped after an epoch and begun again; losses to 1e-12, top-1 exactly."""
    text = (RECIPES / "imagenet_ddp.py").read_text()
    found = trained(cli, tmp_path, images, text, COMMAND.format(2, 1, 1), COMMAND.format(2, 0, 2))
    assert found.losses == pytest.approx(by_library.loss, rel=1e-12)
    assert found.numbers["top1"] == round(by_library.metrics["top1"], 4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[rank].tolist()", "[0].tolist()"),  # every rank reads the same
        ("for number in (SEED, *key):", "for number in (os.getpid(), *key):"),  # augmentation of the process
    ],
)
def test_imagenet_mutation_differs(
    cli: Cli, tmp_path: Path, images: Path, by_library: Record, before: str, after: str
) -> None:
    text = (RECIPES / "imagenet_ddp.py").read_text()
    assert text.count(before) == 1
    wrong = trained(cli, tmp_path, images, text.replace(before, after), COMMAND.format(2, 0, 1))
    gaps = [abs(a - b) / b for a, b in zip(wrong.losses, by_library.loss[:4], strict=True)]
    assert max(gaps) > 1e-9


def test_imagenet_evaluates_what_it_has_trained(cli: Cli, tmp_path: Path, images: Path) -> None:
    """--evaluate: of its checkpoint, and of weights in a file, on another number of ranks; nothing is trained."""
    text = (RECIPES / "imagenet_ddp.py").read_text()
    after = trained(cli, tmp_path, images, text, COMMAND.format(2, 0, 1)).numbers
    saved = (tmp_path / "imagenet_ddp.pt").read_bytes()
    for size, more in ((2, ""), (1, " --pretrained weights.pt")):
        (tmp_path / "weights.pt").write_bytes(saved)
        found = trained(cli, tmp_path, images, text, COMMAND.format(size, 0, 9) + " --evaluate" + more)
        assert (found.numbers, found.losses) == (after, [])
    assert (tmp_path / "imagenet_ddp.pt").read_bytes() == saved


def test_imagenet_options_of_its_ancestor(cli: Cli, tmp_path: Path, images: Path) -> None:
    """--momentum and --weight-decay reach the optimizer; --pretrained starts from the weights of the file."""
    text = (RECIPES / "imagenet_ddp.py").read_text()
    one = COMMAND.format(1, 0, 1)
    plain = trained(cli, tmp_path, images, text, one).losses
    (tmp_path / "weights.pt").write_bytes((tmp_path / "imagenet_ddp.pt").read_bytes())
    for more, first_is_equal in (
        (" --momentum 0", True),
        (" --weight-decay 0.5", True),
        (" --pretrained weights.pt", False),
    ):
        (tmp_path / "imagenet_ddp.pt").unlink()
        losses = trained(cli, tmp_path, images, text, one + more).losses
        assert (losses[0] == plain[0]) == first_is_equal, more
        assert losses[1:] != plain[1:]
