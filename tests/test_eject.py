"""`everyrank eject`: a user's workload is exported as a plain PyTorch project with the losses of `everyrank train`."""

from __future__ import annotations

import ast
import codecs
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everyrank.eject.sources import _data_beside, _imported_files, _redirect_imports, workload_class
from processes import Cli, only_error_line, refusal_message

RUFF = Path(sys.executable).with_name("ruff")
WORKLOAD = '''
"""Points read from a table, and a small model with gated layers."""
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from everyrank import Workload
from layers import Tower

ROWS = torch.tensor([[float(cell) for cell in line.split(",")] for line in
                     Path(__file__).with_name("points.csv").read_text().split()])


def data(part):
    return TensorDataset(ROWS[part, :4], ROWS[part, 4].long())


def loss(output, target):
    """Of the points that count: label 3 is ignored, so ranks have different numbers of terms."""
    return F.cross_entropy(output, target, ignore_index=3, reduction="sum"), (target != 3).sum()


def right(output, target):
    return (output.argmax(1) == target).sum(), len(target)


def workload(lr=0.05, width=8, clip=0.3):
    return Workload(
        name="points",
        model=lambda: Tower(width),
        train_data=lambda: data(slice(0, 44)),
        eval_data=lambda: data(slice(44, 57)),
        loss=loss,
        metrics={"right": right},
        derived={"wrong": lambda means: 1 - means["right"]},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        global_batch=16,
        epochs=2,
        seed=3,
        clip_norm=clip,
        blocks="blocks",
        tensor_plan={
            "blocks.*.feed": "gather",
            "blocks.*.feed.gate": "colwise",
            "blocks.*.feed.up": "colwise",
            "blocks.*.feed.down": "rowwise",
        },
    )
'''
LAYERS = """
from torch import nn


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 12), nn.Linear(width, 12)
        self.down = nn.Linear(12, width, bias=False)

    def forward(self, stream):
        return self.down(self.gate(stream).sigmoid() * self.up(stream))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.feed = Gated(width)

    def forward(self, stream):
        return stream + self.feed(stream)


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, points):
        stream = self.enter(points)
        for block in self.blocks:
            stream = block(stream)
        return self.head(stream)
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a workload file, a module that it imports, and its data."""
    import torch

    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "points.py").write_text(WORKLOAD)
    (folder / "layers.py").write_text(LAYERS)
    points = torch.randn(57, 4, generator=torch.Generator().manual_seed(0))
    labels = points[:, :3].argmax(1)
    labels[::7] = 3
    rows = zip(points.tolist(), labels.tolist(), strict=True)
    (folder / "points.csv").write_text("\n".join(",".join(map(str, [*point, label])) for point, label in rows))
    return folder


def eject(cli: Cli, workload: Path | str, project: Path, *arguments: object) -> Path:
    """Run `everyrank eject`, and return the folder of the project."""
    ended = cli.on_ranks(project.parent, "eject", workload, project, *arguments)
    assert ended.status == 0, ended.err
    return project


