"""Each recipe gives the losses of the library, and a mutated recipe does not.

Here the fork server starts the ranks, as torchrun would. tests/integration runs each recipe by the command in its
header, and the recipes that need a different launcher.
"""

from __future__ import annotations

import ast
import gzip
import os
import re
import runpy
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
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import everyrank
from everyrank import Record, read_records
from everyrank.cli import main
from forkserver import ForkServer
from processes import LOOPBACK, Cli, free_port, rank_environment

pytestmark = pytest.mark.integration

PACKAGE = Path(everyrank.__file__).parent
RECIPES_FOLDER = PACKAGE / "recipes"
SHARED_FOLDER = RECIPES_FOLDER / "shared"
PROGRAM_FOLDER = Path(sys.executable).parent  # `python` and `torchrun`
COMMAND_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}  # for each command of a recipe
ALL_RECIPES = sorted(path.stem for path in RECIPES_FOLDER.glob("*.py") if not path.stem.startswith("_"))
# These recipes need their own launcher, and are tested in tests/integration.
REQUIRED_LAUNCHERS = {"slurm": "srun", "mpi": "mpirun", "ray_actors": "Ray", "horovod_ddp": "horovodrun"}
SINGLE_PROCESS_REFERENCES = {  # these recipes have their own network; each is compared with this recipe in one process
    "tensor": "tensor",
    "fsdp_tensor": "tensor",
    "fsdp": "tensor",
    "hsdp": "tensor",
    "context": "context",
    "contrastive": "contrastive",
    "expert": "expert",
}
REPLAYED_RECIPES = {"parameter_server_async"}  # equivalent to no layout: tests/recipes/test_asynchronous.py
# These recipes show operations without training. tests/recipes/test_operations.py tests them.
OPERATION_RECIPES = {"point_to_point", "collectives", "process_groups"}
COMPRESSED_RECIPES = {"ddp_compressed"}  # with rounded gradients: tests/recipes/test_compressed.py
# tests/recipes/test_rpc.py tests these recipes.
RPC_RECIPES_WITH_OWN_NETWORK = {"ddp_rpc", "rpc_rnn", "rpc_reinforcement"}
# The maximum number of lines. For the other recipes it is 175.
MAX_LINES = {
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
TESTED_ELSEWHERE = {
    "imagenet_ddp",
    "ddp_uneven",
    *REQUIRED_LAUNCHERS,
    *SINGLE_PROCESS_REFERENCES,
    *OPERATION_RECIPES,
    *COMPRESSED_RECIPES,
    *REPLAYED_RECIPES,
    *RPC_RECIPES_WITH_OWN_NETWORK,
}
# imagenet_ddp reads images. Its tests are at the end of this file.
COMPARED_WITH_LIBRARY = [name for name in ALL_RECIPES if name not in TESTED_ELSEWHERE]
DIGITS = gzip.decompress((PACKAGE / "builtin" / "digits.csv.gz").read_bytes()).splitlines(keepends=True)
# The recipes read the first rows: 365 for training and 91 for validation. 2, 3 and 4 ranks do not divide these numbers.
# An epoch has 6 updates, the last with 45 samples.
NUM_ROWS = 456
# These recipes read all 1,797 rows, because their headers name updates of the second epoch.
RECIPES_WITH_ALL_ROWS = {"checkpoint_resume", "elastic_torchrun"}
# Recipes with their own data are shortened by replacements, in the distributed and in the single-process run.
SHORTENING = {
    "context": [("UPDATES = 40", "UPDATES = 12"), (".encode()))", ".encode()[:40_000]))")],
    "rpc_rnn": [("UPDATES = 60", "UPDATES = 12"), (".encode()))", ".encode()[:80_000]))")],
}

# The equivalent layout of each recipe. Recipes are compared in float64. Low precision has its own test.
EQUIVALENT_LAYOUTS = {
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

# Common mistakes: (original text, replacement).
MUTATIONS = {
    "single": (
        "F.cross_entropy(model(images), labels)",
        "F.cross_entropy(model(images), labels, reduction='sum') / BATCH",
    ),  # the last, smaller batch is divided by the full size
    "dataparallel": ("manual_seed(SEED + epoch)", "manual_seed(SEED)"),  # every epoch in the same order
    "ddp_spawn": ("/ batch_size", "/ len(labels)"),  # averages twice
    "ddp_torchrun": ("ddp(images)", "model(images)"),  # bypasses the wrapper: no gradient is reduced
    "ddp_amp": ("parameter.grad *= BATCH / batch_size", "pass"),  # the last batch is divided by the full size
    "weighted_sampler": ("SEED + self.epoch)", "SEED + self.epoch + self.rank)"),  # each rank draws its own samples
    "ddp_accumulate": ("is_last = index + 1 == ACCUMULATE", "is_last = index == 0"),
    "distributed_evaluation": (
        "range(rank, len(data), world_size)",
        "range(-(-len(data) // world_size))",  # every rank reads the first half
    ),
    "zero1": ("BATCH, rank, world_size)", "BATCH, 0, world_size)"),  # every rank reads the same samples
    "fsdp": ("(loss * world_size)", "loss"),  # the average is used as the sum
    "iterable_sharding": (  # divided twice: by rank and worker, and then by worker again
        "batch.tensor_split(self.world_size)[self.rank]",
        "batch.tensor_split(self.world_size * WORKERS)[self.rank * WORKERS + update % WORKERS]",
    ),
    "checkpoint_resume": (  # the order of the samples differs after resume
        "sampler.set_epoch(epoch)",
        "sampler.set_epoch(epoch + sampler.first_batch)",
    ),
    "ddp_by_hand": ("            optimizer.zero_grad()\n", ""),  # the gradients of earlier updates are added
    "multi_node": (  # the first rank of every host reads the same samples
        "BATCH, rank, world_size)",
        'BATCH, int(os.environ["LOCAL_RANK"]), world_size)',
    ),
    "elastic_torchrun": ('optimizer.load_state_dict(checkpoint["optimizer"])', "pass"),  # the momentum is lost
    "local_sgd": ("num_samples += len(labels)", "num_samples += 1"),  # a rank with fewer samples has the same weight
    "ring_allreduce": ("manual_seed(SEED + epoch)", "manual_seed(SEED)"),  # its own checks cannot find this
    "slurm": ("/ batch_size", "/ BATCH"),
    "ddp_syncbn": ("synchronize(build(), cuda)", "build()"),  # each rank normalises by its own samples
    "mpi": ("        dist.all_reduce(losses)", "        pass"),  # rank 0 prints the losses of its half only
    "ray_actors": ("ddp(images)", "model(images)"),
    "rpc_autograd": (
        "for part in (first, second) for",
        "for part in (second,) for",
    ),  # only half of the network is trained
    "rpc_batched": ("/ len(labels)", "/ len(labels[local_part])"),  # the sum of the means of the trainers
    "rpc_pipeline": ("wait_all(outputs)", "wait_all(outputs[::-1])"),  # outputs are assigned to the wrong micro-batches
    "horovod_ddp": ("        op=hvd.Sum,\n", ""),  # the default averages a value that is already a sum
    "hsdp": ("loss * world_size", "loss * SHARDS"),  # averaged over replicas too
    "tensor": ("manual_seed(SEED + epoch)", "manual_seed(SEED + epoch + rank)"),  # each rank has its own order
    "fsdp_tensor": ("BATCH, shard, num_shards)", "BATCH, 0, num_shards)"),  # both shards read the same samples
    "pipeline": ("/ len(labels)", "/ len(micro_labels) / MICRO_BATCHES"),  # a mean of means of uneven micro-batches
    "model_parallel_two_devices": (
        "network.parameters()",
        "network.first_half.parameters()",
    ),  # only half of it is trained
    "parameter_server": ("/ count  # a sum", "/ BATCH  # a sum"),  # the last, smaller batch is divided by the full size
    "parameter_server_rpc": ("/ count  # a sum", "/ BATCH  # a sum"),
    "contrastive": ("        dist.all_reduce(grad)\n", ""),  # gradients from the losses of other ranks are lost
    "expert": ("dist.all_reduce(squares)", "squares *= world_size"),  # each rank clips by its local norm
    "context": (
        "= local_positions(rank, world_size)",
        "= torch.arange(LENGTH).chunk(world_size)[rank]",
    ),  # ring attention assumes the order of local_positions
}

BATCH_NORM_RECIPES = {"ddp_syncbn"}  # the other recipes have group norm

# More mistakes in recipes with more manual code.
MORE_MUTATIONS = [
    (
        "ddp_syncbn",
        "grad.clone()\n        dist.all_reduce(total)\n",
        "grad.clone()\n",
    ),  # gradients from the losses of other ranks are lost
    (
        "ddp_syncbn",
        "squares / count +",
        "squares / local_count / dist.get_world_size() +",
    ),  # assumes even parts
    (  # a sample repeated by DistributedSampler enters the statistics, but not the loss
        "ddp_syncbn",
        "F.cross_entropy(ddp(images), labels",
        "F.cross_entropy(ddp(torch.cat([images, images[:1]]))[: len(labels)], labels",
    ),
    ("contrastive", "sum(sizes[:rank])", "0"),  # every rank uses the first rows as its own
    ("contrastive", "zip(rows, sizes", "zip(rows[::-1], sizes"),  # rows of other ranks in place of the local rows
    ("tensor", "        dist.all_reduce(squares)\n", "        pass\n"),  # each rank scales by its local norm
    ("tensor", "(1 if split else world_size)", "1"),  # replicated parameters are counted once for each rank
    ("fsdp_tensor", "* pieces / dist.get_world_size()", ""),
    ("fsdp_tensor", "dist.all_reduce(losses, group=shards.get_group())", "dist.all_reduce(losses)"),
    (
        "pipeline",
        "zip(images.tensor_split(MICRO_BATCHES), labels.tensor_split(MICRO_BATCHES)",
        "zip(images.tensor_split(MICRO_BATCHES + 1), labels.tensor_split(MICRO_BATCHES + 1)",
    ),  # one micro-batch is dropped
    ("context", "            dist.all_reduce(flat)\n", ""),
    (
        "context",
        "self.positions(positions)",
        "self.positions(torch.arange(len(positions)))",
    ),  # positions start at 0 on each rank
    (
        "context",
        "ring_send_recv(kv_dkv)()",
        "(kv_dkv if step else ring_send_recv(kv_dkv)())",
    ),  # gradients stay at the neighbour
    ("context", "return slice(length // 2, length), slice(length)", "return slice(length), slice(length)"),
    ("expert", "for parameter in shared])\n        dist", "for parameter in shared]) / world_size\n        dist"),
    (
        "expert",
        "AllToAll.apply(grad, ctx.receive_counts, ctx.send_counts)",
        "torch.zeros(sum(ctx.send_counts), WIDTH, dtype=grad.dtype)",
    ),
    ("expert", "[order].split", ".split"),  # rows go to the wrong experts
    ("expert", "outputs[order.argsort()]", "outputs"),  # outputs are assigned to the wrong tokens
    ("weighted_sampler", "sampler.set_epoch(epoch)", "sampler.set_epoch(0)"),
    ("weighted_sampler", "1 / labels.bincount()[labels].double()", "torch.ones(len(labels), dtype=torch.float64)"),
    ("ddp_torchrun", "sampler.set_epoch(epoch)", "sampler.set_epoch(0)"),  # every epoch has the order of the first
    (  # the weights of a part differ from those in the whole network
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
    (
        "ddp_by_hand",
        "lr=0.05",
        "lr=0.05 * world_size",
    ),  # the global batch does not grow with the ranks, so lr must not be scaled
    ("ddp_by_hand", "sampler.set_epoch(epoch)", "sampler.set_epoch(epoch + rank)"),  # each rank has its own order
    ("parameter_server_rpc", "[self.pushed[trainer] for trainer in sorted(self.pushed)]", "[self.pushed[0]] * 2"),
    (
        "parameter_server",
        "[loss.item(), len(labels)]",
        "[loss.item(), BATCH // num_trainers]",
    ),  # as if all batches were full
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

# Numbers of ranks that the headers do not use: (recipe, ranks, replacement in the text).
OTHER_NUMBERS_OF_RANKS = [
    ("ddp_syncbn", 4, ("", "")),
    ("weighted_sampler", 3, ("", "")),
    ("ddp_torchrun", 4, ("", "")),  # 4 ranks do not divide the samples
    ("tensor", 4, ("", "")),
    ("fsdp_tensor", 2, ("", "")),
    ("fsdp_tensor", 4, ("TENSOR = 2", "TENSOR = 1")),
    ("hsdp", 4, ("SHARDS = 2", "SHARDS = 1")),
    ("fsdp", 3, ("", "")),
    ("ddp_accumulate", 3, ("", "")),
    ("ddp_torchrun", 3, ("", "")),  # 3 ranks do not divide the batch
    ("pipeline", 1, ("", "")),
    ("pipeline", 4, ("", "")),
    (
        "pipeline",
        3,
        ("MICRO_BATCHES = 7", "MICRO_BATCHES = 50"),
    ),  # the last batch of 45 samples has empty micro-batches
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


# Variables of an srun task, with one task on each of two nodes.
SRUN_TASK = {f"SLURM_{name}": "0" for name in ("STEP_ID", "PROCID", "LOCALID")}
SRUN_TASK |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.fixture(scope="module", autouse=True)
def _forked_programs(python: ForkServer) -> Iterator[None]:
    """Replace `python` and `torchrun` by programs of the fork server, which start quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PROGRAM_FOLDER", python.programs)
        # torchrun starts its ranks with PYTHON_EXEC
        patch.setitem(COMMAND_ENVIRONMENT, "PYTHON_EXEC", str(python.programs / "python"))
        yield


@dataclass(frozen=True)
class RecipeOutput:
    """The output of a recipe: losses by update, and the named numbers at the end."""

    losses: list[float]
    numbers: dict[str, float]


DIGITS_WORKLOAD = """
from pathlib import Path
from everyrank.builtin import digits

digits.DATA = Path(__file__).with_name("digits.csv.gz")
workload = digits.workload(norm="{norm}", epochs=2)
{more_code}
"""
MORE_WORKLOAD_CODE = {
    "weighted_sampler": """
import dataclasses
labels = digits.Digits(is_validation=False).tensors[1]
workload = dataclasses.replace(workload, weights=lambda: 1 / labels.bincount()[labels].double())
"""
}


def equivalent_record(cli: Cli, name: str) -> Record:
    """Return the record of the equivalent layout, trained by the library on the same samples."""
    norm = "batch" if name in BATCH_NORM_RECIPES else "group"
    num_rows = len(DIGITS) if name in RECIPES_WITH_ALL_ROWS else NUM_ROWS
    return digits_record(cli, EQUIVALENT_LAYOUTS[name], num_rows, norm, MORE_WORKLOAD_CODE.get(name, ""))


@cache
def digits_record(cli: Cli, layout: str, num_rows: int, norm: str = "group", more_code: str = "") -> Record:
    """Train the digits workload under a layout with the library, and return the record.

    `more_code` changes the workload.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "workload.py").write_text(DIGITS_WORKLOAD.format(norm=norm, more_code=more_code))
        write_digits(Path(folder), num_rows)
        record = train_workload(cli, Path(folder), layout, size=1 if layout.startswith("single") else 2)
    num_samples = num_rows - num_rows // 5
    assert len(record.loss) == 2 * -(-num_samples // 64)
    return record


def train_workload(cli: Cli, folder: Path, layout: str, size: int) -> Record:
    """Train the workload file in that folder with the library, and return the record."""
    result = cli.on_ranks(
        folder, "train", "workload.py", "--layout", layout, "--save-every", "0", "--out", "out", size=size
    )
    assert result.status == 0, result.err
    return read_records(folder / "out" / "record.json")[0]


def write_digits(folder: Path, num_rows: int) -> None:
    """Write the first rows of the digits into a folder."""
    (folder / "digits.csv.gz").write_bytes(gzip.compress(b"".join(DIGITS[:num_rows]), 1))


def recipe_text(name: str) -> str:
    """Return the text of a recipe, shortened if it has its own data."""
    text = (RECIPES_FOLDER / f"{name}.py").read_text()
    for before, after in SHORTENING.get(name, []):
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


def write_recipe(folder: Path, name: str, text: str = "") -> None:
    """Write the recipe into the folder, with the files that it imports and its data. `text` replaces its own text."""
    (folder / f"{name}.py").write_text(text or recipe_text(name))
    for module in SHARED_FOLDER.glob("*.py"):
        (folder / module.name).write_text(module.read_text())
    write_digits(folder, len(DIGITS) if name in RECIPES_WITH_ALL_ROWS else NUM_ROWS)


def run_recipe(cli: Cli, folder: Path, name: str, text: str) -> RecipeOutput:
    """Run this text of a recipe with the commands in its header. Return its losses and numbers."""
    write_recipe(folder, name, text)
    commands = float64_commands(text)
    if any(command.endswith(" &") or command.startswith("export ") for command in commands):
        return parse_output(run_commands(folder, "\n".join(commands)).stdout)  # these lines need one shell
    return parse_output("".join(command_output(cli, folder, command) for command in commands))


def float64_commands(text: str) -> list[str]:
    """Return the commands in the header of a recipe, with --float64 for comparisons."""
    commands = re.findall(r"^Run: (.*)$", text, re.MULTILINE)
    return [re.sub(r"(\.py\b.*?)( &)?$", r"\1 --float64\2", command) for command in commands]


def command_output(cli: Cli, folder: Path, command: str) -> str:
    """Return the output of a command. Ranks of torchrun are forked."""
    program, *args = shlex.split(command)
    if program == "torchrun":
        script_index = next(index for index, arg in enumerate(args) if arg.endswith(".py"))
        size = int(args[args.index("--nproc-per-node") + 1])
        result = cli.on_ranks(folder, *args[script_index + 1 :], size=size, script=args[script_index])
        assert result.status == 0, result.err
        return result.out
    return run_commands(folder, command).stdout


def run_commands(folder: Path, commands: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run shell commands with `python` and the other programs of this environment first on PATH."""
    environment = {
        **os.environ,
        **COMMAND_ENVIRONMENT,
        "PATH": f"{PROGRAM_FOLDER}{os.pathsep}{os.environ['PATH']}",
        **variables,
    }
    commands = re.sub(r"\b2951\d\b", free_port(), commands)  # another test may use the port of the header
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
        out, err = shell.communicate(commands, timeout=200)  # returns when background processes have ended too
    except BaseException:
        os.killpg(shell.pid, signal.SIGKILL)  # ends all processes of the shell too
        shell.wait()
        raise
    assert shell.returncode == status, err
    return subprocess.CompletedProcess(commands, shell.returncode, out, err)


def parse_output(stdout: str) -> RecipeOutput:
    """Return the losses and numbers that a recipe has printed.

    If it repeated an update after a checkpoint, the later loss counts.
    """
    losses_by_update = {
        int(update): float(loss) for update, loss in re.findall(r"^update (\d+) loss (\S+)$", stdout, re.MULTILINE)
    }
    assert sorted(losses_by_update) == list(range(len(losses_by_update)))
    numbers = re.findall(r"^(top1|top5|eval_loss|eval_samples) (\S+)$", stdout, re.MULTILINE)
    return RecipeOutput(
        [losses_by_update[update] for update in sorted(losses_by_update)], {key: float(value) for key, value in numbers}
    )


def difference_from_record(actual: RecipeOutput, record: Record) -> float:
    """Return the largest relative difference of a loss, or inf if a number of the validation differs."""
    assert len(actual.losses) == len(record.loss)
    are_equal = round(record.metrics["top1"], 4) == actual.numbers["top1"]
    if "eval_loss" in actual.numbers:
        are_equal = are_equal and abs(actual.numbers["eval_loss"] / record.metrics["eval_loss"] - 1) <= 1e-12
        are_equal = are_equal and actual.numbers["eval_samples"] == NUM_ROWS // 5
    differences = [abs(a - b) / abs(b) for a, b in zip(actual.losses, record.loss, strict=True)]
    return max(differences) if are_equal else float("inf")


@pytest.mark.parametrize("name", COMPARED_WITH_LIBRARY)
def test_mutation_differs(cli: Cli, tmp_path: Path, name: str) -> None:
    """A mutated recipe still runs, but its numbers differ from those of the library.

    The unchanged recipe is compared in tests/integration/test_recipe_commands.py.
    """
    text = recipe_text(name)
    before, after = MUTATIONS[name]
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    assert (
        difference_from_record(
            run_recipe(cli, tmp_path, name, text.replace(before, after)), equivalent_record(cli, name)
        )
        > 1e-9
    )


# --- recipes with their own network


@cache
def single_process_output(name: str) -> RecipeOutput:
    """Return the output of a recipe in one process without a process group."""
    with tempfile.TemporaryDirectory() as folder:
        write_recipe(Path(folder), name)
        return parse_output(run_commands(Path(folder), f"python {name}.py --float64").stdout)


def difference_from_output(actual: RecipeOutput, single_process: RecipeOutput) -> float:
    """Return the largest relative difference of a loss or of a number of the validation."""
    assert len(actual.losses) == len(single_process.losses) == 12
    assert actual.numbers.keys() == single_process.numbers.keys() >= {"top1"}
    pairs = [
        *zip(actual.losses, single_process.losses, strict=True),
        *((actual.numbers[k], single_process.numbers[k]) for k in actual.numbers),
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


TRANSFORMER_WORKLOAD = """
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


def test_recipe_in_one_process_equals_the_library(cli: Cli, tmp_path: Path) -> None:
    """Other recipes are compared with this one. Its network is a workload on one device here."""
    write_recipe(tmp_path, "tensor")
    (tmp_path / "workload.py").write_text(TRANSFORMER_WORKLOAD)
    assert (
        difference_from_record(
            single_process_output("tensor"), train_workload(cli, tmp_path, "single:precision=float64", size=1)
        )
        <= 1e-12
    )


@pytest.mark.parametrize("name", SINGLE_PROCESS_REFERENCES)
def test_mutation_differs_from_one_process(cli: Cli, tmp_path: Path, name: str) -> None:
    text = recipe_text(name)
    before, after = MUTATIONS[name]
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    assert (
        difference_from_output(
            run_recipe(cli, tmp_path, name, text.replace(before, after)),
            single_process_output(SINGLE_PROCESS_REFERENCES[name]),
        )
        > 1e-9
    )


def difference_from_reference(cli: Cli, folder: Path, name: str, text: str) -> float:
    """Return the difference of a recipe from the library, or from its reference in one process."""
    actual = run_recipe(cli, folder, name, text)
    return (
        difference_from_output(actual, single_process_output(SINGLE_PROCESS_REFERENCES[name]))
        if name in SINGLE_PROCESS_REFERENCES
        else difference_from_record(actual, equivalent_record(cli, name))
    )


@pytest.mark.parametrize(("name", "before", "after"), MORE_MUTATIONS)
def test_more_mutations_differ(cli: Cli, tmp_path: Path, name: str, before: str, after: str) -> None:
    text = recipe_text(name)
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    assert difference_from_reference(cli, tmp_path, name, text.replace(before, after)) > 1e-9


@pytest.mark.parametrize(("name", "size", "change"), OTHER_NUMBERS_OF_RANKS)
def test_different_numbers_of_ranks_are_equal(
    cli: Cli, tmp_path: Path, name: str, size: int, change: tuple[str, str]
) -> None:
    text = recipe_text(name)
    assert change[0] in text
    text = re.sub(
        "^Run: .*$",
        f"Run: torchrun --nproc-per-node {size} {name}.py",
        text.replace(*change),
        count=1,
        flags=re.MULTILINE,
    )
    assert difference_from_reference(cli, tmp_path, name, text) <= 1e-12


@pytest.mark.parametrize(
    ("name", "args", "before", "after"),
    [
        ("ddp_amp", "", "enabled=dtype == torch.float32", "enabled=False"),
        ("fsdp", "--bf16", "if bf16 else", "if not bf16 else"),
    ],
)
def test_low_precision_is_low_and_trains(
    cli: Cli, tmp_path: Path, name: str, args: str, before: str, after: str
) -> None:
    """First losses differ from float64 by about a thousandth. Without low precision, they differ by float32 rounding.

    Later losses are not compared. A ReLU input near zero may change its sign on some processors.
    """
    text = recipe_text(name)
    assert text.count(before) == 1
    if name in SINGLE_PROCESS_REFERENCES:
        write_recipe(tmp_path, SINGLE_PROCESS_REFERENCES[name])
        write_digits(tmp_path, len(DIGITS))
        float64_losses = parse_output(
            run_commands(tmp_path, f"python {SINGLE_PROCESS_REFERENCES[name]}.py --float64").stdout
        ).losses
    else:
        float64_losses = digits_record(cli, EQUIVALENT_LAYOUTS[name], len(DIGITS)).loss
    median_differences = []
    for variant in (text, text.replace(before, after)):
        write_recipe(tmp_path, name, variant)
        write_digits(tmp_path, len(DIGITS))
        (tmp_path / "digits.py").write_text(
            (SHARED_FOLDER / "digits.py").read_text().replace("    if every_update:", "    if True:")
        )
        losses = parse_output(command_output(cli, tmp_path, f"torchrun --nproc-per-node 2 {name}.py {args}")).losses
        assert len(losses) == len(float64_losses)
        median_differences.append(
            statistics.median(abs(a - b) / abs(b) for a, b in zip(losses[:12], float64_losses[:12], strict=True))
        )
    assert 1e-4 < median_differences[0] < 0.2
    assert 1e-9 < median_differences[1] < 1e-5


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("tensor", 3, "4 heads cannot be divided over 3 ranks"),
        ("expert", 3, "4 experts cannot be divided over 3 ranks"),
        ("fsdp_tensor", 3, "TENSOR=2 has to divide the 3 ranks"),
        ("hsdp", 3, "SHARDS=2 has to divide the 3 ranks"),
        ("pipeline", 5, "needs 1 to 4 ranks"),
        ("context", 5, "LENGTH=96"),
    ],
)
def test_unsupported_number_of_ranks_is_refused(tmp_path: Path, name: str, size: int, message: str) -> None:
    """Rank 0 prints one line before it connects to other ranks.

    The others exit with the same status and print nothing.
    """
    write_recipe(tmp_path, name)
    line = refusal_line(tmp_path, f"python {name}.py", **rank_environment(0, "1", size))
    assert line.startswith(f"{name}.py: {message}")
    assert str(size) in line
    assert run_commands(tmp_path, f"python {name}.py", 2, **rank_environment(1, "1", size)).stderr == ""
    if SINGLE_PROCESS_REFERENCES.get(name) != name:  # this recipe does not train in one process
        assert refusal_line(tmp_path, f"python {name}.py") == line.replace(str(size), "0", 1)


def test_batch_with_fewer_samples_than_ranks_is_refused(tmp_path: Path) -> None:
    """The last of 321 samples is a batch of its own. One of two ranks would have no sample."""
    write_recipe(tmp_path, "ddp_torchrun")
    write_digits(tmp_path, 401)
    # torchrun ends ranks that wait for one that has exited
    result = run_commands(tmp_path, "torchrun --standalone --nproc-per-node 2 ddp_torchrun.py", 1)
    assert "2 ranks share a batch of 1 samples" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("num_samples", [1, 3, 64, 65, 130])
def test_each_sample_is_counted_once_by_any_number_of_ranks(num_samples: int) -> None:
    """All ranks call the model equally often, also if the last batch has fewer samples than ranks."""
    count_correct = runpy.run_path(str(SHARED_FOLDER / "digits.py"))["count_correct"]
    labels = torch.arange(num_samples) % 3
    data = TensorDataset(F.one_hot(torch.arange(num_samples) % 2, 3), labels)
    expected = int((torch.arange(num_samples) % 2 == labels).sum())
    for world_size in (1, 2, 4):
        counts, num_calls = 0, set[int]()
        for rank in range(world_size):
            model = Counting()
            counts += int(count_correct(model, data, torch.device("cpu"), rank, world_size))
            num_calls.add(model.num_calls)
        assert counts == expected
        assert len(num_calls) == 1


class Counting(torch.nn.Module):
    """Returns its input and counts the calls."""

    num_calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return inputs


def test_groups_of_recipes_have_a_timeout() -> None:
    """Groups and meshes do not inherit the timeout of init_process_group; torch's default is 10 or 30 minutes."""
    num_groups = 0
    for name in ALL_RECIPES:
        text = (RECIPES_FOLDER / f"{name}.py").read_text().partition('"""')[2].partition('"""')[2]
        for line in [line for line in text.splitlines() if "dist.new_group(" in line]:
            num_groups += 1
            assert "timeout=" in line, (name, line)
        if "mesh_dim_names=" in text and name != "process_groups":  # which trains nothing
            num_groups += 1
            assert ".set_timeout(" in text, name
    assert num_groups >= 5


# Mistakes in files that the recipes share: (file, recipe, original text, replacement).
SHARED_MUTATIONS = [
    # all ranks read the same samples
    ("digits", "ddp_torchrun", "tensor_split(self.world_size)[self.rank]", "tensor_split(self.world_size)[0]"),
    ("digits", "ddp_torchrun", "manual_seed(SEED + self.epoch)", "manual_seed(SEED)"),  # every epoch has the same order
    # the last batch is divided by the full size
    ("digits", "ddp_torchrun", "min(batch_size, num_samples - start)", "batch_size"),
    ("digits", "ddp_torchrun", "(predicted.to(device) == labels.to(device))[: len(indices)].sum()", "len(labels)"),
    # halves of two heads are used as one head
    ("transformer", "tensor", "(-1, WIDTH // HEADS)", "(HEADS, -1)"),
]


@pytest.mark.parametrize(("file", "recipe", "before", "after"), SHARED_MUTATIONS)
def test_mutation_of_a_shared_file_differs(
    cli: Cli, tmp_path: Path, file: str, recipe: str, before: str, after: str
) -> None:
    text = (SHARED_FOLDER / f"{file}.py").read_text()
    assert text.count(before) == 1
    write_recipe(tmp_path, recipe)
    (tmp_path / f"{file}.py").write_text(text.replace(before, after))
    mutated = parse_output(command_output(cli, tmp_path, f"torchrun --nproc-per-node 2 {recipe}.py --float64"))
    if recipe in SINGLE_PROCESS_REFERENCES:
        assert difference_from_output(mutated, single_process_output(SINGLE_PROCESS_REFERENCES[recipe])) > 1e-9
    else:
        assert difference_from_record(mutated, equivalent_record(cli, recipe)) > 1e-9


def test_local_sgd_that_averages_after_each_update_equals_ddp(cli: Cli, tmp_path: Path) -> None:
    write_recipe(tmp_path, "local_sgd")
    actual = parse_output(command_output(cli, tmp_path, "torchrun --nproc-per-node 2 local_sgd.py --every 1 --float64"))
    assert difference_from_record(actual, equivalent_record(cli, "ddp_torchrun")) <= 1e-12


@pytest.mark.parametrize("init_method", ["file", "env"])
def test_other_init_methods_of_ddp_by_hand(cli: Cli, tmp_path: Path, init_method: str) -> None:
    """The command in the header uses TCP. These tests use a file, and the variables of a launcher without --init."""
    write_recipe(tmp_path, "ddp_by_hand")
    command = "python ddp_by_hand.py --float64"
    if init_method == "file":
        commands = [f"{command} --rank {rank} --world-size 2 --init file://{tmp_path}/meeting" for rank in range(2)]
    else:
        variables = f"WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
        commands = [f"RANK={rank} {variables} {command}" for rank in range(2)]
    actual = parse_output(run_commands(tmp_path, " &\n".join(commands)).stdout)
    assert difference_from_record(actual, equivalent_record(cli, "ddp_by_hand")) <= 1e-12
    assert not list(tmp_path.glob("meeting*"))


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_recipe_is_standalone(name: str) -> None:
    """A recipe imports only torch, the standard library and the shared files.

    It is short and has a command in its header.
    """
    text = (RECIPES_FOLDER / f"{name}.py").read_text()
    tree = ast.parse(text)
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.partition(".")[0] for module in modules}
    optional_packages = {"imagenet_ddp": {"PIL", "torchvision"}, "ray_actors": {"ray"}, "horovod_ddp": {"horovod"}}.get(
        name, set()
    )
    assert roots <= {"torch", "digits", "transformer", *optional_packages, *sys.stdlib_module_names}
    assert len(text.splitlines()) <= MAX_LINES.get(name, 175)
    header = ast.get_docstring(tree) or ""
    assert all(
        re.search(rf"^{section}  +\S", header, re.MULTILINE) for section in ("Memory", "Communication", "Use when")
    )
    assert name in OPERATION_RECIPES or '"--float64"' in text  # without the flag it runs in float32
    command = re.search(r"^Run: (?:[A-Z_]+=\S+ )*(\S+) ", header, re.MULTILINE)
    assert command is not None
    assert command[1] in {"python", "torchrun", "export", "srun", "mpirun", "horovodrun"}


# --- errors of recipes that are started by hand


def refusal_line(folder: Path, command: str, **variables: str) -> str:
    """Run a command that exits with status 2 at once, and return its only line."""
    start_time = time.monotonic()
    result = run_commands(folder, command, 2, **variables)
    assert time.monotonic() - start_time < 60
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    return line


def test_rendezvous_file_of_a_killed_run_is_reported(tmp_path: Path) -> None:
    """Rank 0 is killed while it waits. Both ranks of the next run then name the file, in any order."""
    write_recipe(tmp_path, "ddp_by_hand")
    rendezvous_file = tmp_path / "meeting"
    command = f"ddp_by_hand.py --world-size 2 --init file://{rendezvous_file} --rank"
    process = subprocess.Popen([PROGRAM_FOLDER / "python", *shlex.split(command), "0"], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not rendezvous_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "in use by another run" in refusal_line(tmp_path, f"python {command} 0")  # rank 0 still runs
    process.kill()
    process.wait()
    for rank in (1, 0):
        line = refusal_line(tmp_path, f"python {command} {rank}")
        assert line.startswith(f"ddp_by_hand.py: {rendezvous_file} ")
        assert "remove it" in line
    rendezvous_file.unlink()
    run_commands(tmp_path, f"python {command} 0 &\npython {command} 1")
    assert not list(tmp_path.glob("meeting*"))  # the file and its lock are deleted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "lacks RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "lacks MASTER_ADDR: "),
        ({**rank_environment(0, "1"), "WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        (rank_environment(2, "1"), "rank 2 of 2: ranks count from 0 to 1"),
    ],
)
def test_incomplete_environment_is_named(tmp_path: Path, change: dict[str, str], message: str) -> None:
    write_recipe(tmp_path, "ddp_by_hand")
    assert message in refusal_line(tmp_path, "python ddp_by_hand.py", **change)


@pytest.mark.parametrize(
    ("change", "gpus", "message"),
    [
        ({"SLURM_JOB_ID": "7"}, 0, "srun --ntasks 2 --cpu-bind=none python slurm.py"),
        ({}, 0, "not in a job of Slurm"),
        ({}, 4, "not in a job of Slurm"),
        ({**SRUN_TASK, "SLURM_NTASKS": "2"}, 4, "4 GPUs: srun --ntasks-per-node 4"),
        ({**SRUN_TASK, "PATH": ""}, 1, "set MASTER_ADDR"),
    ],
)
def test_start_without_srun_is_refused(tmp_path: Path, change: dict[str, str], gpus: int, message: str) -> None:
    """Users forget srun in an allocation. One task per node leaves GPUs idle."""
    write_recipe(tmp_path, "slurm")
    code = (
        f"import runpy, torch; torch.cuda.device_count = lambda: {gpus}; runpy.run_path('slurm.py', None, '__main__')"
    )
    assert message in refusal_line(tmp_path, f"{PROGRAM_FOLDER}/python -c {shlex.quote(code)}", **change)


def test_two_torchruns_on_one_host_do_not_share_its_gpus(tmp_path: Path) -> None:
    """Each has a rank with LOCAL_RANK=0. Without a GPU here, both would end in `torch.cuda.set_device`."""
    write_recipe(tmp_path, "multi_node")
    text = (tmp_path / "multi_node.py").read_text()
    assert text.count("torch.cuda.device_count()") == 1
    (tmp_path / "multi_node.py").write_text(text.replace("torch.cuda.device_count()", "8"))
    assert "top1" in run_commands(tmp_path, "\n".join(re.findall(r"^Run: (.*)$", text, re.MULTILINE))).stdout


def test_mpi_without_mpirun_is_refused(tmp_path: Path) -> None:
    write_recipe(tmp_path, "mpi")
    assert "not started by mpirun" in refusal_line(tmp_path, "python mpi.py")
    two_hosts = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    two_hosts |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert "set MASTER_ADDR and MASTER_PORT" in refusal_line(tmp_path, "python mpi.py", **two_hosts)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("socket.gethostname()", "'host' + os.environ['GROUP_RANK']", "MASTER_ADDR=127.0.0.1 is 127.0.0.1 on host0"),
        ("torch.__version__", "'2.1' + os.environ['GROUP_RANK']", "not the same torch"),
    ],
)
def test_hosts_with_different_settings_are_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    """Both torchruns report it before training. On one machine the difference is simulated."""
    write_recipe(tmp_path, "multi_node")
    text = (tmp_path / "multi_node.py").read_text()
    assert text.count(before) == 1
    (tmp_path / "multi_node.py").write_text(text.replace(before, after))
    commands = "\n".join(re.findall(r"^Run: (.*)$", text, re.MULTILINE))
    # the store ends with the first torchrun, so this waits until the other rank has printed its error
    result = run_commands(tmp_path, commands.replace("torchrun ", "torchrun --monitor-interval 2 "), 1)
    lines = result.stderr.split("multi_node.py: ")[1:]  # two processes write to the same stderr
    assert len(lines) == 2
    assert all(message in line for line in lines)
    assert not result.stdout
    if "torch" in message:
        vm = socket.gethostname()
        assert f"{vm} has 2.10, {vm} has 2.11" in lines[0]


def test_restart_resumes_with_a_different_number_of_ranks(cli: Cli, tmp_path: Path) -> None:
    """One of two ranks dies. Three ranks resume from the checkpoint and print the losses of all updates."""
    write_recipe(tmp_path, "elastic_torchrun")
    store_settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = "torchrun --standalone --nproc-per-node {} elastic_torchrun.py --float64"
    result = run_commands(tmp_path, command.format(2) + " --fail-at 25", 1, **store_settings)
    assert "resumes" not in result.stderr
    assert not result.stdout
    result = run_commands(tmp_path, command.format(3), **store_settings)
    assert "of 3 resumes from update 20" in result.stderr
    assert difference_from_record(parse_output(result.stdout), equivalent_record(cli, "elastic_torchrun")) <= 1e-12
    assert not list(tmp_path.glob("elastic.p*"))


def test_new_slurm_writes_script_data_and_batch_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The batch script starts the script by its name. Existing files are not overwritten."""
    assert main(["new", "slurm", str(tmp_path / "train.py")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "digits.csv.gz",
        "digits.py",
        "train.py",
        "train.sbatch",
    ]
    assert str(tmp_path / "train.sbatch") in capsys.readouterr().out
    batch_script = (tmp_path / "train.sbatch").read_text()
    assert "python train.py" in batch_script
    assert "slurm." not in batch_script
    subprocess.run(["sh", "-n", str(tmp_path / "train.sbatch")], check=True)
    (tmp_path / "train.py").unlink()
    assert main(["new", "slurm", str(tmp_path / "train.py")]) == 2
    assert "train.sbatch: this file exists already" in capsys.readouterr().err
    assert not (tmp_path / "train.py").exists()
    assert main(["new", "slurm", str(tmp_path / "other.sbatch")]) == 2
    assert "give a name like train.py" in capsys.readouterr().err


# --- imagenet_ddp: folders of images, made from the digits

IMAGES_WORKLOAD = """
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
IMAGENET_COMMAND = (
    "torchrun --standalone --nproc-per-node {} imagenet_ddp.py images --batch 16 --size 32 --width 8 --workers {} "
    "--epochs {} --float64"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 50 images for training and 23 for validation.

    The images are enlarged from 8 x 8 to 40 x 40 pixels. 50 gives a last batch that is not full.
    """
    image = pytest.importorskip("PIL.Image", reason="not verified here: needs Pillow")
    from everyrank.builtin.digits import Digits

    folder = tmp_path_factory.mktemp("images")
    for kind, is_validation, count in (("train", False, 50), ("val", True, 23)):
        for number in range(count):
            pixels, label = Digits(is_validation)[number]
            class_folder = folder / kind / str(int(label))
            class_folder.mkdir(parents=True, exist_ok=True)
            small_image = image.fromarray((pixels[0] * 255).byte().numpy())
            small_image.resize((40, 40)).save(class_folder / f"{number:03d}.png")
    return folder


def run_imagenet(cli: Cli, folder: Path, images: Path, text: str, *commands: str) -> RecipeOutput:
    """Run this text of the recipe with these commands, one after another."""
    (folder / "imagenet_ddp.py").write_text(text)
    if not (folder / "images").exists():
        (folder / "images").symlink_to(images)
    return parse_output("".join(command_output(cli, folder, command) for command in commands))


@pytest.fixture(scope="module")
def library_record(cli: Cli, images: Path) -> Record:
    """Return the record of the same training in one process by the library, with the recipe's model and images."""
    (images.parent / "my_images").mkdir()
    folder = images.parent / "my_images"
    (folder / "imagenet_ddp.py").write_text((RECIPES_FOLDER / "imagenet_ddp.py").read_text())
    (folder / "images").symlink_to(images)
    (folder / "workload.py").write_text(IMAGES_WORKLOAD)
    return train_workload(cli, folder, "single:precision=float64", size=1)


def test_imagenet_equals_the_library(cli: Cli, tmp_path: Path, images: Path, library_record: Record) -> None:
    """Two ranks stop after an epoch and resume. Losses are equal to 1e-12, and top-1 exactly."""
    text = (RECIPES_FOLDER / "imagenet_ddp.py").read_text()
    actual = run_imagenet(
        cli, tmp_path, images, text, IMAGENET_COMMAND.format(2, 1, 1), IMAGENET_COMMAND.format(2, 0, 2)
    )
    assert actual.losses == pytest.approx(library_record.loss, rel=1e-12)
    assert actual.numbers["top1"] == round(library_record.metrics["top1"], 4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[rank].tolist()", "[0].tolist()"),  # every rank reads the same samples
        (
            "for number in (SEED, *key):",
            "for number in (os.getpid(), *key):",
        ),  # the augmentation depends on the process
    ],
)
def test_imagenet_mutation_differs(
    cli: Cli, tmp_path: Path, images: Path, library_record: Record, before: str, after: str
) -> None:
    text = (RECIPES_FOLDER / "imagenet_ddp.py").read_text()
    assert text.count(before) == 1
    mutated = run_imagenet(cli, tmp_path, images, text.replace(before, after), IMAGENET_COMMAND.format(2, 0, 1))
    differences = [abs(a - b) / b for a, b in zip(mutated.losses, library_record.loss[:4], strict=True)]
    assert max(differences) > 1e-9


def test_imagenet_evaluate_uses_checkpoint_or_pretrained_weights(cli: Cli, tmp_path: Path, images: Path) -> None:
    """`--evaluate` trains nothing. The result does not depend on the number of ranks."""
    text = (RECIPES_FOLDER / "imagenet_ddp.py").read_text()
    expected = run_imagenet(cli, tmp_path, images, text, IMAGENET_COMMAND.format(2, 0, 1)).numbers
    checkpoint_content = (tmp_path / "imagenet_ddp.pt").read_bytes()
    for size, more_args in ((2, ""), (1, " --pretrained weights.pt")):
        (tmp_path / "weights.pt").write_bytes(checkpoint_content)
        actual = run_imagenet(
            cli, tmp_path, images, text, IMAGENET_COMMAND.format(size, 0, 9) + " --evaluate" + more_args
        )
        assert (actual.numbers, actual.losses) == (expected, [])
    ended = run_imagenet(cli, tmp_path, images, text, IMAGENET_COMMAND.format(2, 0, 1))  # all its epochs are done
    assert (ended.numbers, ended.losses) == (expected, [])
    assert (tmp_path / "imagenet_ddp.pt").read_bytes() == checkpoint_content


def test_imagenet_options_change_the_training(cli: Cli, tmp_path: Path, images: Path) -> None:
    """--momentum and --weight-decay reach the optimizer. --pretrained loads the weights of a file."""
    text = (RECIPES_FOLDER / "imagenet_ddp.py").read_text()
    command = IMAGENET_COMMAND.format(1, 0, 1)
    default_losses = run_imagenet(cli, tmp_path, images, text, command).losses
    (tmp_path / "weights.pt").write_bytes((tmp_path / "imagenet_ddp.pt").read_bytes())
    for more_args, first_is_equal in (
        (" --momentum 0", True),
        (" --weight-decay 0.5", True),
        (" --pretrained weights.pt", False),
    ):
        (tmp_path / "imagenet_ddp.pt").unlink()
        losses = run_imagenet(cli, tmp_path, images, text, command + more_args).losses
        assert (losses[0] == default_losses[0]) == first_is_equal, more_args
        assert losses[1:] != default_losses[1:]
