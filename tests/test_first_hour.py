"""The first hour of a new user: the own script given to each command, flags and words of other tools, what comes next.

Each test is a row of the table "Where somebody was stuck" of the newcomers' report, or one of its points 3, 4, 7, 8, 9.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from everyrank import Workload, __version__
from everyrank.cli import main
from everyrank.commands import COMMANDS
from everyrank.commands.suggestions import suggest_order
from everyrank.errors import EveryrankError, WorkloadError
from everyrank.record import read_records
from everyrank.workload import find_workload
from everyrank.workload.scan import defines
from processes import Cli, Ended, one_line

PLAIN = """\
import pathlib

import torch
from torch import nn

pathlib.Path({marker!r}).touch()
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    print("I AM TRAINING", step)
"""
WORKLOAD = '''\
"""A workload of a new user."""
import torch
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Workload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)


def loss(output, target):
    return ((output - target) ** 2).sum(), target.numel()


workload = Workload(
    name="mine",
    model=Net,
    train_data=lambda: TensorDataset(torch.ones(16, 3), torch.ones(16, 2)),
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    global_batch=4,
    steps=6,
)
'''


@pytest.fixture
def called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """The command line in this process, in an empty folder: (status, stdout, stderr)."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:  # argparse, after --help
            status = int(end.code or 0)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def refused(called: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """A call that ends with status 2: its one line."""

    def call(*words: object) -> str:
        status, out, err = called(*words)
        assert status == 2, out + err
        return one_line(err)

    return call


# --- point 3: a plain script is not run, and the message says what to do with it

COMMANDS_OF_A_WORKLOAD = {
    "train": ["train", "PLAIN"],
    "verify": ["verify", "PLAIN"],
    "bench": ["bench", "PLAIN"],
    "eject": ["eject", "PLAIN", "project"],
    "predict": ["predict", "PLAIN", "--out", "p.npy", "--pretrained", "w.pt"],
    "a name in it": ["train", "PLAIN:training"],
}


@pytest.mark.parametrize("command", COMMANDS_OF_A_WORKLOAD)
def test_a_plain_script_is_not_run(command: str, cli: Cli, tmp_path: Path) -> None:
    marker = tmp_path / "it-was-run"
    (tmp_path / "plain.py").write_text(PLAIN.format(marker=str(marker)))
    words = [word.replace("PLAIN", "plain.py") for word in COMMANDS_OF_A_WORKLOAD[command]]
    done = cli(tmp_path, *words)
    assert done.status == 2, done.err
    assert not marker.exists(), "the script was run"
    assert "I AM TRAINING" not in done.out + done.err
    assert "everyrank audit plain.py" in one_line(done.err)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.py"], "nothing is left"


def test_the_api_does_not_run_a_plain_script(tmp_path: Path) -> None:
    marker = tmp_path / "it-was-run"
    (tmp_path / "plain_api.py").write_text(PLAIN.format(marker=str(marker)))
    with pytest.raises(EveryrankError) as caught:
        find_workload(str(tmp_path / "plain_api.py"))
    assert not marker.exists(), "the script was run"
    assert "audit" in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "text",
    [
        "# no workload here, and no Workload\n" + PLAIN,
        '"""Trains without a workload = Workload(...)."""\n' + PLAIN,
        "name = 'workload'\n" + PLAIN,
    ],
    ids=["comment", "docstring", "string"],
)
def test_a_plain_script_that_only_speaks_of_workloads_is_not_run(text: str, cli: Cli, tmp_path: Path) -> None:
    marker = tmp_path / "it-was-run"
    (tmp_path / "plain.py").write_text(text.format(marker=str(marker)) if "{marker" in text else text)
    done = cli(tmp_path, "train", "plain.py")
    assert done.status == 2, done.err
    assert not marker.exists(), "the script was run"
    assert "everyrank audit plain.py" in one_line(done.err)