def losses_of_train(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def said(text: str) -> tuple[list[float], dict[str, float]]:
    """Return the losses that train.py printed, and the metrics of its last validation."""
    losses = [float(loss) for loss in re.findall(r"^update \d+ loss (\S+)$", text, re.MULTILINE)]
    fields = re.findall(r"^epoch \d+ (.*)$", text, re.MULTILINE)[-1].split()
    return losses, {name: float(value) for name, value in zip(fields[::2], fields[1::2], strict=True)}


def compare_with_train(
    cli: Cli, folder: Path, workload: Path | str, layout: str, size: int, *arguments: object
) -> list[float]:
    """Train under a layout with `everyrank train` and with the ejected project.

    Check that all losses are bitwise equal, and return them.
    """
    project = eject(cli, workload, folder / "project", "--layout", layout, "--processes", size, *arguments)
    check_source_code(project)
    layout = layout.replace("dataparallel", "single").replace("single:batch_norm=local", "single")  # without a GPU
    train_ended = cli.on_ranks(
        folder, "train", workload, "--layout", layout, "--out", "run", "--save-every", 0, *arguments, size=size
    )
    assert train_ended.status == 0, train_ended.err
    project_ended = cli.on_ranks(project, script="train.py", size=size, PYTHONPATH="")
    assert project_ended.status == 0, project_ended.err
    losses, metrics = said(project_ended.out)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    assert metrics == [event["evaluation"] for event in events if event.get("evaluation")][-1]
    assert losses == losses_of_train(folder / "run")
    return losses


def check_source_code(project: Path) -> None:
    """Check that no file imports everyrank, that ruff passes, and that functions of train.py have annotations."""
    for file in project.glob("*.py"):
        tree = ast.parse(file.read_text())
        modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in modules if name is None or name.startswith("everyrank")], file
        assert "everyrank." not in file.read_text()
    for function in ast.walk(ast.parse((project / "train.py").read_text())):
        if isinstance(function, ast.FunctionDef):
            arguments = [argument for argument in function.args.args if argument.arg not in ("self", "_")]
            assert function.returns is not None or function.name == "__init__", function.name
            assert all(argument.annotation is not None for argument in arguments), function.name
    files = [
        str(file) for file in (project / "train.py", project / "task.py", project / "batch_norm.py") if file.exists()
    ]
    for ruff_arguments in (["check", "--select", "E,F,B,I,UP,SIM,RET"], ["format", "--check"]):
        ended = subprocess.run(
            [RUFF, *ruff_arguments, "--isolated", "--line-length", "120", "--target-version", "py311", *files],
            capture_output=True,
            text=True,
            cwd=project,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("ddp", 2),
        ("tensor", 2),
        ("pipeline", 2),
        ("fsdp:replicate=2", 4),
        ("dataparallel:accumulate=2", 1),
        pytest.param("ddp:precision=fp16", 2, marks=pytest.mark.integration),
        pytest.param("zero1", 2, marks=pytest.mark.integration),
        pytest.param("fsdp", 2, marks=pytest.mark.integration),
    ],
)
def test_losses_are_bitwise_equal_to_those_of_train(
    layout: str, size: int, outside: Path, tmp_path: Path, cli: Cli
) -> None:
    """The workload has clipping, a schedule, uncounted loss terms and an uneven last batch."""
    losses = compare_with_train(cli, tmp_path, outside / "points.py", layout, size)
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_script_with_a_wrong_gradient_factor_has_different_losses(outside: Path, tmp_path: Path, cli: Cli) -> None:
    """Without the factor that undoes DDP's average, losses differ from the second update on."""
    project = eject(cli, outside / "points.py", tmp_path / "project", "--set", "clip=100.0")
    script = project / "train.py"
    correct_losses = said(cli.on_ranks(project, script="train.py", size=2).out)[0]
    script.write_text(script.read_text().replace("num_averaged * BATCH / total[1]", "BATCH / total[1]"))
    wrong_losses = said(cli.on_ranks(project, script="train.py", size=2).out)[0]
    assert correct_losses[0] == wrong_losses[0]
    assert correct_losses[1:] != wrong_losses[1:]


RICH = """
import random

import torch
from torch import nn
import everyrank


class Noisy:
    \"\"\"Samples that are augmented: ({"points": (4,), "scale": (1,)}, target ()).\"\"\"

    def __len__(self):
        return 45

    def __getitem__(self, index):
        points = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"points": points + 0.1 * torch.randn(4), "scale": torch.tensor([random.random()])}, points.sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, points, scale):
        return self.head(self.norm(self.layer(points)).relu() * scale).squeeze(1)


workload = everyrank.Workload(
    name="rich",
    model=Model,
    train_data=Noisy,
    eval_data=Noisy,
    eval_batch=7,
    collate=lambda samples: torch.utils.data.default_collate(samples[::-1]),
    loss=lambda output, target: ((output - target).square().sum(), len(target)),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    weights=lambda: range(1, 46),
    global_batch=8,
    drop_last=True,
    steps=13,
)
"""


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("ddp:accumulate=2,precision=float64", 2),
        ("ddp:batch_norm=local", 2),
        pytest.param("fsdp", 2, marks=pytest.mark.integration),
        pytest.param("dataparallel:batch_norm=local", 1, marks=pytest.mark.integration),
        pytest.param("ddp:batch_norm=local,precision=fp16", 2, marks=pytest.mark.integration),
    ],
)
def test_all_features_of_a_workload_are_exported(layout: str, size: int, tmp_path: Path, cli: Cli) -> None:
    """Augmentation, dict inputs, collate, sampling weights, BatchNorm, ReduceLROnPlateau, micro-batches and steps."""
    (tmp_path / "said.py").write_text(RICH)
    assert len(compare_with_train(cli, tmp_path, tmp_path / "said.py", layout, size)) == 13


