"""Invalid command lines and workloads: the exit status, and the one line of the error.

Exit status: 0 success; 1 a check failed; 2 invalid arguments or workload; 3 this machine cannot run the requested
layout, device or backend; 4 the run failed.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from everyrank import EveryrankError, Launch, Layout, run
from everyrank.cli import main
from everyrank.workload import Source
from processes import Cli, only_error_line, rank_environment

WORKLOAD = '''\
"""A small workload; what a test changes stands between its functions and its end."""
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from everyrank import Workload

SAMPLES = 16


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model():
    return nn.Linear(3, 2)


def train_data():
    return TensorDataset(random(0, SAMPLES, 3), random(1, SAMPLES, 2))


def loss(output, target):
    return ((output - target) ** 2).sum(), target.numel()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


CHANGES
workload = Workload(
    name="mine", model=model, train_data=train_data, loss=loss, optimizer=optimizer, global_batch=4, steps=6
)
'''


def write_workload(folder: Path, changes: str = "") -> Path:
    path = folder / "my_workload.py"
    path.write_text(WORKLOAD.replace("CHANGES", changes), encoding="utf-8")
    return path


def line_of_mark(path: Path) -> int:
    """Return the number of the line that ends in `# here`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith("# here"))


def error_line(stderr: str, folder: Path, frames: bool = False) -> str:
    """Return the one line of the error.

    With `frames`, the line before it names a log with the traceback of the user code.
    """
    lines = stderr.splitlines()
    if frames:
        assert len(lines) == 2, stderr
        assert lines[0].startswith("full traceback: ")
        log = folder / lines.pop(0).removeprefix("full traceback: ")
        assert "Traceback" in log.read_text(encoding="utf-8")
        assert "my_workload.py" in log.read_text(encoding="utf-8")
    return only_error_line("\n".join(lines)).removeprefix("everyrank: ")


IN_PROCESS = 0  # as the number of ranks: this process is the only rank, as if a launcher had started it