DEFINES = {
    "an import": ("plain.py", "from other import workload\n"),
    "an import of all": ("plain.py", "from other import *\n"),
    "an import by another name": ("plain.py", "from other import workload as training\nworkload = training\n"),
    "a function": ("plain.py", "import other\n\n\ndef workload():\n    return other.workload\n"),
    "another name": ("plain.py:training", "import other\n\ntraining = other.workload\n"),
    "a branch": ("plain.py", "import other\n\nif True:\n    workload = other.workload\n"),
    "an annotation": ("plain.py", "import other\n\nworkload: object = other.workload\n"),
    "an unpacking": ("plain.py", "import other\n\nworkload, _ = other.workload, 1\n"),
    "a class": (
        "plain.py",
        "import other\n\n\nclass workload:\n    def __new__(cls):\n        return other.workload\n",
    ),
}


@pytest.mark.parametrize("kind", DEFINES)
def test_a_file_that_defines_a_workload_is_taken(kind: str, cli: Cli, tmp_path: Path) -> None:
    """However it does; such a file is no plain script."""
    place, text = DEFINES[kind]
    (tmp_path / "other.py").write_text(WORKLOAD)
    (tmp_path / "plain.py").write_text(text)
    done = cli(tmp_path, "train", place, "--steps", "1", "--out", "out", "--device", "cpu")
    assert done.status == 0, done.err


NAMES = {
    "match data:\n    case {**workload}:\n        pass\n": True,
    "match data:\n    case [*workload]:\n        pass\n": True,
    "names = [other := 1 for _ in (workload := [1])]\n": True,
    "sizes = [workload for workload in (1, 2)]\n": False,
    "sizes = {workload: 1 for workload, _ in pairs}\n": False,
    "def make():\n    workload = 1\n": False,
    "workload: int\n": False,
}


@pytest.mark.parametrize("text", NAMES)
def test_names_that_a_file_defines(text: str, tmp_path: Path) -> None:
    """Targets of a comprehension stay inside it; a pattern of a mapping defines the name of its rest."""
    (tmp_path / "plain.py").write_text(text)
    assert defines(tmp_path / "plain.py", "workload") is NAMES[text]


# --- point 4: a parallel layout has two ranks


@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("fsdp", 2), ("single", 1), ("ddp:accumulate=2", 2)])
def test_train_takes_as_many_ranks_as_verify(layout: str, size: int, cli: Cli, tmp_path: Path) -> None:
    words = ["--layout", layout, "--steps", "1", "--out", "out", "--device", "cpu"]
    done = cli(tmp_path, "train", "digits", *words, CUDA_VISIBLE_DEVICES="")
    assert done.status == 0, done.err
    (record,) = read_records(tmp_path / "out" / "record.json")
    assert record.world_size == size


def test_train_takes_one_rank_where_one_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    words = ["--layout", "ddp", "--processes", "1", "--steps", "1", "--out", "out", "--device", "cpu"]
    done = cli(tmp_path, "train", "digits", *words)
    assert done.status == 0, done.err
    (record,) = read_records(tmp_path / "out" / "record.json")
    assert record.world_size == 1


def test_the_help_says_how_many(called: Any) -> None:
    status, out, _ = called("train", "--help")
    assert status == 0
    *_, text = re.findall(r"^  --processes N(.*?)^  -", out, re.DOTALL | re.MULTILINE)
    assert "2" in text


# --- point 7: a model that is built already


def test_a_module_instead_of_a_function(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WORKLOAD.replace("model=Net,", "model=Net(),"))
    done = cli(tmp_path, "train", "mine.py", "--out", "out")
    assert done.status == 2, done.err
    line = done.err.strip().splitlines()[-1]
    assert "model=" in line
    assert "module.py" not in line
    assert "TypeError" not in line


