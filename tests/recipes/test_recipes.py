"""Each recipe gives the losses of the library; a mutation of it does not.

The ranks are forked here. tests/integration runs each by the command in its own header.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import everyrank
from everyrank import Launch, Record, find_workload, parse_layout, read_records, run
from forge import Forge

PACKAGE = Path(everyrank.__file__).parent
RECIPES = PACKAGE / "recipes"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ALL = sorted(path.stem for path in RECIPES.glob("*.py") if not path.stem.startswith("_"))
NAMES = [name for name in ALL if name != "imagenet_ddp"]  # which reads images: its tests are at the end

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
    "iterable_sharding": "ddp:precision=float64",
    "checkpoint_resume": "ddp:precision=float64",
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
    "iterable_sharding": (  # divided twice: by rank and worker, and then by worker again
        "batch.tensor_split(self.world_size)[self.rank]",
        "batch.tensor_split(self.world_size * WORKERS)[self.rank * WORKERS + update % WORKERS]",
    ),
    "checkpoint_resume": (  # the order of the samples is drawn anew where the training goes on
        "manual_seed(SEED + epoch)",
        "manual_seed(SEED + epoch + begin)",
    ),
}


@dataclass(frozen=True)
class Printed:
    """What a recipe printed: losses by update, and the named numbers at the end."""

    losses: list[float]
    numbers: dict[str, float]


@cache
def library(forge: Forge, layout: str) -> Record:
    """The same training by the library."""
    size = 1 if layout.startswith("single") else 2
    words = ["train", "digits", "--set", "norm=group", "--epochs", "2", "--layout", layout, "--save-every", "0"]
    with tempfile.TemporaryDirectory() as folder:
        done = forge(Path(folder), *words, "--out", "out", size=size)
        assert done.status == 0, done.err
        return read_records(Path(folder) / "out" / "record.json")[0]


def printed(forge: Forge, folder: Path, name: str, text: str) -> Printed:
    """Run a recipe with its data beside it, as the commands in its header say."""
    (folder / f"{name}.py").write_text(text)
    (folder / "digits.csv.gz").write_bytes((PACKAGE / "workloads" / "digits.csv.gz").read_bytes())
    commands = re.findall(r"^Run: (.*)$", text, re.MULTILINE)
    return read("".join(output(forge, folder, command) for command in commands))


def output(forge: Forge, folder: Path, command: str) -> str:
    """What a command prints in this folder: forked where torchrun would start it, started where it starts itself."""
    program, *words = shlex.split(command)
    if program == "torchrun":
        place = next(index for index, word in enumerate(words) if word.endswith(".py"))
        size = int(words[words.index("--nproc-per-node") + 1])
        done = forge(folder, *words[place + 1 :], size=size, script=words[place])
        assert done.status == 0, done.err
        return done.out
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    started = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert started.returncode == 0, started.stderr
    return started.stdout


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
    assert len(found.losses) == len(record.loss) == 46
    right = record.metrics["top1"] == found.numbers["top1"]
    if "eval_loss" in found.numbers:
        right = right and abs(found.numbers["eval_loss"] / record.metrics["eval_loss"] - 1) <= 1e-12
        right = right and found.numbers["eval_samples"] == 359
    gaps = [abs(a - b) / abs(b) for a, b in zip(found.losses, record.loss, strict=True)]
    return max(gaps) if right else float("inf")


@pytest.mark.parametrize("name", NAMES)
def test_recipe_equals_the_library(forge: Forge, tmp_path: Path, name: str) -> None:
    """Every loss to 1e-12, and the held-out images that are read right, exactly."""
    text = (RECIPES / f"{name}.py").read_text()
    assert distance(printed(forge, tmp_path, name, text), library(forge, LAYOUTS[name])) <= 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_mutation_differs(forge: Forge, tmp_path: Path, name: str) -> None:
    """The comparison above can fail: with a mistake that people make, the script still runs, and its numbers differ."""
    text = (RECIPES / f"{name}.py").read_text()
    before, after = MUTATIONS[name]
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    assert distance(printed(forge, tmp_path, name, text.replace(before, after)), library(forge, LAYOUTS[name])) > 1e-9


@pytest.mark.parametrize("name", ALL)
def test_recipe_is_standalone(name: str) -> None:
    """torch and the standard library only, never everyrank; short, with a command to run it by."""
    text = (RECIPES / f"{name}.py").read_text()
    tree = ast.parse(text)
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.partition(".")[0] for module in modules}
    images = {"PIL"} if name == "imagenet_ddp" else set()
    assert roots <= {"torch", *images, *sys.stdlib_module_names}
    assert len(text.splitlines()) <= (210 if images else 150)
    assert re.search(r"^Run: (python|torchrun) ", ast.get_docstring(tree) or "", re.MULTILINE)


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
    from everyrank.workloads.digits import Digits

    folder = tmp_path_factory.mktemp("images")
    for kind, held_out, count in (("train", False, 50), ("val", True, 23)):
        for number in range(count):
            pixels, label = Digits(held_out)[number]
            place = folder / kind / str(int(label))
            place.mkdir(parents=True, exist_ok=True)
            small = image.fromarray((pixels[0] * 255).byte().numpy())
            small.resize((40, 40)).save(place / f"{number:03d}.png")
    return folder


def trained(forge: Forge, folder: Path, images: Path, text: str, *commands: str) -> Printed:
    (folder / "imagenet_ddp.py").write_text(text)
    if not (folder / "images").exists():
        (folder / "images").symlink_to(images)
    return read("".join(output(forge, folder, command) for command in commands))


@pytest.fixture(scope="module")
def by_library(images: Path) -> Record:
    """The same training in one process by the library, of the script's own model, images and loss."""
    (images.parent / "my_images").mkdir()
    folder = images.parent / "my_images"
    (folder / "imagenet_ddp.py").write_text((RECIPES / "imagenet_ddp.py").read_text())
    (folder / "images").symlink_to(images)
    (folder / "workload.py").write_text(WORKLOAD)
    workload = find_workload(str(folder / "workload.py"))
    return run(workload, parse_layout("single:precision=float64"), Launch(processes=1), show=False)[0]


def test_imagenet_equals_the_library(forge: Forge, tmp_path: Path, images: Path, by_library: Record) -> None:
    """Two ranks with a loader worker each, stopped after an epoch and begun again; losses to 1e-12, top-1 exactly."""
    text = (RECIPES / "imagenet_ddp.py").read_text()
    found = trained(forge, tmp_path, images, text, COMMAND.format(2, 1, 1), COMMAND.format(2, 0, 2))
    assert found.losses == pytest.approx(by_library.loss, rel=1e-12)
    assert found.numbers["top1"] == by_library.metrics["top1"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[rank].tolist()", "[0].tolist()"),  # every rank reads the same
        ("for number in (SEED, *key):", "for number in (os.getpid(), *key):"),  # augmentation of the process
    ],
)
def test_imagenet_mutation_differs(
    forge: Forge, tmp_path: Path, images: Path, by_library: Record, before: str, after: str
) -> None:
    text = (RECIPES / "imagenet_ddp.py").read_text()
    assert text.count(before) == 1
    wrong = trained(forge, tmp_path, images, text.replace(before, after), COMMAND.format(2, 0, 1))
    gaps = [abs(a - b) / b for a, b in zip(wrong.losses, by_library.loss[:4], strict=True)]
    assert max(gaps) > 1e-9