@pytest.fixture
def fails(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, str]]]:
    """A function that trains an invalid workload on this many ranks, and returns the exit status and the error."""

    def train_in_process(path: Path) -> tuple[int, str]:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        launcher_variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        other_variables = {"MASTER_ADDR": "127.0.0.1", "TORCHINDUCTOR_CACHE_DIR": tmp_path}
        for name, value in {**launcher_variables, **other_variables}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with pytest.raises(EveryrankError) as error:
            run(Source(str(path)), Layout("single"), Launch(device="cpu"), show=False)
        return error.value.exit_status, str(error.value)

    def call(path: Path, processes: int, frames: bool = False) -> tuple[int, str]:
        if processes == IN_PROCESS:
            status, line = train_in_process(path)
            assert "\n" not in line
            return status, line
        arguments = ["--layout", "ddp", "--processes", str(processes)] if processes > 1 else []
        ended = cli(tmp_path, "train", path.name, *arguments)
        return ended.status, error_line(ended.err, tmp_path, frames)

    yield call
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in [name for name in sys.modules if "my_workload" in name]:
        del sys.modules[name]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """A function that runs a refused command and returns the error. Starting any process fails the test."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started for a call that is wrong")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", start)

    def call(*arguments: str, status: int = 2) -> str:
        assert main(arguments) == status
        captured = capsys.readouterr()
        assert captured.out == ""
        return error_line(captured.err, tmp_path)

    yield call
    signal.signal(signal.SIGTERM, before)


INVALID_COMMANDS = [
    # unknown layouts and keys
    ("train digits --layout dpd", ["'dpd'", "did you mean ddp", "give one of"]),
    ("verify digits --layout ddp nosuch", ["'nosuch'", "give one of"]),
    ("bench digits --layout nosuch", ["'nosuch'", "give one of"]),
    ("train digits --layout ddp:nosuch=3", ["'nosuch'", "accumulate"]),
    ("train digits --layout ddp:accumlate=3", ["accumlate", "did you mean accumulate"]),
    ("train digits --layout ddp:accumulate=x", ["accumulate=x", "whole number"]),
    # degrees
    ("train digits --layout fsdp:shard=3 --processes 2", ["fsdp:shard=3", "= 3", "2 processes", "--processes 3"]),
    ("verify digits --layout fsdp:shard=3 --processes 2", ["fsdp:shard=3", "= 3", "2 processes", "--processes 3"]),
    ("bench digits --layout ddp:replicate=4 --processes 2", ["ddp:replicate=4", "= 4", "2 processes"]),
    # numbers
    ("train digits --processes 0", ["--processes 0", "at least 1"]),
    ("train digits --layout ddp --processes 0", ["--processes 0", "at least 1"]),
    ("verify digits --processes 0", ["--processes 0", "at least 1"]),
    ("bench digits --processes 2 4", ["--processes 2 4", "begin with 1"]),
    ("bench digits --processes 1 4 2", ["--processes 1 4 2", "begin with 1"]),
    ("bench digits --processes 1 0", ["--processes 1 0"]),
    ("bench digits --processes -2", ["--processes -2", "at least 1"]),
    ("doctor --processes -3", ["--processes -3", "at least 1"]),
    ("train digits --processes two", ["--processes", "'two'"]),
    ("train digits --steps 0", ["--steps 0", "at least 1"]),
    ("verify digits --steps 0", ["--steps 0", "at least 1"]),
    ("bench digits --steps -1", ["--steps -1", "at least 1"]),
    ("bench digits --trials 0", ["--trials 0", "at least 1"]),
    ("train digits --epochs 0", ["--epochs 0", "at least 1"]),
    ("train digits --workers -1", ["--workers -1", "0 or more"]),
    ("train digits --timeout 0", ["--timeout 0", "more than 0"]),
    ("train digits --timeout nan", ["--timeout nan", "more than 0"]),
    # choices
    ("train digits --device gpu", ["--device gpu", "cpu or cuda"]),
    ("train digits --backend ucc", ["--backend ucc", "shm, gloo, nccl, mpi"]),
    ("train digits --launcher ssh", ["--launcher ssh", "spawn, torchrun"]),
    # settings
    ("train digits --set lr", ["--set lr", "key=value"]),
    # commands and flags
    ("nosuch", ["'nosuch'", "--help"]),
    ("train", ["WORKLOAD", "--help"]),
    ("train digits --nosuch 3", ["--nosuch", "--help"]),
    ("train digits --steps", ["--steps", "--help"]),
    ("new nosuch", ["'nosuch'", "everyrank new --list"]),
    ("report", ["RECORDS.json", "--help"]),
    ("report nosuch.json", ["nosuch.json", "No such file"]),
]


@pytest.mark.parametrize(
    ("command", "fragments"), INVALID_COMMANDS, ids=[command or "nothing" for command, _ in INVALID_COMMANDS]
)
def test_invalid_command_is_refused(refused: Callable[..., str], command: str, fragments: list[str]) -> None:
    """Exit status 2, and one line with the value, the rule and the fix. No rank is started."""
    line = refused(*command.split())
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize("command", ["checkpoint inspect", "train digits --resume", "train digits --out"])
def test_file_name_that_is_too_long_is_refused(refused: Callable[..., str], command: str) -> None:
    """The exit status is 2."""
    assert "File name too long" in refused(*command.split(), "a" * 300)


@pytest.mark.parametrize("content", ["", "[1]", "[]", "{}", '[{"schema": 99}]', "[" * 200_000])
def test_report_of_a_file_without_records_is_refused(refused: Callable[..., str], tmp_path: Path, content: str) -> None:
    """The error names the file."""
    (tmp_path / "foreign.json").write_text(content)
    assert "foreign.json" in refused("report", "foreign.json")


NOT_WRITABLE = ["a_file/below", "a_file", "/proc/nosuch/below", "/dev/null/below"]


@pytest.mark.parametrize("path", NOT_WRITABLE)
def test_out_that_cannot_be_written_is_refused(refused: Callable[..., str], tmp_path: Path, path: str) -> None:
    """The error comes before the training."""
    (tmp_path / "a_file").write_text("mine")
    line = refused("train", "digits", "--out", path)
    assert path in line
    assert "cannot be written" in line
    assert (tmp_path / "a_file").read_text() == "mine"


@pytest.mark.parametrize(
    "command",
    [
        *(
            "train digits --json",
            "train digits --profile",
            "doctor --json",
            "verify digits --json",
            "bench digits --json",
            "bench digits --html",
        ),
        *("bench digits --markdown", "report records.json --html", "report records.json --markdown", "new single"),
    ],
)
@pytest.mark.parametrize("path", ["a_file/below.x", "/proc/nosuch/below.x", "a_folder"])
def test_output_file_that_cannot_be_written_is_refused(
    refused: Callable[..., str], tmp_path: Path, command: str, path: str
) -> None:
    """The path is in a file, in a missing folder, or is a folder."""
    (tmp_path / "a_file").write_text("mine")
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "records.json").write_text("[]")
    line = refused(*command.split(), path)
    assert path in line


def test_new_does_not_overwrite_a_file(refused: Callable[..., str], tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "mine.py").write_text("mine")
    line = refused("new", "single", "mine.py")
    assert "mine.py" in line
    assert "exists" in line
    assert (tmp_path / "mine.py").read_text() == "mine"


WORKLOADS_THAT_CANNOT_BE_LOADED = {
    # command, text of my_workload.py (None: no file), fragments of the error, whether a traceback is logged
    "unknown name": ("train digit", None, ["'digit'", "did you mean digits", ".py"], False),
    "unknown setting": ("train digits --set colour=red", None, ["colour=red", "lr"], False),
    "setting that is refused": ("train digits --set batch=0", None, ["global_batch=0", "whole number"], False),
    "two lengths": ("train digits --epochs 1 --steps 2", None, ["epochs", "1", "steps", "2", "one of the two"], False),
    "without workload": (
        "train my_workload.py",
        "x = 1\n",
        ["my_workload.py", "everyrank audit my_workload.py", "everyrank new workload"],
        False,
    ),
    "raises on import": (
        "train my_workload.py",
        "\n\n\n\n\n\n\n\n\n\n\nraise RuntimeError('boom')\nworkload = 1\n",
        ["my_workload.py:12 in <module>: RuntimeError: boom"],
        True,
    ),
    "exits on import": (
        "train my_workload.py",
        "raise SystemExit(1)\nworkload = 1\n",
        ["my_workload.py:1", "SystemExit"],
        True,
    ),
}


@pytest.mark.parametrize("case", WORKLOADS_THAT_CANNOT_BE_LOADED)
def test_workload_that_cannot_be_loaded(cli: Cli, tmp_path: Path, case: str) -> None:
    """Exit status 2 and one line, although a rank imports the file."""
    command, text, fragments, frames = WORKLOADS_THAT_CANNOT_BE_LOADED[case]
    if text is not None:
        (tmp_path / "my_workload.py").write_text(text)
    if frames:
        ended = cli(tmp_path, *command.split())
        status_and_output = (ended.status, ended.out, ended.err)
    else:  # the same command in a rank that starts faster
        ended_on_rank = cli.on_ranks(tmp_path, *command.split())
        status_and_output = (ended_on_rank.status, ended_on_rank.out, ended_on_rank.err)
    assert status_and_output[:2] == (2, "")
    line = error_line(status_and_output[2], tmp_path, frames)
    for fragment in fragments:
        assert fragment in line


RAISES = {
    # changes to the file, the error after file and line number, number of ranks
    "model": ("def model():\n    raise RuntimeError('boom')  # here\n", "model: RuntimeError: boom", 2),
    "loss": ("def loss(output, target):\n    return 1 // 0, 1  # here\n", "loss: ZeroDivisionError", 2),
    "dataset": (
        "class Data(Dataset):\n"
        "    def __len__(self):\n        return 16\n"
        "    def __getitem__(self, index):\n        raise KeyError('no such image')  # here\n"
        "train_data = Data\n",
        "__getitem__: KeyError: 'no such image'",
        2,
    ),
    "optimizer": (
        "def optimizer(model):\n    raise ValueError('boom')  # here\n",
        "optimizer: ValueError: boom",
        IN_PROCESS,
    ),
    "forward": (
        "class Model(nn.Linear):\n"
        "    def forward(self, x):\n        raise RuntimeError('many\\nlines')  # here\n"
        "def model():\n    return Model(3, 2)\n",
        "forward: RuntimeError: many",
        IN_PROCESS,
    ),
}


@pytest.mark.parametrize("case", RAISES)
def test_exception_in_user_code_names_its_line(
    fails: Callable[..., tuple[int, str]], tmp_path: Path, case: str
) -> None:
    """All ranks raise in the first update, so the exit status is that of an invalid workload."""
    changes, expected, processes = RAISES[case]
    path = write_workload(tmp_path, changes)
    status, line = fails(path, processes, frames=True)
    assert status == 2, line
    assert f"my_workload.py:{line_of_mark(path)} in {expected}" in line


def test_exception_in_a_loader_worker_names_its_line(cli: Cli, tmp_path: Path) -> None:
    """torch sends the traceback of a loader worker as text. The line is parsed from it."""
    changes, expected, _ = RAISES["dataset"]
    path = write_workload(tmp_path, changes)
    ended = cli(tmp_path, "train", path.name, "--workers", "1")
    assert ended.status == 2, ended.err
    line = error_line(ended.err, tmp_path, frames=True)
    assert f"my_workload.py:{line_of_mark(path)} in {expected}" in line


DATASET_WITH_LENGTH = (
    "class Data(TensorDataset):\n    def __len__(self):\n        return {}\ntrain_data = lambda: Data(torch.zeros(4))\n"
)

INVALID_WORKLOADS = {
    # changes to the file, fragments of the error, number of ranks
    "bare tensor": ("def loss(output, target):\n    return output.sum()\n", ["loss", "sum", "number of terms"], 1),
    "sum with dimensions": (
        "def loss(output, target):\n    return output, 4\n",
        ["loss", "sum", "dimensions"],
        IN_PROCESS,
    ),
    "no module": ("def model():\n    return 'a model'\n", ["model()", "str", "nn.Module"], IN_PROCESS),
    "no optimizer": ("def optimizer(model):\n    return None\n", ["optimizer()", "NoneType", "Optimizer"], IN_PROCESS),
    "no terms": ("def loss(output, target):\n    return output.sum() * 0, 0\n", ["loss", "0 terms"], 2),
    "too few samples": ("SAMPLES = 1\n", ["2 ranks", "1 sample", "--processes 1"], 2),
    "parameters of another model": (
        "other = nn.Linear(3, 2)\ndef optimizer(model):\n"
        "    return torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.01)\n",
        ["optimizer()", "2 parameters that are not the model's"],
        IN_PROCESS,
    ),
    "no parameters": (
        "def optimizer(model):\n"
        "    made = torch.optim.SGD(model.parameters(), lr=0.01)\n    made.param_groups.clear()\n    return made\n",
        ["optimizer()", "no parameters", "model.parameters()"],
        IN_PROCESS,
    ),
    "a length below zero": (DATASET_WITH_LENGTH.format("-1"), ["train_data", "has no length", ">= 0"], IN_PROCESS),
    "a length that does not fit": (DATASET_WITH_LENGTH.format("10**30"), ["train_data", "has no length"], IN_PROCESS),
    "a seed of 70 bits": (
        "import functools\nWorkload = functools.partial(Workload, seed=2**70)\n",
        ["seed=1180591620717411303424"],
        IN_PROCESS,
    ),
    "no samples": ("SAMPLES = 0\n", ["train_data", "empty"], IN_PROCESS),
    "no pairs": (
        "def train_data():\n    return TensorDataset(torch.zeros(16, 3))\n",
        ["train_data", "(input, target)"],
        IN_PROCESS,
    ),
    "no dataset": ("def train_data():\n    return iter([])\n", ["train_data", "__len__"], IN_PROCESS),
}


@pytest.mark.parametrize("case", INVALID_WORKLOADS)
def test_invalid_workload_is_refused(fails: Callable[..., tuple[int, str]], tmp_path: Path, case: str) -> None:
    """Return values of its functions are checked at first use. The error names the rule, though no user code raised."""
    changes, fragments, processes = INVALID_WORKLOADS[case]
    status, line = fails(write_workload(tmp_path, changes), processes)
    assert status == 2, line
    for fragment in fragments:
        assert fragment in line


MODEL_WITH_NAN = """
class Middle(nn.Module):
    calls = 0

    def forward(self, x):
        Middle.calls += 1
        return x * float("nan") if {condition} else x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 3), Middle(), nn.Linear(3, 2)

    def forward(self, x):
        {before}
        return self.last(self.middle(self.first(x)))