def test_a_module_is_refused_by_the_workload() -> None:
    with pytest.raises(WorkloadError, match="model="):
        Workload(
            name="mine",
            model=nn.Linear(3, 2),
            train_data=list,
            loss=lambda output, target: (output.sum(), 1),
            optimizer=lambda model: None,  # pyright: ignore
            global_batch=4,
        )


def test_a_class_or_a_function_is_a_model(cli: Cli, tmp_path: Path) -> None:
    for number, model in enumerate(("Net", "lambda: Net()", "lambda: torch.nn.Linear(3, 2)")):
        (tmp_path / f"mine{number}.py").write_text(WORKLOAD.replace("model=Net,", f"model={model},"))
        done = cli(tmp_path, "train", f"mine{number}.py", "--steps", "1", "--out", f"out{number}")
        assert done.status == 0, done.err


# --- point 8: a workload that imports a train.py


def test_eject_of_a_workload_that_imports_train(cli: Cli, tmp_path: Path) -> None:
    """The user's train.py goes into the project, and the project's own script has another name."""
    user_file = "def loss(output, target):\n    return ((output - target) ** 2).sum(), target.numel()\n"
    (tmp_path / "train.py").write_text(user_file)
    (tmp_path / "mine.py").write_text(
        WORKLOAD.replace(
            "\n\ndef loss(output, target):\n    return ((output - target) ** 2).sum(), target.numel()\n", ""
        ).replace("from everyrank import Workload\n", "from everyrank import Workload\nfrom train import loss\n")
    )
    done = cli(tmp_path, "eject", "mine.py", "project")
    assert done.status == 0, done.err
    project = tmp_path / "project"
    texts = {path.relative_to(project): path.read_text() for path in project.rglob("*.py")}
    assert user_file in texts.values(), "the user's file is there as it was"
    for name, text in texts.items():
        compile(text, str(name), "exec")
        assert "import everyrank" not in text
        assert "from everyrank" not in text
    main_scripts = [name for name, text in texts.items() if "init_process_group" in text]
    assert main_scripts
    readme = (project / "README.md").read_text()
    assert any(str(name) in readme or name.name in readme for name in main_scripts), "README.md says what to start"


@pytest.mark.integration
def test_the_project_of_a_workload_that_imports_train_trains(cli: Cli, tmp_path: Path) -> None:
    test_eject_of_a_workload_that_imports_train(cli, tmp_path)
    project = tmp_path / "project"
    started = [name for name in project.glob("*.py") if "init_process_group" in name.read_text()]
    script = next(name for name in started if name.name in (project / "README.md").read_text())
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    running = cli.start(project, command=words, GLOO_SOCKET_IFNAME="lo")
    status, out, err = running.end(200)
    assert status == 0, err
    assert "loss" in out


# --- point 9: a template, and what comes next


def test_new_workload_writes_a_template(cli: Cli, tmp_path: Path) -> None:
    """With comments, and right as it stands."""
    done = cli(tmp_path, "new", "workload", "my_workload.py")
    assert done.status == 0, done.err
    assert "my_workload.py" in done.out
    text = (tmp_path / "my_workload.py").read_text()
    compile(text, "my_workload.py", "exec")
    assert text.count("#") >= 5
    assert "Workload(" in text
    words = ["--layout", "ddp", "--processes", "2", "--quick", "--device", "cpu", "--json", "found.json"]
    done = cli(tmp_path, "verify", "my_workload.py", *words)
    assert done.status == 0, done.err
    [row] = json.loads((tmp_path / "found.json").read_text())
    assert row["parity"]["status"] == "equal"


def test_new_workload_trains_and_is_ejected(cli: Cli, tmp_path: Path) -> None:
    assert cli(tmp_path, "new", "workload", "my_workload.py").status == 0
    done = cli(tmp_path, "train", "my_workload.py", "--steps", "2", "--out", "out", "--device", "cpu")
    assert done.status == 0, done.err
    done = cli(tmp_path, "eject", "my_workload.py", "project")
    assert done.status == 0, done.err


