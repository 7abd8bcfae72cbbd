"""The recipes over RPC: what they have in common, and those whose network no built-in workload has.

A worker of theirs is forked, as a rank of the others is: RPC starts its threads in the process that calls it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest

import recipes.test_recipes as shared
from everyrank.launch.host_info import usable_interfaces
from processes import Cli
from recipes.test_recipes import RECIPES, _forked_programs, beside, distance, read, text_of, typed

pytestmark = pytest.mark.integration

__all__ = ["_forked_programs"]

RPC = ["ddp_rpc", "rpc_autograd", "rpc_batched", "rpc_pipeline", "rpc_reinforcement", "rpc_rnn"]

WORKLOADS = {
    "ddp_rpc": """
import torch, torch.nn.functional as F
import ddp_rpc as recipe
from everyrank import Workload

def model():
    table, dense = recipe.build()
    table.sparse = False  # the same gradient, with its zeros
    return torch.nn.Sequential(table, dense)

def optimizer(model):
    of_dense = {"params": list(model[1].parameters()), "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    return torch.optim.SGD([{"params": list(model[0].parameters())}, of_dense], lr=0.3)

workload = Workload(
    name="bags", model=model, train_data=lambda: recipe.load()[0], eval_data=lambda: recipe.load()[1],
    loss=lambda output, target: (F.cross_entropy(output, target, reduction="sum"), len(target)),
    metrics={"top1": lambda output, target: ((output.argmax(1) == target).sum(), len(target))},
    optimizer=optimizer, global_batch=64, epochs=2)
""",
    "rpc_rnn": """
import torch, torch.nn.functional as F
from torch.utils.data import TensorDataset
import rpc_rnn as recipe
from everyrank import Workload

class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = recipe.build()

    def forward(self, inputs):
        output, _ = self.parts["lstm"](self.parts["embedding"](inputs))
        return self.parts["decoder"](output)

workload = Workload(
    name="bytes", model=Whole, train_data=lambda: recipe.load(False),
    eval_data=lambda: TensorDataset(*recipe.load(True)[:200]),
    loss=lambda output, target: (F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"),
        target.numel()),
    metrics={"top1": lambda output, target: ((output.argmax(-1) == target).sum(), target.numel())},
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
    global_batch=recipe.BATCH, steps=recipe.UPDATES)
""",
}
IN_ONE_PROCESS = """
import torch
import rpc_reinforcement as recipe

class Here:
    def __init__(self, agent):
        self.agent = agent
    def rpc_sync(self):
        return self.agent

agent = recipe.Agent(torch.float64)
observers = [recipe.Observer(index) for index in range(recipe.OBSERVERS)]
for update in range(recipe.UPDATES):
    agent.start_update(update)
    rewards = [observer.run_episode(Here(agent)) for observer in observers]
    print(f"update {update} reward {sum(map(sum, rewards)) / recipe.OBSERVERS}")
    print(f"update {update} loss {agent.learn(rewards)}")
"""
MUTATIONS = [
    ("ddp_rpc", "lr=0.3 / TRAINERS", "lr=0.3"),  # as if somebody averaged these, too
    ("ddp_rpc", "[loss * TRAINERS]", "[loss]"),
    ("ddp_rpc", "logits = ddp(", "logits = dense("),  # past the wrapper: no gradient is sent
    ("rpc_rnn", "for part in (embedding, decoder):", "for part in (decoder,):"),
    ("rpc_rnn", "+= rpc.rpc_sync(part.owner(), refer_to_parameters, (part,))", "= parameters"),  # those here alone
]


def printed(folder: Path, name: str, text: str = "") -> str:
    """What the recipe prints, started by the command in its header."""
    beside(folder, name, text)
    (command,) = shared.in_float64(text or text_of(name))
    return typed(folder, command).stdout


def mutated(name: str, before: str, after: str) -> str:
    text = text_of(name)
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    return text.replace(before, after)


@cache
def library(cli: Cli, name: str) -> shared.Record:
    """The same training in one process by the library, of the script's own network and data."""
    with tempfile.TemporaryDirectory() as folder:
        beside(Path(folder), name)
        (Path(folder) / "workload.py").write_text(WORKLOADS[name])
        return shared.train_workload(cli, Path(folder), "single:precision=float64", size=1)


@pytest.mark.parametrize(("name", "before", "after"), MUTATIONS)
def test_mutation_differs(cli: Cli, tmp_path: Path, name: str, before: str, after: str) -> None:
    assert distance(read(printed(tmp_path, name, mutated(name, before, after))), library(cli, name)) > 1e-9


WEIGHTS = """
import contextlib, threading
from concurrent.futures import ThreadPoolExecutor
import torch, rpc_rnn as recipe
names = "embedding", "decoder"
right = [recipe.make_part(name, torch.float64).state_dict() for name in names]
both, manual_seed = threading.Barrier(2), torch.manual_seed

def seed_and_wait(seed):  # until the other has seeded, too, or cannot
    manual_seed(seed)
    with contextlib.suppress(threading.BrokenBarrierError):
        both.wait(1.0)

torch.manual_seed = seed_and_wait
with ThreadPoolExecutor(2) as pool:
    made = pool.map(recipe.make_part, names, [torch.float64] * 2)
    for part, weights in zip(made, right, strict=True):
        for key, value in part.state_dict().items():
            assert value.equal(weights[key]), f"{key} is another one"
"""


@pytest.mark.parametrize(("before", "after", "status"), [("", "", 0), ("with build_lock:", "if True:", 1)])
def test_parts_that_are_made_at_once_are_the_same_ones(tmp_path: Path, before: str, after: str, status: int) -> None:
    """The server makes them in two threads, which share the generator of the process."""
    beside(tmp_path, "rpc_rnn", mutated("rpc_rnn", before, after) if before else "")
    (tmp_path / "weights.py").write_text(WEIGHTS)
    done = typed(tmp_path, "python weights.py", status)
    assert ("is another one" in done.stderr) == bool(status)


# --- reinforcement


@cache
def episodes_in_one_process() -> str:
    with tempfile.TemporaryDirectory() as folder:
        beside(Path(folder), "rpc_reinforcement")
        (Path(folder) / "alone.py").write_text(IN_ONE_PROCESS)
        return typed(Path(folder), "python alone.py").stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DISCOUNT * rewards[step + 1]", "DISCOUNT * 0"),  # each action is judged by its own step alone
        ("generator=self.generators[observer]", "generator=None"),  # that of the process
        ("SEED + observer", "SEED"),  # all observers see the same
    ],
)
def test_reinforcement_mutation_differs(tmp_path: Path, before: str, after: str) -> None:
    text = mutated("rpc_reinforcement", before, after)
    assert printed(tmp_path, "rpc_reinforcement", text) != episodes_in_one_process()