model = Model
"""

NAN_CASES = {
    # changes to the file, update, name of the first bad tensor, number of ranks
    "from a forward pass on": (MODEL_WITH_NAN.format(condition="Middle.calls >= 4", before=""), 3, "middle", 2),
    # activations are not kept: a NaN that does not recur when the forward pass runs again cannot be located
    "in one forward pass": (
        MODEL_WITH_NAN.format(condition="Middle.calls == 4", before=""),
        3,
        "run again",
        IN_PROCESS,
    ),
    "on rank 1 alone": (
        # rank 0 has no NaN, and it reaches the check first
        MODEL_WITH_NAN.format(
            condition="Middle.calls >= 4 and dist.get_rank() == 1",
            before="time.sleep(0.3 * (Middle.calls >= 4 and dist.get_rank() == 1))",
        ),
        3,
        "middle",
        2,
    ),
    "the loss": ("def loss(output, target):\n    return (output * 0).sum() / 0, 4\n", 0, "loss", IN_PROCESS),
    "the input": (
        "def train_data():\n    return TensorDataset(torch.full((16, 3), float('nan')), torch.zeros(16, 2))\n",
        0,
        "input",
        IN_PROCESS,
    ),
    "a parameter": (
        "def optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=float('nan'))\n",
        1,
        "parameter weight",
        IN_PROCESS,
    ),
}


@pytest.mark.parametrize("case", NAN_CASES)
def test_nan_loss_names_update_and_first_bad_tensor(
    fails: Callable[..., tuple[int, str]], tmp_path: Path, case: str
) -> None:
    """The exit status is 4."""
    changes, update, tensor, processes = NAN_CASES[case]
    status, line = fails(write_workload(tmp_path, changes), processes)
    assert status == 4, line
    assert f"update {update}:" in line
    assert "nan" in line.lower()
    tensor_text = line.partition("first bad tensor")[2]
    assert re.search(rf"\b{tensor}\b", tensor_text), line
    if tensor != "loss":
        assert "the loss itself" not in tensor_text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_missing_cuda_device(cli: Cli, tmp_path: Path) -> None:
    """Exit status 3: the arguments are valid, but this machine has no such device."""
    ended = cli(tmp_path, "train", "digits", "--device", "cuda")
    line = error_line(ended.err, tmp_path)
    assert "--device cuda" in line
    assert "--device cpu" in line
    assert ended.status == 3


LOCAL_MEAN = """
def train_data():
    kept = torch.arange(SAMPLES) % 4 != 0  # ragged: the ranks' slices keep different numbers
    return TensorDataset(random(0, SAMPLES, 3), torch.cat([random(1, SAMPLES, 2), kept[:, None]], dim=1))