def test_new_workload_overwrites_nothing(called: Any, refused: Any, tmp_path: Path) -> None:
    (tmp_path / "my_workload.py").write_text("mine")
    assert "my_workload.py" in refused("new", "workload", "my_workload.py")
    assert (tmp_path / "my_workload.py").read_text() == "mine"


def test_new_workload_is_printed_and_listed(called: Any) -> None:
    status, out, _ = called("new", "workload")
    assert status == 0
    assert "Workload(" in out
    status, out, _ = called("new", "--list")
    assert status == 0
    assert any(line.split()[:1] == ["workload"] for line in out.splitlines())


NEXT = {
    "train": ["train", "digits", "--steps", "1", "--out", "out"],
    "verify": ["verify", "digits", "--layout", "ddp", "--processes", "2", "--quick", "--steps", "1"],
    "bench": ["bench", "digits", "--layout", "single", "--quick"],
}


@pytest.mark.parametrize("command", NEXT)
def test_what_comes_next_is_said(command: str, cli: Cli, tmp_path: Path) -> None:
    """A line that begins with `next:`, with a command that can be pasted."""
    words = NEXT[command]
    if command == "bench":
        words = ["bench", "digits", "--layout", "single", "--trials", "2", "--steps", "2"]
    done = cli(tmp_path, *words, "--launcher", "spawn", "--device", "cpu")
    assert done.status == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith("next:")]
    assert len(lines) == 1, done.out
    named = re.findall(r"everyrank (\w+)", lines[0])
    assert named, lines[0]
    assert "--launcher spawn --device cpu" in lines[0]
    assert set(named) <= set(COMMANDS), lines[0]
    if command == "train":
        assert "verify" in named
        assert "out" in lines[0]


def test_nothing_comes_next_after_an_error(cli: Cli, tmp_path: Path) -> None:
    done = cli(tmp_path, "train", "digits", "--steps", "0")
    assert done.status == 2
    assert "next:" not in done.out + done.err


def test_train_writes_a_page(cli: Cli, tmp_path: Path) -> None:
    words = ["--steps", "3", "--out", "out", "--html", "report.html", "--device", "cpu"]
    done = cli(tmp_path, "train", "digits", *words)
    assert done.status == 0, done.err
    page = (tmp_path / "report.html").read_text()
    assert "digits" in page
    assert "loss" in page
    assert "<svg" in page or "data:image" in page
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=[\"']https?:", page), "it is self-contained"
    assert "report.html" in done.out


def test_a_page_that_cannot_be_written_is_refused_before_the_training(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    done = cli(tmp_path, "train", "digits", "--steps", "1", "--out", "out", "--html", "folder.html")
    assert done.status == 2
    assert "folder.html" in one_line(done.err)
    assert not (tmp_path / "out" / "record.json").exists()


# --- audit: words of other tools before the script

TELLS = """\
import os
import sys

raise ValueError(f"argv={sys.argv[1:]} size={os.environ.get('WORLD_SIZE', '1')}")
"""


def audited(cli: Cli, folder: Path, *words: str) -> Ended:
    """An audit of a script that tells its arguments and how many ranks there are."""
    (folder / "train.py").write_text("# torch.distributed\n" + TELLS)
    return cli(folder, "audit", *words)


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["train.py", "--", "--epochs", "5"], ["--epochs", "5"]),
        (["--", "train.py", "--epochs", "5"], ["--epochs", "5"]),
        (["train.py", "--epochs", "5"], ["--epochs", "5"]),
        (["train.py", "a", "--", "b"], ["a", "--", "b"]),
        (["train.py", "--", "--", "b"], ["--", "b"]),
    ],
)
def test_a_first_separator_is_left_out(words: list[str], argv: list[str], cli: Cli, tmp_path: Path) -> None:
    done = audited(cli, tmp_path, *words)
    assert done.status == 4, done.err
    assert f"argv={argv}" in done.err.splitlines()[-1]


