"""Commands from end to end: train, verify and new, and hints for flags of other tools."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everyrank import Launch, Layout, Workload, find_workload, read_records, run
from everyrank.cli import main
from everyrank.commands import train
from everyrank.parity.samples import sample_errors
from forkserver import ForkServer
from processes import Cli, closed_pipe, refusal_message

MY_WORKLOAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from everyrank import Workload
from my_model import Tower            # a neighbour file

def train_data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(50, 4, generator=generator), torch.randint(0, 3, (50,), generator=generator))

def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)

def top1(output, target):
    return (output.argmax(1) == target).sum(), len(target)

def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)

workload = Workload(
    name="mine",
    model=lambda: Tower(),
    train_data=train_data,
    eval_data=train_data,
    collate=None,
    loss=loss,
    metrics={"top1": top1},
    optimizer=make_optimizer,
    schedule=None,
    global_batch=16,
    epochs=5,
    seed=0,
    clip_norm=None,
    blocks="layers",
    tensor_plan=None,
    sequence_dim=None,
)
"""
MY_MODEL = """
from torch import nn

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.3)) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, values):
        for layer in self.layers:
            values = values + layer(values)
        return self.head(values)
"""


def test_train_digits(cli: Cli, tmp_path: Path) -> None:
    """ddp on two processes reaches 97% validation accuracy, and logs each update."""
    out = tmp_path / "out"
    arguments = ("train", "digits", "--layout", "ddp", "--processes", "2", "--out", out)
    ended = cli(tmp_path, *arguments)
    assert ended.status == 0, ended.err
    assert ended.err == ""
    (record,) = read_records(out / "record.json")
    assert record.metrics["top1"] >= 0.97
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows[:-1]] == record.loss
    assert rows[-1]["final"] == record.metrics
    assert "top1 0.9" in ended.out
    assert record.provenance["data_checksum"].startswith("sha256:")


def test_interrupted_training_names_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint is named if none was saved."""

    def interrupted(*_arguments: object, saves: bool, **_options: object) -> None:
        if saves:
            monkeypatch.setattr(train, "_newest_step", lambda _folder: 23)
        raise KeyboardInterrupt

    for saves in (False, True):
        monkeypatch.setattr(train, "_newest_step", lambda _folder: 0)
        monkeypatch.setattr("everyrank.api.run", functools.partial(interrupted, saves=saves))
        assert main(["train", "digits", "--out", str(tmp_path / "out")]) == 130
        assert ("is of update 23" in capsys.readouterr().out) == saves


def test_verify_workload_of_a_user(cli: Cli, tmp_path: Path) -> None:
    """The file is in another folder, imports a module next to it, and has a model that everyrank does not know."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "my_workload.py").write_text(MY_WORKLOAD)
    (folder / "my_model.py").write_text(MY_MODEL)
    layouts = ["ddp", "zero1", "fsdp"]
    arguments = ("verify", "elsewhere/my_workload.py", "--layout", *layouts, "--processes", "3")
    ended = cli(tmp_path, *arguments, "--json", "out.json", "--samples")
    assert ended.status == 0, ended.err + ended.out
    records = read_records(tmp_path / "out.json")
    assert [record.layout for record in records] == layouts
    for record in records:
        assert record.parity.status == "equal"
        assert record.parity.max_relative_difference is not None
        assert record.parity.max_relative_difference <= 1e-10
        assert record.world_size == 3
        assert any("dropout on in 3 modules" in line for line in record.parity.checks)
        assert any("2 epochs of 50 samples, each read once" in line for line in record.parity.checks)