def test_source_of_built_in_workloads_is_one_file_without_everyrank(tmp_path: Path) -> None:
    """Every name in the file is defined there or imported."""
    from everyrank.eject.sources import own_sources
    from everyrank.workload import BUILT_IN, Source

    for workload_name in BUILT_IN:
        for name, text in own_sources(Source(workload_name)).files.items():
            (tmp_path / name).write_text(text)
            assert not re.search(r"^\s*(from|import) everyrank", text, re.MULTILINE), name
    arguments = ["check", "--isolated", "--line-length", "120", "--select", "E,F,I"]
    ended = subprocess.run([RUFF, *arguments, tmp_path], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout
    assert len(list(tmp_path.iterdir())) == len(BUILT_IN)


def test_files_of_a_workload_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Some editors of Windows write one."""
    (tmp_path / "layers.py").write_bytes(codecs.BOM_UTF8 + b"WIDTH = 'widths.csv'\n")
    (tmp_path / "widths.csv").touch()
    path = tmp_path / "workload.py"
    path.write_bytes(codecs.BOM_UTF8 + b"from layers import WIDTH\n")
    files = _imported_files(path)
    assert [file.name for file in files] == ["layers.py", "workload.py"]
    assert [file.name for file in _data_beside(files)[0]] == ["widths.csv"]
    assert _redirect_imports(path, {}, "task") == "from layers import WIDTH\n"


def test_class_of_workloads_has_the_fields_that_are_given_by_position() -> None:
    namespace: dict[str, Any] = {}
    exec(workload_class(["Workload('mine', model, data, loss, optimizer, 16, evaluation, steps=3)"]), namespace)
    workload = namespace["Workload"]("mine", 1, 2, 3, 4, 16, "evaluation", steps=3)
    assert (workload.eval_data, workload.steps, workload.metrics) == ("evaluation", 3, {})


def test_imports_in_functions_and_beside_other_statements_are_replaced(tmp_path: Path) -> None:
    """What else is in the line of an import stays, and so does its indentation."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def workload():\n"
        "    import everyrank\n"
        "    return everyrank.Workload(name='größe')\n"
        "GRÖSSE = 'é'; from everyrank import (\n"
        "    Workload,\n"
        "); STEPS = 3  # the length\n"
    )
    assert _redirect_imports(path, {}, "task") == (
        "def workload():\n"
        "    from task import Workload\n"
        "    return Workload(name='größe')\n"
        "GRÖSSE = 'é'; from task import Workload; STEPS = 3  # the length\n"
    )


@pytest.mark.integration
@pytest.mark.parametrize("arguments", [("digits", "zero1", "--epochs", 1), ("text", "tensor", "--steps", 2)], ids=str)
def test_ejected_built_in_workloads_train(arguments: tuple[Any, ...], tmp_path: Path, cli: Cli) -> None:
    """The losses equal those of `everyrank train`."""
    name, layout, *rest = arguments
    compare_with_train(cli, tmp_path, name, layout, 2, *rest)


