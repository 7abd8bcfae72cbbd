"""Each recipe, run by the command in its own header, gives the losses of the library; a mutation of it does not."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import everyrank
from everyrank import Launch, Record, find_workload, parse_layout, run

PACKAGE = Path(everyrank.__file__).parent
RECIPES = PACKAGE / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py") if not path.stem.startswith("_"))

# The layout that is the same training. Recipes are float64 throughout, except the one that shows low precision.
LAYOUTS = {
    "single": "single:precision=float64",
    "dataparallel": "single:precision=float64",
    "ddp_spawn": "ddp:precision=float64",
    "ddp_torchrun": "ddp:precision=float64",
    "ddp_amp": "ddp:precision=bf16",
    "ddp_accumulate": "ddp:accumulate=4,precision=float64",
    "distributed_evaluation": "ddp:precision=float64",
    "zero1": "zero1:precision=float64",
    "fsdp": "fsdp:precision=float64",
}

# What people get wrong, in each: (what stands there, what they write).
MUTATIONS = {
    "single": ("/ len(batch)).backward()", "/ BATCH).backward()"),  # the ragged batch divided by the full size
    "dataparallel": ("manual_seed(SEED + epoch)", "manual_seed(SEED)"),  # every epoch in the same order
    "ddp_spawn": ("loss * world_size / len(batch)", "loss / len(own) * world_size"),  # averages once too often
    "ddp_torchrun": ("ddp(images[own])", "model(images[own])"),  # past the wrapper: no gradient is sent
    "ddp_amp": ("loss * (world_size / BATCH)", "loss / len(own)"),  # and then multiplied as if it were a sum
    "ddp_accumulate": ("if micro_batch is micro_batches[-1] else", "if micro_batch is micro_batches[0] else"),
    "distributed_evaluation": (
        "torch.arange(len(images), device=device).tensor_split(world_size)[rank].split(BATCH)",
        "torch.arange(-(-len(images) // world_size), device=device).split(BATCH)",  # every rank reads the first half
    ),
    "zero1": (
        "batch.tensor_split(world_size)[rank]\n            loss",
        "batch.tensor_split(world_size)[0]\n            loss",
    ),
    "fsdp": ("(loss * world_size / len(batch))", "(loss / len(batch))"),  # the average taken for the sum
}


@dataclass(frozen=True)
class Printed:
    """What a recipe printed: losses by update, and the named numbers at the end."""

    losses: list[float]
    numbers: dict[str, float]


@cache
def library(layout: str) -> Record:
    """The same training by the library."""
    processes = 1 if layout.startswith("single") else 2
    workload = find_workload("digits", norm="group", epochs=2)
    return run(workload, parse_layout(layout), Launch(processes=processes), show=False)[0]


def printed(folder: Path, name: str, text: str) -> Printed:
    """Run a recipe with its data beside it, by the command in its header."""
    (folder / f"{name}.py").write_text(text)
    (folder / "digits.csv.gz").write_bytes((PACKAGE / "workloads" / "digits.csv.gz").read_bytes())
    (command,) = re.findall(r"^Run: (.*)$", text, re.MULTILINE)
    words = shlex.split(command)
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    done = subprocess.run(
        [*programs[words[0]], *words[1:]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^update (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    assert [int(update) for update, _ in losses] == list(range(len(losses)))
    numbers = re.findall(r"^(top1|eval_loss|eval_samples) (\S+)$", done.stdout, re.MULTILINE)
    return Printed([float(loss) for _, loss in losses], {key: float(value) for key, value in numbers})


def distance(found: Printed, record: Record) -> float:
    """The largest relative difference of a loss; inf where a number of the evaluation differs."""
    assert len(found.losses) == len(record.loss) == 46
    right = record.metrics["top1"] == found.numbers["top1"]
    if "eval_loss" in found.numbers:
        right = right and abs(found.numbers["eval_loss"] / record.metrics["eval_loss"] - 1) <= 1e-12
        right = right and found.numbers["eval_samples"] == 359
    gaps = [abs(a - b) / abs(b) for a, b in zip(found.losses, record.loss, strict=True)]
    return max(gaps) if right else float("inf")


@pytest.mark.parametrize("name", NAMES)
def test_recipe_equals_the_library(tmp_path: Path, name: str) -> None:
    """Every loss to 1e-12, and the held-out images that are read right, exactly."""
    text = (RECIPES / f"{name}.py").read_text()
    assert distance(printed(tmp_path, name, text), library(LAYOUTS[name])) <= 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_mutation_differs(tmp_path: Path, name: str) -> None:
    """The comparison above can fail: with a mistake that people make, the script still runs, and its numbers differ."""
    text = (RECIPES / f"{name}.py").read_text()
    before, after = MUTATIONS[name]
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    assert distance(printed(tmp_path, name, text.replace(before, after)), library(LAYOUTS[name])) > 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_standalone(name: str) -> None:
    """torch and the standard library only, never everyrank; short, with a command to run it by."""
    text = (RECIPES / f"{name}.py").read_text()
    tree = ast.parse(text)
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.partition(".")[0] for module in modules}
    assert roots <= {"torch", *sys.stdlib_module_names}
    assert len(text.splitlines()) <= 130
    assert re.search(r"^Run: (python|torchrun) ", ast.get_docstring(tree) or "", re.MULTILINE)