# --- what all of them have in common: each is tested with one of them


def test_all_start_and_end_alike() -> None:
    """The end of each script is the same, but for what keeps a warning away where there is no such optimizer."""
    ends: set[str] = set()
    for name in RPC:
        text = (RECIPES / f"{name}.py").read_text()
        end = text[text.index("# --- the same in every script over RPC") :]
        lines = [line for line in end.splitlines() if "it warns about TorchScript" not in line]
        ends.add("\n".join(lines))
        assert "unpickles arguments" in text
        assert "trusted networks only" in text
    assert len(ends) == 1


def test_torch_without_rpc_is_named(tmp_path: Path) -> None:
    beside(tmp_path, "rpc_autograd")
    lacking = (
        "import runpy; from torch.distributed import rpc; rpc.is_available = lambda: False; "
        "runpy.run_path('rpc_autograd.py', None, '__main__')"
    )
    done = typed(tmp_path, f"python -c {shlex.quote(lacking)}", 3)
    [line] = done.stderr.splitlines()
    assert line.startswith("rpc_autograd.py: ")
    assert "without RPC" in line
    assert not done.stdout


LISTENING = """
    where = {Path("/proc/self/fd", entry).readlink().name for entry in os.listdir("/proc/self/fd") if entry.isdigit()
             and Path("/proc/self/fd", entry).is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in where:
                print("listens", table, cells[1], flush=True)
    rpc.shutdown()"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="not verified here: needs Linux's /proc")
def test_only_loopback_listens(tmp_path: Path) -> None:
    """Every socket of every worker that listens while it works; and where it is told another interface, there."""
    text = mutated("rpc_reinforcement", "\n    rpc.shutdown()", LISTENING).replace("UPDATES = 40", "UPDATES = 2")
    addresses = re.findall(r"^listens (tcp6?) (\w+):", printed(tmp_path, "rpc_reinforcement", text), re.MULTILINE)
    assert len(addresses) >= 3
    assert set(addresses) == {("tcp", "0100007F")}
    others = {name: address for name, address in usable_interfaces().items() if "." in address}
    for name, address in others.items():
        done = typed(tmp_path, "python rpc_reinforcement.py", TP_SOCKET_IFNAME=name)
        told = {("tcp", socket.inet_aton(address)[::-1].hex().upper())}
        assert told <= set(re.findall(r"^listens (tcp6?) (\w+):", done.stdout, re.MULTILINE))


@pytest.mark.parametrize(
    ("whom", "number", "status", "said"),
    [
        ("server", signal.SIGKILL, 1, "rpc_batched.py: worker server was lost"),
        ("trainer1", signal.SIGKILL, 1, "rpc_batched.py: worker trainer1 was lost"),
        ("", signal.SIGINT, 130, ""),
        ("", signal.SIGTERM, 143, ""),
    ],
)
def test_one_that_is_lost_ends_all(tmp_path: Path, whom: str, number: int, status: int, said: str) -> None:
    """In the middle of the training, by what somebody else does to one process; none is left."""
    text = mutated("rpc_batched", "EPOCHS = 2", "EPOCHS = 100_000")
    text = text.replace(
        '    """Run one worker; torch.multiprocessing.spawn passes its rank as the first argument."""\n', NOTE
    )
    text = text.replace("                self.optimizer.step()\n", "                self.optimizer.step()\n" + TRAINS)
    beside(tmp_path, "rpc_batched", text)
    program = [str(shared.PROGRAMS / "python"), "rpc_batched.py"]
    started = subprocess.Popen(
        program, cwd=tmp_path, env={**os.environ, **shared.OURS}, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(tmp_path / "trains")
        workers = {path.stem: int(path.read_text()) for path in tmp_path.glob("*.pid")}
        assert set(workers) == {"server", "trainer0", "trainer1"}
        os.kill(workers[whom], number) if whom else started.send_signal(number)
        _, stderr = started.communicate(timeout=120)
    finally:
        started.kill()
    # before it, what calls to the lost one came to: RPC prints that where the function ran
    assert not said or stderr.splitlines()[-1].startswith(said)
    assert "KeyboardInterrupt" not in stderr
    assert started.returncode == status
    for worker in workers.values():
        assert not is_running(worker)


NOTE = """    me = Path(WORKERS[rank] + ".pid")
    me.with_suffix(".new").write_text(str(os.getpid()))
    me.with_suffix(".new").rename(me)
"""
TRAINS = """                Path("trains").touch()
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A process that nobody has waited for yet has ended as well."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_backward_waits_for_what_is_cut_off(tmp_path: Path) -> None:
    """As the header says: until TIMEOUT, and not for ever."""
    beside(
        tmp_path,
        "rpc_rnn",
        mutated("rpc_rnn", "forward(output)", "forward(output.detach())").replace("= 60  #", "= 2  #"),
    )
    done = typed(tmp_path, "python rpc_rnn.py", 1)
    assert "timeout (2000 ms)" in done.stderr
    assert not done.stdout


def test_exception_of_a_worker_is_raised(tmp_path: Path) -> None:
    """With its traceback, while the others are in rpc.shutdown() or wait for an answer."""
    text = mutated(
        "rpc_autograd",
        "            losses.append(loss.detach())",
        '            raise ValueError("too large")',
    )
    beside(tmp_path, "rpc_autograd", text)
    done = typed(tmp_path, "python rpc_autograd.py", 1)
    assert "ValueError: too large" in done.stderr
    assert not done.stdout