def test_train_started_by_torchrun(python: ForkServer, tmp_path: Path) -> None:
    """`torchrun -m everyrank train ...`: the ranks detect torchrun, and only rank 0 prints."""
    command = [
        python.programs / "torchrun", "--standalone", "--nproc-per-node", "2",
        "-m", "everyrank", "train", "digits", "--layout", "fsdp", "--steps", "5", "--out", "out",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHON_EXEC"] = str(python.programs / "python")  # torchrun starts its ranks with this program
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (record,) = read_records(tmp_path / "out" / "record.json")
    assert (record.launcher, record.world_size, len(record.loss)) == ("torchrun", 2, 5)
    assert ended.stdout.count("top1") == 1


@pytest.mark.integration
def test_run_sends_a_workload_with_lambdas_to_the_ranks() -> None:
    """The Workload exists only in this process, so it is pickled by value."""
    import zoo

    workload = Workload(
        name="here",
        model=lambda: zoo.FrozenModel(),
        train_data=lambda: zoo.Points(23),
        loss=lambda output, target: ((output - target).square().sum(), len(target)),
        optimizer=zoo.OPTIMIZERS["sgd"],
        global_batch=7,
    )
    (record,) = run(workload, Layout("ddp", precision="float64"), Launch(processes=2), show=False)
    (single,) = run(workload, Layout("single", precision="float64"), Launch(), show=False)
    assert record.loss == pytest.approx(single.loss, rel=1e-12)
    assert len(record.loss) == 4


@pytest.mark.integration
def test_text_loss_decreases(cli: Cli, tmp_path: Path) -> None:
    """After 15 updates the loss is far below the 5.55 nats of a uniform distribution."""
    ended = cli(tmp_path, "train", "text", "--layout", "single", "--steps", "15", "--out", "out")
    assert ended.status == 0, ended.err
    (record,) = read_records(tmp_path / "out" / "record.json")
    assert record.loss[0] == pytest.approx(math.log(256), rel=0.02)
    assert record.loss[-1] < 4.2
    assert record.provenance["data_checksum"].startswith("sha256:")


@pytest.mark.parametrize(("name", "millions"), [("text", 0.9), ("text-medium", 38), ("text-124m", 124)])
def test_number_of_parameters_of_text_workloads(name: str, millions: float) -> None:
    """It agrees with the name. The models are built on the meta device."""
    import torch

    with torch.device("meta"):
        model = find_workload(name).model()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.05)
    tied = find_workload("text", tied=True).model()
    assert tied.head.weight is tied.embedding.weight


