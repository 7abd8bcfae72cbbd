"""Every mistake one can make at the command line: its exit status, and the one line that is read.

0 all held; 1 a check failed; 2 the call or the workload is wrong; 3 what was asked for by name cannot run here;
4 the run failed.
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
from processes import Cli, by_hand, one_line

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


def here(path: Path) -> int:
    """The number of the line that ends in `# here`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith("# here"))


def the_line(stderr: str, folder: Path, frames: bool = False) -> str:
    """The one line on stderr. With `frames`, the line before it names a log with the person's own frames."""
    lines = stderr.splitlines()
    if frames:
        assert len(lines) == 2, stderr
        assert lines[0].startswith("full traceback: ")
        log = folder / lines.pop(0).removeprefix("full traceback: ")
        assert "Traceback" in log.read_text(encoding="utf-8")
        assert "my_workload.py" in log.read_text(encoding="utf-8")
    return one_line("\n".join(lines)).removeprefix("everyrank: ")


HERE = 0  # instead of a number of ranks: this process is the only rank, as if somebody had started it as one


@pytest.fixture
def fails(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, str]]]:
    """Train a workload file that is wrong, on so many ranks: the exit status and the line."""

    def train_here(path: Path) -> tuple[int, str]:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        started = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        for name, value in {**started, "MASTER_ADDR": "127.0.0.1", "TORCHINDUCTOR_CACHE_DIR": tmp_path}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with pytest.raises(EveryrankError) as caught:
            run(Source(str(path)), Layout("single"), Launch(device="cpu"), show=False)
        return caught.value.exit_status, str(caught.value)

    def call(path: Path, processes: int, frames: bool = False) -> tuple[int, str]:
        if processes == HERE:
            status, line = train_here(path)
            assert "\n" not in line
            return status, line
        words = ["--layout", "ddp", "--processes", str(processes)] if processes > 1 else []
        ran = cli(tmp_path, "train", path.name, *words)
        return ran.status, the_line(ran.err, tmp_path, frames)

    yield call
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in [name for name in sys.modules if "my_workload" in name]:
        del sys.modules[name]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Calls that are refused before any process is started: the line. Whoever starts one fails the test."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started for a call that is wrong")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", start)

    def call(*words: str, status: int = 2) -> str:
        assert main(words) == status
        shown = capsys.readouterr()
        assert shown.out == ""
        return the_line(shown.err, tmp_path)

    yield call
    signal.signal(signal.SIGTERM, before)


CALLS = [
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
    # words
    ("nosuch", ["'nosuch'", "--help"]),
    ("train", ["WORKLOAD", "--help"]),
    ("train digits --nosuch 3", ["--nosuch", "--help"]),
    ("train digits --steps", ["--steps", "--help"]),
    ("new nosuch", ["'nosuch'", "everyrank new --list"]),
    ("report", ["RECORDS.json", "--help"]),
    ("report nosuch.json", ["nosuch.json", "No such file"]),
]


@pytest.mark.parametrize(("words", "fragments"), CALLS, ids=[words or "nothing" for words, _ in CALLS])
def test_a_wrong_call(refused: Callable[..., str], words: str, fragments: list[str]) -> None:
    """Status 2, and one line with the value, the rule and the fix; no rank was started to find it."""
    line = refused(*words.split())
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize("words", ["checkpoint inspect", "train digits --resume", "train digits --out"])
def test_a_name_that_is_too_long(refused: Callable[..., str], words: str) -> None:
    """It is the call that is wrong."""
    assert "File name too long" in refused(*words.split(), "a" * 300)


@pytest.mark.parametrize("content", ["", "[1]", "[]", "{}", '[{"schema": 99}]', "[" * 200_000])
def test_a_report_of_no_records(refused: Callable[..., str], tmp_path: Path, content: str) -> None:
    """A foreign file is refused by name."""
    (tmp_path / "foreign.json").write_text(content)
    assert "foreign.json" in refused("report", "foreign.json")


NOT_WRITABLE = ["a_file/below", "a_file", "/proc/nosuch/below", "/dev/null/below"]