MISPLACED = [
    ("audit train.py --html a.html 5", "everyrank audit --html a.html train.py 5"),
    ("audit --updates 3 train.py --json=a.json", "everyrank audit --updates 3 --json=a.json train.py"),
    ("launch train.py --epochs 5 --dry-run", "everyrank launch --dry-run train.py --epochs 5"),
    ("port train.py --processes 2", None),  # an option of audit, not of port
    ("audit train.py --epochs 5 --replay-memory 9", None),
    ("audit train.py -- --html a.html", None),
    ("audit own.py --resume-with x --json f", None),
    ("audit train.py -m", None),
]


@pytest.mark.parametrize(("line", "better"), MISPLACED)
def test_options_after_the_script_are_noticed(line: str, better: str | None, tmp_path: Path) -> None:
    """A script that does not know --html ends with an error, or ignores it. One that has such an option may mean it."""
    (tmp_path / "train.py").write_text(TELLS)
    (tmp_path / "own.py").write_text('flags = ["--json"]\nresume_with = None\n')
    words = [str(tmp_path / word) if word.endswith(".py") else word for word in line.split()]
    parser = argparse.ArgumentParser()
    COMMANDS[words[0]].add_arguments(parser)
    note = suggest_order(words, parser.parse_args(words[1:]).script, parser)
    assert (note is None) == (better is None)
    if note is not None and better is not None:
        assert note.replace(f"{tmp_path}/", "").endswith(f"type: {better}")


OTHER_TOOLS = [
    ("torchrun --nproc_per_node=3 train.py --epochs 5", 3),
    ("torchrun --nproc-per-node 3 --standalone train.py --epochs 5", 3),
    ("torchrun train.py --epochs 5", None),
    ("accelerate launch --num_processes 3 train.py --epochs 5", 3),
    ("accelerate launch --num_processes=3 --mixed_precision no train.py --epochs 5", 3),
    ("accelerate launch train.py --epochs 5", None),
    ("python train.py --epochs 5", None),
    ("python3 train.py --epochs 5", None),
    ("python -u train.py --epochs 5", None),
    ("python -m torch.distributed.run --nproc_per_node=3 train.py --epochs 5", 3),
    ("python -m torch.distributed.launch --nproc_per_node=3 train.py --epochs 5", 3),
]


@pytest.mark.parametrize(("line", "size"), OTHER_TOOLS)
def test_the_command_of_another_tool_is_understood(line: str, size: int | None, cli: Cli, tmp_path: Path) -> None:
    """Either the script is audited as it says, or the message is the command to type instead."""
    done = audited(cli, tmp_path, *line.split())
    last = done.err.splitlines()[-1]
    assert "no such file" not in last
    if done.status == 4:  # the script was run
        assert "argv=['--epochs', '5']" in last
        assert size is None or f"size={size}" in last
        return
    assert done.status == 2, done.err
    own = "everyrank audit " + (f"--processes {size} " if size is not None else "")
    assert f"{own}train.py --epochs 5" in one_line(done.err)


def test_a_script_with_the_name_of_a_tool_is_that_script(cli: Cli, tmp_path: Path) -> None:
    """A file that is there comes first."""
    (tmp_path / "python").write_text("# torch.distributed\n" + TELLS)
    done = cli(tmp_path, "audit", "python", "--epochs", "5")
    assert done.status == 4, done.err
    assert "argv=['--epochs', '5']" in done.err.splitlines()[-1]


def test_audit_of_a_workload_points_to_verify(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "my_workload.py").write_text(WORKLOAD)
    done = cli(tmp_path, "audit", "my_workload.py")
    assert done.status == 2
    assert "everyrank verify my_workload.py" in done.err.splitlines()[-1]


# --- words and flags that are nearly right


