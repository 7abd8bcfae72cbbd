"""Mistakes of new users: plain scripts passed as workloads, flags of other tools, misspelled names.

Also what helps them: the workload template, the suggested next command, and the help.
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
from processes import Cli, EndedCommand, only_error_line

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
def run_main(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """A function that runs a command in this process, in an empty folder: (status, stdout, stderr)."""
    previous_handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as system_exit:  # argparse raises it after --help
            status = int(system_exit.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    yield call
    signal.signal(signal.SIGTERM, previous_handler)


@pytest.fixture
def run_refused(run_main: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """A function that runs a command, checks exit status 2 and returns the only line of stderr."""

    def call(*args: object) -> str:
        status, out, err = run_main(*args)
        assert status == 2, out + err
        return only_error_line(err)

    return call


# --- a plain script passed as a workload: it is not run, and the message suggests `everyrank audit`

WORKLOAD_COMMANDS = {
    "train": ["train", "PLAIN"],
    "verify": ["verify", "PLAIN"],
    "bench": ["bench", "PLAIN"],
    "eject": ["eject", "PLAIN", "project"],
    "predict": ["predict", "PLAIN", "--out", "p.npy", "--pretrained", "w.pt"],
    "a name in it": ["train", "PLAIN:training"],
}


@pytest.mark.parametrize("command", WORKLOAD_COMMANDS)
def test_plain_script_passed_as_workload_is_not_run(command: str, cli: Cli, tmp_path: Path) -> None:
    marker = tmp_path / "it-was-run"
    (tmp_path / "plain.py").write_text(PLAIN.format(marker=str(marker)))
    args = [arg.replace("PLAIN", "plain.py") for arg in WORKLOAD_COMMANDS[command]]
    result = cli(tmp_path, *args)
    assert result.status == 2, result.err
    assert not marker.exists(), "the script was run"
    assert "I AM TRAINING" not in result.out + result.err
    assert "everyrank audit plain.py" in only_error_line(result.err)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.py"], "nothing is left"


def test_find_workload_does_not_run_a_plain_script(tmp_path: Path) -> None:
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
def test_plain_script_that_mentions_workloads_is_not_run(text: str, cli: Cli, tmp_path: Path) -> None:
    marker = tmp_path / "it-was-run"
    (tmp_path / "plain.py").write_text(text.format(marker=str(marker)))
    result = cli(tmp_path, "train", "plain.py")
    assert result.status == 2, result.err
    assert not marker.exists(), "the script was run"
    assert "everyrank audit plain.py" in only_error_line(result.err)


WORKLOAD_DEFINITIONS = {
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


@pytest.mark.parametrize("kind", WORKLOAD_DEFINITIONS)
def test_every_form_of_workload_definition_is_accepted(kind: str, cli: Cli, tmp_path: Path) -> None:
    """A file that defines a workload in any of these forms is not a plain script."""
    workload_path, text = WORKLOAD_DEFINITIONS[kind]
    (tmp_path / "other.py").write_text(WORKLOAD)
    (tmp_path / "plain.py").write_text(text)
    result = cli(tmp_path, "train", workload_path, "--steps", "1", "--out", "out", "--device", "cpu")
    assert result.status == 0, result.err


DEFINES_WORKLOAD = {
    "match data:\n    case {**workload}:\n        pass\n": True,
    "match data:\n    case [*workload]:\n        pass\n": True,
    "names = [other := 1 for _ in (workload := [1])]\n": True,
    "sizes = [workload for workload in (1, 2)]\n": False,
    "sizes = {workload: 1 for workload, _ in pairs}\n": False,
    "def make():\n    workload = 1\n": False,
    "workload: int\n": False,
}


@pytest.mark.parametrize("text", DEFINES_WORKLOAD)
def test_defines_finds_names_that_a_module_assigns(text: str, tmp_path: Path) -> None:
    """The target of a comprehension is local to it. The `**name` of a mapping pattern is assigned in the module."""
    (tmp_path / "plain.py").write_text(text)
    assert defines(tmp_path / "plain.py", "workload") is DEFINES_WORKLOAD[text]


# --- the default number of ranks: 2 for a parallel layout


@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("fsdp", 2), ("single", 1), ("ddp:accumulate=2", 2)])
def test_default_number_of_ranks_of_train(layout: str, size: int, cli: Cli, tmp_path: Path) -> None:
    args = ["--layout", layout, "--steps", "1", "--out", "out", "--device", "cpu"]
    result = cli(tmp_path, "train", "digits", *args, CUDA_VISIBLE_DEVICES="")
    assert result.status == 0, result.err
    (record,) = read_records(tmp_path / "out" / "record.json")
    assert record.world_size == size


def test_train_ddp_with_one_process(cli: Cli, tmp_path: Path) -> None:
    args = ["--layout", "ddp", "--processes", "1", "--steps", "1", "--out", "out", "--device", "cpu"]
    result = cli(tmp_path, "train", "digits", *args)
    assert result.status == 0, result.err
    (record,) = read_records(tmp_path / "out" / "record.json")
    assert record.world_size == 1


def test_train_help_states_the_default_number_of_processes(run_main: Any) -> None:
    status, out, _ = run_main("train", "--help")
    assert status == 0
    *_, processes_help = re.findall(r"^  --processes N(.*?)^  -", out, re.DOTALL | re.MULTILINE)
    assert re.search(r"default.*\b1 (for|on)", processes_help, re.DOTALL), processes_help


# --- a module instance as `model`, instead of a function that builds it


def test_train_refuses_module_instance_as_model(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WORKLOAD.replace("model=Net,", "model=Net(),"))
    result = cli(tmp_path, "train", "mine.py", "--out", "out")
    assert result.status == 2, result.err
    line = result.err.strip().splitlines()[-1]
    assert "model=" in line
    assert "module.py" not in line
    assert "TypeError" not in line


def test_workload_refuses_module_instance_as_model() -> None:
    with pytest.raises(WorkloadError, match="model="):
        Workload(
            name="mine",
            model=nn.Linear(3, 2),
            train_data=list,
            loss=lambda output, target: (output.sum(), 1),
            optimizer=lambda model: None,  # pyright: ignore
            global_batch=4,
        )


def test_model_may_be_a_class_or_a_function(cli: Cli, tmp_path: Path) -> None:
    for number, model in enumerate(("Net", "lambda: Net()", "lambda: torch.nn.Linear(3, 2)")):
        (tmp_path / f"mine{number}.py").write_text(WORKLOAD.replace("model=Net,", f"model={model},"))
        result = cli(tmp_path, "train", f"mine{number}.py", "--steps", "1", "--out", f"out{number}")
        assert result.status == 0, result.err


# --- eject of a workload that imports a module named train


def test_eject_workload_that_imports_train_py(cli: Cli, tmp_path: Path) -> None:
    """The user's train.py is copied into the project, so the project's main script has a different name."""
    user_file = "def loss(output, target):\n    return ((output - target) ** 2).sum(), target.numel()\n"
    (tmp_path / "train.py").write_text(user_file)
    (tmp_path / "mine.py").write_text(
        WORKLOAD.replace(
            "\n\ndef loss(output, target):\n    return ((output - target) ** 2).sum(), target.numel()\n", ""
        ).replace("from everyrank import Workload\n", "from everyrank import Workload\nfrom train import loss\n")
    )
    result = cli(tmp_path, "eject", "mine.py", "project")
    assert result.status == 0, result.err
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
def test_ejected_project_of_workload_that_imports_train_py_runs(cli: Cli, tmp_path: Path) -> None:
    test_eject_workload_that_imports_train_py(cli, tmp_path)
    project = tmp_path / "project"
    main_scripts = [path for path in project.glob("*.py") if "init_process_group" in path.read_text()]
    script = next(path for path in main_scripts if path.name in (project / "README.md").read_text())
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    running = cli.start(project, command=command, GLOO_SOCKET_IFNAME="lo")
    status, out, err = running.end(200)
    assert status == 0, err
    assert "loss" in out


# --- the workload template and the suggested next command


def test_new_workload_writes_template_that_passes_verify(cli: Cli, tmp_path: Path) -> None:
    """The template has comments, and verify reports it as equal without any edits."""
    result = cli(tmp_path, "new", "workload", "my_workload.py")
    assert result.status == 0, result.err
    assert "my_workload.py" in result.out
    text = (tmp_path / "my_workload.py").read_text()
    compile(text, "my_workload.py", "exec")
    assert text.count("#") >= 5
    assert "Workload(" in text
    args = ["--layout", "ddp", "--processes", "2", "--quick", "--device", "cpu", "--json", "found.json"]
    result = cli(tmp_path, "verify", "my_workload.py", *args)
    assert result.status == 0, result.err
    [row] = json.loads((tmp_path / "found.json").read_text())
    assert row["parity"]["status"] == "equal"


def test_workload_template_trains_and_can_be_ejected(cli: Cli, tmp_path: Path) -> None:
    assert cli(tmp_path, "new", "workload", "my_workload.py").status == 0
    result = cli(tmp_path, "train", "my_workload.py", "--steps", "2", "--out", "out", "--device", "cpu")
    assert result.status == 0, result.err
    result = cli(tmp_path, "eject", "my_workload.py", "project")
    assert result.status == 0, result.err


def test_new_workload_does_not_overwrite_a_file(run_main: Any, run_refused: Any, tmp_path: Path) -> None:
    (tmp_path / "my_workload.py").write_text("mine")
    assert "my_workload.py" in run_refused("new", "workload", "my_workload.py")
    assert (tmp_path / "my_workload.py").read_text() == "mine"


def test_new_prints_and_lists_the_workload_template(run_main: Any) -> None:
    status, out, _ = run_main("new", "workload")
    assert status == 0
    assert "Workload(" in out
    status, out, _ = run_main("new", "--list")
    assert status == 0
    assert any(line.split()[:1] == ["workload"] for line in out.splitlines())


COMMAND_ARGS = {
    "train": ["train", "digits", "--steps", "1", "--out", "out"],
    "verify": ["verify", "digits", "--layout", "ddp", "--processes", "2", "--quick", "--steps", "1"],
    "bench": ["bench", "digits", "--layout", "single", "--trials", "2", "--steps", "2"],
}


@pytest.mark.parametrize("command", COMMAND_ARGS)
def test_command_suggests_the_next_command(command: str, cli: Cli, tmp_path: Path) -> None:
    """One line begins with `next:` and has a command that can be pasted."""
    result = cli(tmp_path, *COMMAND_ARGS[command], "--launcher", "spawn", "--device", "cpu")
    assert result.status == 0, result.err
    lines = [line for line in result.out.splitlines() if line.startswith("next:")]
    assert len(lines) == 1, result.out
    suggested_commands = re.findall(r"everyrank (\w+)", lines[0])
    assert suggested_commands, lines[0]
    assert "--launcher spawn --device cpu" in lines[0]
    assert set(suggested_commands) <= set(COMMANDS), lines[0]
    if command == "train":
        assert "verify" in suggested_commands


def test_no_next_command_after_an_error(cli: Cli, tmp_path: Path) -> None:
    result = cli(tmp_path, "train", "digits", "--steps", "0")
    assert result.status == 2
    assert "next:" not in result.out + result.err


def test_train_writes_html_report(cli: Cli, tmp_path: Path) -> None:
    args = ["--steps", "3", "--out", "out", "--html", "report.html", "--device", "cpu"]
    result = cli(tmp_path, "train", "digits", *args)
    assert result.status == 0, result.err
    page = (tmp_path / "report.html").read_text()
    assert "digits" in page
    assert "loss" in page
    assert "<svg" in page or "data:image" in page
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=[\"']https?:", page), "it is self-contained"
    assert "report.html" in result.out


def test_unwritable_html_path_is_refused_before_training(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    result = cli(tmp_path, "train", "digits", "--steps", "1", "--out", "out", "--html", "folder.html")
    assert result.status == 2
    assert "folder.html" in only_error_line(result.err)
    assert not (tmp_path / "out" / "record.json").exists()


# --- audit: arguments of other tools before the script

REPORTS_ARGV = """\
import os
import sys