@pytest.mark.parametrize("place", NOT_WRITABLE)
def test_an_out_that_cannot_be_written(refused: Callable[..., str], tmp_path: Path, place: str) -> None:
    """Found out before the training, not after it."""
    (tmp_path / "a_file").write_text("mine")
    line = refused("train", "digits", "--out", place)
    assert place in line
    assert "cannot be written" in line
    assert (tmp_path / "a_file").read_text() == "mine"


@pytest.mark.parametrize(
    "words",
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
@pytest.mark.parametrize("place", ["a_file/below.x", "/proc/nosuch/below.x", "a_folder"])
def test_an_output_file_that_cannot_be_written(
    refused: Callable[..., str], tmp_path: Path, words: str, place: str
) -> None:
    """The same for every other file; a folder is no file."""
    (tmp_path / "a_file").write_text("mine")
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "records.json").write_text("[]")
    line = refused(*words.split(), place)
    assert place in line


def test_a_recipe_is_not_written_over_a_file(refused: Callable[..., str], tmp_path: Path) -> None:
    """`everyrank new` must not take away what somebody wrote."""
    (tmp_path / "mine.py").write_text("mine")
    line = refused("new", "single", "mine.py")
    assert "mine.py" in line
    assert "exists" in line
    assert (tmp_path / "mine.py").read_text() == "mine"