def loss(output, target):
    kept = target[:, 2]
    return (((output - target[:, :2]) ** 2).sum(1) * kept).sum() / kept.sum(), 1
"""


def test_verify_names_local_mean_as_the_cause(cli: Cli, tmp_path: Path) -> None:
    """The loss is a mean over local terms, and ranks have different numbers of terms. The exit status is 1."""
    path = write_workload(tmp_path, LOCAL_MEAN)
    ended = cli(tmp_path, "verify", path.name, "--layout", "ddp", "--json", "records.json")
    assert ended.status == 1
    line = error_line(ended.err, tmp_path)
    assert "ddp" in line
    [record] = json.loads((tmp_path / "records.json").read_text())
    assert record["parity"]["status"] == "different"
    assert "local mean" in record["parity"]["cause"]
    assert record["parity"]["first_divergence"].startswith("update 0")
    assert "DIFFERENT" in ended.out
    assert "local mean" in ended.out


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="dataparallel can run here")
def test_layout_that_cannot_run_does_not_stop_the_others(cli: Cli, tmp_path: Path) -> None:
    """ddp is checked. The row of dataparallel gives its requirement, and the exit status is 3."""
    command = "verify digits --layout dataparallel ddp --steps 3 --set width=4 --json records.json"
    ended = cli(tmp_path, *command.split())
    line = error_line(ended.err, tmp_path)
    assert "dataparallel" in line
    assert "needs 2 CUDA devices" in line
    assert ended.status == 3
    records = json.loads((tmp_path / "records.json").read_text())
    parities = {record["layout"]: record["parity"] for record in records}
    assert parities["ddp"]["status"] == "equal"
    assert parities["dataparallel"]["status"] == "not_verified"
    assert "needs 2 CUDA devices" in parities["dataparallel"]["reason"]
    assert re.search(r"ddp\s+2\s+equal", ended.out)
    assert "dataparallel: not verified here: " in ended.out


def test_valid_workload_trains_without_errors(cli: Cli, tmp_path: Path) -> None:
    """Exit status 0, nothing on stderr, and the requested files are written."""
    path = write_workload(tmp_path)
    ended = cli(tmp_path, "train", str(path), "--layout", "ddp", "--processes", "2", "--out", "out", "--json", "r.json")
    assert ended.err == ""
    assert ended.status == 0
    assert (tmp_path / "out" / "log.jsonl").exists()
    [record] = json.loads((tmp_path / "r.json").read_text())
    assert record["world_size"] == 2
    assert len(record["loss"]) == 6


# --- signals


@pytest.mark.parametrize(("number", "status", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_prints_the_signal(
    rank: int,
    number: str,
    status: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An external launcher sends the signal to each rank, and all ranks share a terminal."""

    def send_signal(*_: object) -> None:
        os.kill(os.getpid(), getattr(signal, number))

    def raise_exit(status: int) -> None:
        raise SystemExit(status)

    before = signal.getsignal(signal.SIGTERM)
    for name, value in {**rank_environment(rank, "1"), "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("everyrank.cli.dry_run_or_submit", send_signal)
    monkeypatch.setattr(os, "_exit", raise_exit)
    try:
        with pytest.raises(SystemExit) as system_exit:
            main(["train", "digits"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert system_exit.value.code == status
    assert capsys.readouterr().err == ("" if rank else f"everyrank: {word}; all ranks are ended\n")