def test_new_lists_prints_and_writes_recipes(tmp_path: Path, capsys: Any) -> None:
    """A written recipe has its data next to it. An existing file is not overwritten."""
    assert main(["new", "--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed[:2] == ["single", "ddp_torchrun"]
    folder = Path(str(importlib.resources.files("everyrank.recipes")))
    assert sorted(listed) == sorted(["workload", *(path.stem for path in folder.glob("[!_]*.py"))])
    assert {"single", "dataparallel", "ddp_spawn", "ddp_torchrun", "ddp_amp", "ddp_accumulate"} <= set(listed)
    assert {"distributed_evaluation", "zero1", "fsdp"} <= set(listed)
    assert main(["new", "single"]) == 0
    printed = capsys.readouterr().out
    assert main(["new", "single", "-"]) == 0
    assert capsys.readouterr() == (printed, "")
    path = tmp_path / "train.py"
    assert main(["new", "single", str(path)]) == 0
    assert path.read_text() == printed
    assert (tmp_path / "digits.csv.gz").stat().st_size > 50_000
    assert main(["new", "single", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["new", "horovod9"]) == 2


def test_new_writes_the_module_that_a_recipe_imports(tmp_path: Path, capsys: Any) -> None:
    """It writes digits.py next to the script. An existing digits.py is kept, with a note if it differs."""
    assert main(["new", "ddp_torchrun", str(tmp_path / "train.py")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.csv.gz", "digits.py", "train.py"]
    assert main(["new", "fsdp", str(tmp_path / "fsdp.py")]) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "digits.py").write_text("mine = 1\n")
    assert main(["new", "zero1", str(tmp_path / "zero1.py")]) == 0
    assert (tmp_path / "digits.py").read_text() == "mine = 1\n"
    assert "kept" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert main(["new", "zero1", str(tmp_path / "other" / "digits.py")]) == 2
    assert "imports a module of this name" in capsys.readouterr().err
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    ("name", "current_name"),
    [("ddp_tcp", "ddp_by_hand"), ("ddp_env", "ddp_by_hand"), ("parameter_averaging", "local_sgd")],
)
def test_new_accepts_former_recipe_names(name: str, current_name: str, capsys: Any) -> None:
    """It prints the recipe that replaced the former one, and a note on stderr."""
    assert main(["new", name]) == 0
    written = capsys.readouterr()
    assert len(written.err.splitlines()) == 1
    assert f"{name} is now {current_name}" in written.err
    assert main(["new", current_name]) == 0
    assert capsys.readouterr() == (written.out, "")


@pytest.mark.parametrize("arguments", ["new pipeline -", "new pipeline", "new --list"])
def test_printed_recipe_is_unchanged_in_any_locale(
    arguments: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The command does not import torch and writes no file. A closed pipe (`| head`) is not an error."""
    command = [sys.executable, "-m", "everyrank", *arguments.split()]
    no_torch = tmp_path_factory.mktemp("no_torch")
    (no_torch / "torch.py").write_text(
        "raise ImportError('this command needs no torch, which takes seconds to import')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "", "PYTHONPATH": str(no_torch)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=True, env=environment)
    if "--list" not in arguments:
        recipe = importlib.resources.files("everyrank.recipes") / "pipeline.py"
        assert (ended.stdout, ended.stderr) == (recipe.read_bytes(), b"")
    assert not list(tmp_path.iterdir())
    read, write = os.pipe()
    os.close(read)
    ended_without_reader = subprocess.run(
        command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False, env=environment
    )
    os.close(write)
    assert (ended_without_reader.returncode, ended_without_reader.stderr) == (0, b"")


def test_closed_error_output_does_not_change_the_status() -> None:
    """`everyrank ... 2>&1 | head` of a wrong call: 1 would mean that a check failed."""
    with closed_pipe() as stream, contextlib.redirect_stderr(stream):
        assert main(["no-such-command"]) == 2


def test_sample_errors() -> None:
    """Errors are reported for samples that are read twice or never."""
    assert sample_errors([2, 0, 1], 3, "epoch 0") == []
    [repeated] = sample_errors([0, 1, 2, 0], 3, "epoch 0")
    assert re.match(r"epoch 0: 1 of 3 samples .* more than once.* 0$", repeated)
    missed, repeated = sample_errors([0, 0], 3, "evaluation")
    assert re.match(r"evaluation: 2 of 3 samples .* never read.* 1$", missed)
    assert re.match(r"evaluation: 1 of 3 samples .* more than once.* 0$", repeated)


def check_samples_with_mutation(world: Any, mutation: str) -> list[str]:
    """Return the errors of the sample check after this mutation of the data order or the mesh."""
    from unittest import mock

    import everyrank.data.parts as parts
    import zoo
    from everyrank.parallel.mesh import open_mesh
    from everyrank.parity.samples import check_samples

    workload = zoo.workload("frozen")
    order = parts.epoch_order
    patched = (lambda length, seed, epoch: order(length, seed, 0)) if mutation == "epoch not set" else order
    with mock.patch.object(parts, "epoch_order", patched):
        layout = Layout("ddp", accumulate=2)
        mesh = open_mesh(layout, world)
        if mutation == "same slice":
            mesh = dataclasses.replace(mesh, coordinate={**mesh.coordinate, "replicate": 0})
        return check_samples(workload, zoo.Points(23), zoo.Points(13), layout, mesh)[0]


@pytest.mark.parametrize(
    ("mutation", "expected"),
    [("", None), ("same slice", "read more than once"), ("epoch not set", "has the order of epoch 0")],
)
def test_sample_check_detects_wrong_slices_and_order(ranks: Any, mutation: str, expected: str | None) -> None:
    """Without a mutation it reports no error."""
    for errors in ranks(3, check_samples_with_mutation, mutation):
        assert bool(errors) == (expected is not None)
        assert expected is None or expected in " ".join(errors)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("train digits --local_rank=0", "--local_rank: "),
        ("train digits --local-rank 0", "--local-rank: "),
        ("train digits --dist-url tcp://n0:1", "write --init-method tcp://HOST:PORT"),
        ("train digits --arch resnet50", "imagenet --set depth=50"),
        ("train digits --gpu 0", "use CUDA_VISIBLE_DEVICES=0"),
        ("train digits --grad_accu_steps 2", "write --layout ddp:accumulate=N"),
        ("train digits --wd 1e-4", "change weight_decay there"),
        ("train digits --weight_decay 1e-4", "--weight_decay: the optimizer"),
        ("train digits --lr 0.1", "--set lr=0.1"),
        ("train digits --seed 0", "--set seed=0"),
        ("train digits --master_addr n0 --master_port 1", "--master_addr: write --rendezvous HOST:PORT"),
        ("train digits --nnodes 2 --node_rank 0", "--nnodes: write --nodes N"),
        ("train digits --node_rank 0", "--node_rank: write --node-rank K"),
        ("train digits --init_method=tcp://n0:1", "--init_method: write --init-method M"),
        ("train digits --word_size 3", "--word_size: write --processes N"),
        ("verify digits --batch_size 64", "--batch_size: write --batch N"),
        ("train digits --dist-file f", "write --init-method file:///PATH"),
        ("checkpoint inspect runs --js f", "unrecognized arguments: --js f"),
        ("train digits -p 10", "log.csv in --out"),
        ("audit --lr 0.1 train.py", "options of your script after it: everyrank audit train.py --lr ..."),
        ("port --epochs 3 train.py", "options of your script after it: everyrank port train.py --epochs ..."),
        ("launch --batch-size 4 train.py", "everyrank launch has no --batch-size: write options of your script"),
        ("launch --nproc-per-node 2 train.py", "write --processes N"),
        ("report --seed 1 r.json", "unrecognized arguments: --seed"),
        ("bench digits --start-epoch 3", "write --out DIR --resume"),
        ("new apex", "everyrank new ddp_amp"),
        ("new horovod", "everyrank new horovod_ddp"),
        ("new launch", "everyrank new ddp_torchrun"),
        ("new distributed", "everyrank new ddp_spawn"),
        ("train digits --nonsense 3", "--nonsense 3; see everyrank train --help"),
        ("new nonsense", "'nonsense'; everyrank new --list"),
    ],
)
def test_flags_of_other_tools_get_a_hint(arguments: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the flag or recipe of everyrank that has the same purpose."""
    assert hint in refusal_message(capsys, *arguments.split())


@pytest.mark.parametrize("command", ["launch", "watch", "watch -m", "audit", "port"])
def test_command_without_a_script_names_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = command.split()[0]
    assert f"everyrank {name} train.py" in refusal_message(capsys, *command.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "digits", "--out", ""],
        ["predict", "digits", "--resume", "", "--out", "p.npy"],
        ["checkpoint", "inspect", ""],
        ["eject", "digits", ""],
        ["launch", "--logs", "", "train.py"],
    ],
    ids=" ".join,
)
def test_empty_path_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It comes from an unset shell variable, and would mean the current folder."""
    assert '"" is not a path' in refusal_message(capsys, *arguments)


def test_hints_name_existing_flags_and_recipes() -> None:
    """No flag of train, verify or bench has a hint."""
    from everyrank.cli import _parser
    from everyrank.commands.suggestions import _FLAGS, _RECIPES

    parsers = _parser()._subparsers._group_actions[0].choices
    flags = {name: set(parser._option_string_actions) for name, parser in parsers.items()}
    assert not (flags["train"] | flags["verify"] | flags["bench"]) & set(_FLAGS)
    all_flags = set().union(*flags.values())
    flags_in_hints = {word.strip(",.;") for line in _FLAGS.values() for word in line.split() if word.startswith("--")}
    assert flags_in_hints <= all_flags
    recipes = {path.stem for path in (Path(importlib.resources.files("everyrank.recipes"))).iterdir()}
    assert {recipe for recipe, _ in _RECIPES.values()} <= recipes