raise ValueError(f"argv={sys.argv[1:]} size={os.environ.get('WORLD_SIZE', '1')}")
"""


def run_audit(cli: Cli, folder: Path, *args: str) -> EndedCommand:
    """Run `everyrank audit` with a train.py that fails and reports its arguments and the world size."""
    (folder / "train.py").write_text("# torch.distributed\n" + REPORTS_ARGV)
    return cli(folder, "audit", *args)


@pytest.mark.parametrize(
    ("args", "argv"),
    [
        (["train.py", "--", "--epochs", "5"], ["--epochs", "5"]),
        (["--", "train.py", "--epochs", "5"], ["--epochs", "5"]),
        (["train.py", "--epochs", "5"], ["--epochs", "5"]),
        (["train.py", "a", "--", "b"], ["a", "--", "b"]),
        (["train.py", "--", "--", "b"], ["--", "b"]),
    ],
)
def test_audit_drops_the_first_separator(args: list[str], argv: list[str], cli: Cli, tmp_path: Path) -> None:
    result = run_audit(cli, tmp_path, *args)
    assert result.status == 4, result.err
    assert f"argv={argv}" in result.err.splitlines()[-1]


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


@pytest.mark.parametrize(("line", "expected_command"), MISPLACED)
def test_options_after_the_script_are_reported(line: str, expected_command: str | None, tmp_path: Path) -> None:
    """An option after the script is the script's. It is reported, unless the script may have such an option."""
    (tmp_path / "train.py").write_text(REPORTS_ARGV)
    (tmp_path / "own.py").write_text('flags = ["--json"]\nresume_with = None\n')
    args = [str(tmp_path / arg) if arg.endswith(".py") else arg for arg in line.split()]
    parser = argparse.ArgumentParser()
    COMMANDS[args[0]].add_arguments(parser)
    note = suggest_order(args, parser.parse_args(args[1:]).script, parser)
    assert (note is None) == (expected_command is None)
    if note is not None and expected_command is not None:
        assert note.replace(f"{tmp_path}/", "").endswith(f"type: {expected_command}")


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
def test_audit_understands_commands_of_other_launchers(line: str, size: int | None, cli: Cli, tmp_path: Path) -> None:
    """Audit runs the script with these ranks and arguments, or its message is the command to type instead."""
    result = run_audit(cli, tmp_path, *line.split())
    last_line = result.err.splitlines()[-1]
    assert "no such file" not in last_line
    if result.status == 4:  # the script was run
        assert "argv=['--epochs', '5']" in last_line
        assert size is None or f"size={size}" in last_line
        return
    assert result.status == 2, result.err
    audit_command = "everyrank audit " + (f"--processes {size} " if size is not None else "")
    assert f"{audit_command}train.py --epochs 5" in only_error_line(result.err)