@pytest.mark.parametrize("command", ["train", "verify", "bench"])
@pytest.mark.parametrize(
    "words", [["--gpus", "2"], ["--gpus=2"], ["-n", "2"], ["--num-gpus", "2"], ["--num_processes", "2"]]
)
def test_how_many_ranks_in_the_words_of_other_tools(words: list[str], command: str, refused: Any) -> None:
    line = refused(command, "digits", *words)
    assert words[0].partition("=")[0] in line
    assert "--processes 2" in line


@pytest.mark.parametrize(
    ("line", "typed", "meant"),
    [
        ("train digits --layuot ddp", "--layuot", "--layout"),
        ("verify digits --proceses 2", "--proceses", "--processes"),
        ("bench digits --trails 2", "--trails", "--trials"),
        ("train digits --epoch 3", "--epoch", "--epochs"),
        ("train digits --resum out", "--resum", "--resume"),
        ("eject digits out --layuot ddp", "--layuot", "--layout"),
        ("audit --update 3 train.py", "--update", "--updates"),
    ],
)
def test_a_flag_that_is_nearly_right(line: str, typed: str, meant: str, refused: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TELLS)
    said = refused(*line.split())
    assert re.search(rf"{typed}\b", said), said
    assert re.search(rf"did you mean [^?]*{meant}\b", said), said


@pytest.mark.parametrize("command", ["train", "verify", "bench"])
def test_a_flag_that_nobody_knows_points_to_the_help_of_its_command(command: str, refused: Any) -> None:
    """The help of `everyrank` itself does not list the flags."""
    assert f"everyrank {command} --help" in refused(command, "digits", "--zzqqxx")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trian", "train"),
        ("verfy", "verify"),
        ("auditt", "audit"),
        ("benchmark", "bench"),
        ("checkpiont", "checkpoint"),
    ],
)
def test_a_command_that_is_nearly_right(typed: str, meant: str, refused: Any) -> None:
    line = refused(typed)
    assert typed in line
    assert re.search(rf"did you mean [^?]*\b{meant}\b", line)


def test_a_command_that_nobody_knows(refused: Any) -> None:
    line = refused("zzqqxx")
    assert "zzqqxx" in line
    assert "did you mean" not in line


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("ddp", ["ddp_torchrun", "ddp_spawn"]), ("ddp_torchrn", ["ddp_torchrun"]), ("fsdp2", ["fsdp"])],
)
def test_a_recipe_that_is_nearly_right(typed: str, meant: list[str], called: Any, refused: Any) -> None:
    """Some names that are like it, and not all 47."""
    _, listed, _ = called("new", "--list")
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    line = refused("new", typed)
    for name in meant:
        assert name in line
    assert "did you mean" in line
    assert sum(1 for name in names if re.search(rf"\b{name}\b", line)) < 15


def test_help_is_a_command(called: Any) -> None:
    status, out, err = called("help")
    assert status == 0, err
    assert "usage:" in out
    assert all(name in out for name in COMMANDS if name not in ("help", "version"))
    assert err == ""


def test_help_of_a_command(called: Any) -> None:
    status, out, err = called("help", "train")
    assert status == 0, err
    assert "everyrank train" in out
    assert "--layout" in out


def test_help_of_what_is_no_command(refused: Any) -> None:
    assert re.search(r"did you mean [^?]*\btrain\b", refused("help", "trian"))


def test_version_is_a_command(called: Any) -> None:
    status, out, err = called("version")
    assert status == 0, err
    assert __version__ in out
    assert (0, out) == called("--version")[:2]


def test_everyrank_alone_prints_the_help(called: Any) -> None:
    status, out, err = called()
    assert status == 0, err
    assert "usage:" in out
    assert "train" in out
    assert err == ""


def test_a_pipeline_without_blocks_has_an_example(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WORKLOAD)
    done = cli(tmp_path, "train", "mine.py", "--layout", "pipeline", "--processes", "2", "--out", "out")
    assert done.status in (2, 3)
    assert re.search(r"blocks=[\"']\w+", done.err.strip().splitlines()[-1])