@pytest.mark.integration
@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "mpi"])
def test_command_in_the_readme_starts_the_project(launcher: str, outside: Path, tmp_path: Path, cli: Cli) -> None:
    """It runs without everyrank."""
    if launcher == "mpi" and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun on this machine")
    project = eject(cli, outside / "points.py", tmp_path / "project", "--launcher", launcher)
    train_ended = cli(tmp_path, "train", outside / "points.py", "--layout", "ddp", "--processes", 2, "--out", "run")
    assert train_ended.status == 0, train_ended.err
    command = (project / "README.md").read_text().split("requirements.txt\n")[1].splitlines()[0].split()
    allow_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **allow_root, "PATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("PYTHONPATH", None)
    if launcher == "mpi":
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, env=environment, timeout=60)
        command[1:1] = ["--oversubscribe"] if "Open MPI" in version.stdout else []  # MPICH does so by itself
    ended = subprocess.run(command, capture_output=True, text=True, cwd=project, env=environment, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert said(ended.stdout)[0] == losses_of_train(tmp_path / "run")
    assert (project / "weights.pt").exists()


LAUNCHER_ENVIRONMENTS = {
    "slurm": (
        {
            "SLURM_STEP_ID": "1",
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "3",
            "SLURM_LOCALID": "1",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_NUM_NODES": "2",
            "MASTER_ADDR": "first",
        },
        (3, 1, 4, 2, "tcp://first:12449"),
    ),
    "mpi": (
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_ADDR": "first",
            "MASTER_PORT": "29500",
        },
        (3, 1, 4, 2, "tcp://first:29500"),
    ),
    "torchrun": (
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        (3, 1, 4, 2, "env://"),
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHER_ENVIRONMENTS)
def test_rank_is_read_from_the_variables_of_the_launcher(
    launcher: str, outside: Path, tmp_path: Path, cli: Cli, monkeypatch: Any
) -> None:
    """Without these variables, the script exits with one line that names the launcher."""
    project = eject(cli, outside / "points.py", tmp_path / "project", "--launcher", launcher)
    tree = ast.parse((project / "train.py").read_text())
    names = ("find_place", "VARIABLES", "os")
    body = [node for node in tree.body if names[0] == getattr(node, "name", "") or names[1] in ast.unparse(node)[:9]]
    module: dict[str, Any] = {"os": os}
    exec(compile(ast.Module(body, []), "train.py", "exec"), module)
    with pytest.raises(SystemExit, match=f"not started by {'srun' if launcher == 'slurm' else launcher[:3]}"):
        module["find_place"]()
    environment, expected = LAUNCHER_ENVIRONMENTS[launcher]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert module["find_place"]() == expected
    if launcher == "slurm":
        subprocess.run(["bash", "-n", project / "train.sbatch"], check=True, timeout=20)
        assert "--ntasks-per-node=2" in (project / "train.sbatch").read_text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--layout", "context"), "fsdp:replicate=N"),
        (("--layout", "fsdp:tensor=2"), "tensor= is a second axis"),
        (("--layout", "ddp:compress=bf16"), "compress=bf16; leave it out"),
        (("--layout", "ddp:recompute"), "recompute; leave it out"),
        (("--layout", "fsdp:precision=fp16"), "use precision=bf16, or ddp"),
        (("--layout", "dataparallel:precision=bf16"), "use precision=fp16, or ddp"),
        (("--layout", "dataparallel", "--launcher", "torchrun"), "is started by python; leave it out"),
        (("--layout", "ddp", "--launcher", "horovodrun"), "--launcher horovodrun: eject writes projects for"),
        (("--layout", "pipeline:schedule=gpipe"), "schedule=gpipe; leave it out"),
        (("--launcher", "ray"), "--launcher ray: eject"),
        (("--processes", 0), "--processes 0: give at least 1"),
        (("--set", "wdith=3"), "has no such setting"),
    ],
)
def test_unsupported_arguments_are_refused(
    arguments: tuple[Any, ...], error: str, outside: Path, tmp_path: Path, capsys: Any
) -> None:
    """The command prints one line and writes nothing."""
    assert error in refusal_message(capsys, "eject", outside / "points.py", tmp_path / "project", *arguments)
    assert not (tmp_path / "project").exists()


UNSUPPORTED_WORKLOADS = {
    "ema_decay": ('name="points",', 'name="points", ema_decay=0.9,'),
    "on_epoch": ('name="points",', 'name="points", on_epoch=print,'),
    "order='shard'": ('name="points",', 'name="points", order="shard",'),
    "eject does not support streams": ("data(slice(0, 44))", "iter([])"),
    "points.py, line 9: everyrank.gather is a loss over the whole": ("import Workload", "import Workload, gather"),
}


@pytest.mark.parametrize("error", UNSUPPORTED_WORKLOADS)
def test_workload_that_a_plain_script_cannot_support_is_refused(
    error: str, outside: Path, tmp_path: Path, cli: Cli
) -> None:
    """The line names the unsupported feature, and why."""
    workload_path = outside / "points.py"
    workload_path.write_text(workload_path.read_text().replace(*UNSUPPORTED_WORKLOADS[error]))
    ended = cli.on_ranks(tmp_path, "eject", workload_path, tmp_path / "project")
    assert ended.status == 2
    assert error in only_error_line(ended.err)
    assert not (tmp_path / "project").exists()


def test_non_empty_folder_is_refused(outside: Path, tmp_path: Path, capsys: Any) -> None:
    """Its files are not changed."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("mine")
    assert "new folder" in refusal_message(capsys, "eject", outside / "points.py", project)
    assert (project / "train.py").read_text() == "mine"
    assert len(list(project.iterdir())) == 1