def test_audit_runs_a_file_named_like_a_launcher(cli: Cli, tmp_path: Path) -> None:
    """If a file named `python` exists, audit runs this file."""
    (tmp_path / "python").write_text("# torch.distributed\n" + REPORTS_ARGV)
    result = cli(tmp_path, "audit", "python", "--epochs", "5")
    assert result.status == 4, result.err
    assert "argv=['--epochs', '5']" in result.err.splitlines()[-1]


def test_audit_of_a_workload_suggests_verify(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "my_workload.py").write_text(WORKLOAD)
    result = cli(tmp_path, "audit", "my_workload.py")
    assert result.status == 2
    assert "everyrank verify my_workload.py" in result.err.splitlines()[-1]


# --- misspelled commands, flags and recipes


@pytest.mark.parametrize("command", ["train", "verify", "bench"])
@pytest.mark.parametrize(
    "flags", [["--gpus", "2"], ["--gpus=2"], ["-n", "2"], ["--num-gpus", "2"], ["--num_processes", "2"]]
)
def test_process_count_flags_of_other_tools_suggest_processes(flags: list[str], command: str, run_refused: Any) -> None:
    line = run_refused(command, "digits", *flags)
    assert flags[0].partition("=")[0] in line
    assert "--processes 2" in line


@pytest.mark.parametrize(
    ("line", "misspelled", "expected"),
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
def test_misspelled_flag_suggests_the_right_flag(
    line: str, misspelled: str, expected: str, run_refused: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(REPORTS_ARGV)
    message = run_refused(*line.split())
    assert re.search(rf"{misspelled}\b", message), message
    assert re.search(rf"did you mean [^?]*{expected}\b", message), message


@pytest.mark.parametrize("command", ["train", "verify", "bench"])
def test_unknown_flag_names_the_help_of_its_command(command: str, run_refused: Any) -> None:
    """The help of `everyrank` itself does not list the flags."""
    assert f"everyrank {command} --help" in run_refused(command, "digits", "--zzqqxx")


@pytest.mark.parametrize(
    ("misspelled", "expected"),
    [
        ("trian", "train"),
        ("verfy", "verify"),
        ("auditt", "audit"),
        ("benchmark", "bench"),
        ("checkpiont", "checkpoint"),
    ],
)
def test_misspelled_command_suggests_the_right_command(misspelled: str, expected: str, run_refused: Any) -> None:
    line = run_refused(misspelled)
    assert misspelled in line
    assert re.search(rf"did you mean [^?]*\b{expected}\b", line)


def test_unknown_command_gets_no_suggestion(run_refused: Any) -> None:
    line = run_refused("zzqqxx")
    assert "zzqqxx" in line
    assert "did you mean" not in line


@pytest.mark.parametrize(
    ("misspelled", "expected"),
    [("ddp", ["ddp_torchrun", "ddp_spawn"]), ("ddp_torchrn", ["ddp_torchrun"]), ("fsdp2", ["fsdp"])],
)
def test_misspelled_recipe_suggests_similar_names(
    misspelled: str, expected: list[str], run_main: Any, run_refused: Any
) -> None:
    """The message names the similar recipes, not all 47."""
    _, recipe_list, _ = run_main("new", "--list")
    names = [line.split()[0] for line in recipe_list.splitlines() if line.strip()]
    line = run_refused("new", misspelled)
    for name in expected:
        assert name in line
    assert "did you mean" in line
    assert sum(1 for name in names if re.search(rf"\b{name}\b", line)) < 15


def test_help_command_lists_all_commands(run_main: Any) -> None:
    status, out, err = run_main("help")
    assert status == 0, err
    assert "usage:" in out
    assert all(name in out for name in COMMANDS if name not in ("help", "version"))
    assert err == ""


def test_help_command_prints_the_help_of_a_command(run_main: Any) -> None:
    status, out, err = run_main("help", "train")
    assert status == 0, err
    assert "everyrank train" in out
    assert "--layout" in out


def test_help_of_misspelled_command_suggests_the_right_command(run_refused: Any) -> None:
    assert re.search(r"did you mean [^?]*\btrain\b", run_refused("help", "trian"))


def test_version_command_equals_the_version_flag(run_main: Any) -> None:
    status, out, err = run_main("version")
    assert status == 0, err
    assert __version__ in out
    assert (0, out) == run_main("--version")[:2]


def test_everyrank_without_arguments_prints_the_help(run_main: Any) -> None:
    status, out, err = run_main()
    assert status == 0, err
    assert "usage:" in out
    assert "train" in out
    assert err == ""


def test_pipeline_without_blocks_gets_an_example(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WORKLOAD)
    result = cli(tmp_path, "train", "mine.py", "--layout", "pipeline", "--processes", "2", "--out", "out")
    assert result.status == 2
    assert re.search(r"blocks=[\"']\w+", result.err.strip().splitlines()[-1])