ONE_RANK = {
    # words of the call, text of the file (None: none is written), fragments of the line, whether there are frames
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


@pytest.mark.parametrize("case", ONE_RANK)
def test_a_workload_that_cannot_be_had(cli: Cli, tmp_path: Path, case: str) -> None:
    """Status 2 and one line, though it is a rank that imports the file."""
    words, text, fragments, frames = ONE_RANK[case]
    if text is not None:
        (tmp_path / "my_workload.py").write_text(text)
    if frames:
        ran = cli(tmp_path, *words.split())
        found = (ran.status, ran.out, ran.err)
    else:  # the same words from a rank that starts in no time
        done = cli.on_ranks(tmp_path, *words.split())
        found = (done.status, done.out, done.err)
    assert found[:2] == (2, "")
    line = the_line(found[2], tmp_path, frames)
    for fragment in fragments:
        assert fragment in line


RAISES = {
    # what the file changes, what the line says after file and line, and on how many ranks it is tried
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
    "optimizer": ("def optimizer(model):\n    raise ValueError('boom')  # here\n", "optimizer: ValueError: boom", HERE),
    "forward": (
        "class Model(nn.Linear):\n"
        "    def forward(self, x):\n        raise RuntimeError('many\\nlines')  # here\n"
        "def model():\n    return Model(3, 2)\n",
        "forward: RuntimeError: many",
        HERE,
    ),
}


@pytest.mark.parametrize("case", RAISES)
def test_a_workload_whose_own_code_raises(fails: Callable[..., tuple[int, str]], tmp_path: Path, case: str) -> None:
    """All ranks raise at the first update: the workload is wrong, not the run. File, line and function are named."""
    changes, expected, processes = RAISES[case]
    path = write_workload(tmp_path, changes)
    status, line = fails(path, processes, frames=True)
    assert status == 2, line
    assert f"my_workload.py:{here(path)} in {expected}" in line


def test_a_dataset_that_raises_in_a_loader_process(cli: Cli, tmp_path: Path) -> None:
    """torch sends the traceback of a loader process as text: the place is still found."""
    changes, expected, _ = RAISES["dataset"]
    path = write_workload(tmp_path, changes)
    ran = cli(tmp_path, "train", path.name, "--workers", "1")
    assert ran.status == 2, ran.err
    line = the_line(ran.err, tmp_path, frames=True)
    assert f"my_workload.py:{here(path)} in {expected}" in line


LENGTH = (
    "class Data(TensorDataset):\n    def __len__(self):\n        return {}\ntrain_data = lambda: Data(torch.zeros(4))\n"
)

WRONG = {
    # what the file changes, fragments of the line, and on how many ranks it is tried
    "bare tensor": ("def loss(output, target):\n    return output.sum()\n", ["loss", "sum", "number of terms"], 1),
    "sum with dimensions": ("def loss(output, target):\n    return output, 4\n", ["loss", "sum", "dimensions"], HERE),
    "no module": ("def model():\n    return 'a model'\n", ["model()", "str", "nn.Module"], HERE),
    "no optimizer": ("def optimizer(model):\n    return None\n", ["optimizer()", "NoneType", "Optimizer"], HERE),
    "no terms": ("def loss(output, target):\n    return output.sum() * 0, 0\n", ["loss", "0 terms"], 2),
    "too few samples": ("SAMPLES = 1\n", ["2 ranks", "1 sample", "--processes 1"], 2),
    "parameters of another model": (
        "other = nn.Linear(3, 2)\ndef optimizer(model):\n"
        "    return torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.01)\n",
        ["optimizer()", "2 parameters that are not the model's"],
        HERE,
    ),
    "no parameters": (
        "def optimizer(model):\n"
        "    made = torch.optim.SGD(model.parameters(), lr=0.01)\n    made.param_groups.clear()\n    return made\n",
        ["optimizer()", "no parameters", "model.parameters()"],
        HERE,
    ),
    "a length below zero": (LENGTH.format("-1"), ["train_data", "has no length", ">= 0"], HERE),
    "a length that does not fit": (LENGTH.format("10**30"), ["train_data", "has no length"], HERE),
    "a seed of 70 bits": (
        "import functools\nWorkload = functools.partial(Workload, seed=2**70)\n",
        ["seed=1180591620717411303424"],
        HERE,
    ),
    "no samples": ("SAMPLES = 0\n", ["train_data", "empty"], HERE),
    "no pairs": (
        "def train_data():\n    return TensorDataset(torch.zeros(16, 3))\n",
        ["train_data", "(input, target)"],
        HERE,
    ),
    "no dataset": ("def train_data():\n    return iter([])\n", ["train_data", "__len__"], HERE),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_workload_that_is_wrong(fails: Callable[..., tuple[int, str]], tmp_path: Path, case: str) -> None:
    """What its functions return is checked when it is first seen: status 2, and the rule. No code of theirs raised."""
    changes, fragments, processes = WRONG[case]
    status, line = fails(write_workload(tmp_path, changes), processes)
    assert status == 2, line
    for fragment in fragments:
        assert fragment in line


MIDDLE = """
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

NOT_A_NUMBER = {
    # what the file changes, the update, what of the first bad tensor has to be named, on how many ranks it is tried
    "from a forward pass on": (MIDDLE.format(condition="Middle.calls >= 4", before=""), 3, "middle", 2),
    # nothing is kept in case it is needed: what does not come back when the pass runs again cannot be named
    "in one forward pass": (MIDDLE.format(condition="Middle.calls == 4", before=""), 3, "run again", HERE),
    "on rank 1 alone": (
        # rank 0, where nothing is wrong, is also the first that could speak
        MIDDLE.format(
            condition="Middle.calls >= 4 and dist.get_rank() == 1",
            before="time.sleep(0.3 * (Middle.calls >= 4 and dist.get_rank() == 1))",
        ),
        3,
        "middle",
        2,
    ),
    "the loss": ("def loss(output, target):\n    return (output * 0).sum() / 0, 4\n", 0, "loss", HERE),
    "the input": (
        "def train_data():\n    return TensorDataset(torch.full((16, 3), float('nan')), torch.zeros(16, 2))\n",
        0,
        "input",
        HERE,
    ),
    "a parameter": (
        "def optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=float('nan'))\n",
        1,
        "parameter weight",
        HERE,
    ),
}


@pytest.mark.parametrize("case", NOT_A_NUMBER)
def test_a_loss_that_becomes_nan(fails: Callable[..., tuple[int, str]], tmp_path: Path, case: str) -> None:
    """Status 4; the update and the first bad tensor are named, and it is the right one."""
    changes, update, tensor, processes = NOT_A_NUMBER[case]
    status, line = fails(write_workload(tmp_path, changes), processes)
    assert status == 4, line
    assert f"update {update}:" in line
    assert "nan" in line.lower()
    named = line.partition("first bad tensor")[2]
    assert re.search(rf"\b{tensor}\b", named), line
    if tensor != "loss":
        assert "the loss itself" not in named


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_here(cli: Cli, tmp_path: Path) -> None:
    """Status 3: the call is right, the machine cannot."""
    ran = cli(tmp_path, "train", "digits", "--device", "cuda")
    line = the_line(ran.err, tmp_path)
    assert "--device cuda" in line
    assert "--device cpu" in line
    assert ran.status == 3


LOCAL_MEAN = """
def train_data():
    kept = torch.arange(SAMPLES) % 4 != 0  # ragged: the ranks' slices keep different numbers
    return TensorDataset(random(0, SAMPLES, 3), torch.cat([random(1, SAMPLES, 2), kept[:, None]], dim=1))

def loss(output, target):
    kept = target[:, 2]
    return (((output - target[:, :2]) ** 2).sum(1) * kept).sum() / kept.sum(), 1
"""


def test_a_local_mean_is_convicted(cli: Cli, tmp_path: Path) -> None:
    """Averages of averages: it trains, and to another result. Status 1, and the cause is named."""
    path = write_workload(tmp_path, LOCAL_MEAN)
    ran = cli(tmp_path, "verify", path.name, "--layout", "ddp", "--json", "records.json")
    assert ran.status == 1
    line = the_line(ran.err, tmp_path)
    assert "ddp" in line
    [record] = json.loads((tmp_path / "records.json").read_text())
    assert record["parity"]["status"] == "different"
    assert "local mean" in record["parity"]["cause"]
    assert record["parity"]["first_divergence"].startswith("update 0")
    assert "DIFFERENT" in ran.out
    assert "local mean" in ran.out


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="dataparallel can run here")
def test_what_cannot_run_here_does_not_stop_the_rest(cli: Cli, tmp_path: Path) -> None:
    """Status 3 after the ddp row was checked; the row that could not run says what it needs."""
    words = "verify digits --layout dataparallel ddp --steps 3 --set width=4 --json records.json"
    ran = cli(tmp_path, *words.split())
    line = the_line(ran.err, tmp_path)
    assert "dataparallel" in line
    assert "needs 2 CUDA devices" in line
    assert ran.status == 3
    records = json.loads((tmp_path / "records.json").read_text())
    parities = {record["layout"]: record["parity"] for record in records}
    assert parities["ddp"]["status"] == "equal"
    assert parities["dataparallel"]["status"] == "not_verified"
    assert "needs 2 CUDA devices" in parities["dataparallel"]["reason"]
    assert re.search(r"ddp\s+2\s+equal", ran.out)
    assert "dataparallel: not verified here: " in ran.out


def test_all_held(cli: Cli, tmp_path: Path) -> None:
    """Status 0 and nothing on stderr: what the others are held against. Also that it writes what it says."""
    path = write_workload(tmp_path)
    ran = cli(tmp_path, "train", str(path), "--layout", "ddp", "--processes", "2", "--out", "out", "--json", "r.json")
    assert ran.err == ""
    assert ran.status == 0
    assert (tmp_path / "out" / "log.jsonl").exists()
    [record] = json.loads((tmp_path / "r.json").read_text())
    assert record["world_size"] == 2
    assert len(record["loss"]) == 6


# --- signals


@pytest.mark.parametrize(("number", "status", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_all_ranks_one_says_what_ended_them(
    rank: int,
    number: str,
    status: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A launcher outside passes a signal on to each rank, and they share a screen."""

    def end(*_: object) -> None:
        os.kill(os.getpid(), getattr(signal, number))

    def leave(status: int) -> None:
        raise SystemExit(status)

    before = signal.getsignal(signal.SIGTERM)
    for name, value in {**by_hand(rank, "1"), "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("everyrank.cli.dry_run_or_submit", end)
    monkeypatch.setattr(os, "_exit", leave)
    try:
        with pytest.raises(SystemExit) as left:
            main(["train", "digits"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == status
    assert capsys.readouterr().err == ("" if rank else f"everyrank: {word}; all ranks are ended\n")
