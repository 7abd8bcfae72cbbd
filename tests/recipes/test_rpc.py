"""The recipes over RPC: their common properties, and the recipes with a network that no built-in workload has.

The fork server starts the workers, as it starts the ranks of other recipes. RPC starts its threads in the calling
process.
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

from everyrank import Record
from everyrank.launch.host_info import usable_interfaces
from processes import Cli
from recipes import test_recipes
from recipes.test_recipes import (
    RECIPES_FOLDER,
    _forked_programs,
    difference_from_record,
    parse_output,
    recipe_text,
    run_commands,
    write_recipe,
)

pytestmark = pytest.mark.integration

__all__ = ["_forked_programs"]

RPC_RECIPES = ["ddp_rpc", "rpc_autograd", "rpc_batched", "rpc_pipeline", "rpc_reinforcement", "rpc_rnn"]

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
SINGLE_PROCESS_SCRIPT = """
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
    ("ddp_rpc", "lr=0.3 / TRAINERS", "lr=0.3"),  # this lr would be right if these gradients were averaged
    ("ddp_rpc", "[loss * TRAINERS]", "[loss]"),
    ("ddp_rpc", "logits = ddp(", "logits = dense("),  # bypasses the wrapper: no gradient is reduced
    ("rpc_rnn", "for part in (embedding, decoder):", "for part in (decoder,):"),
    (
        "rpc_rnn",
        "+= rpc.rpc_sync(part.owner(), refer_to_parameters, (part,))",
        "= parameters",
    ),  # only the local parameters are trained
]


def run_recipe(folder: Path, name: str, text: str = "") -> str:
    """Return the output of the recipe, started by the command in its header."""
    write_recipe(folder, name, text)
    (command,) = test_recipes.float64_commands(text or recipe_text(name))
    return run_commands(folder, command).stdout


def text_with(name: str, before: str, after: str) -> str:
    """Return the text of the recipe with one replacement."""
    text = recipe_text(name)
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    return text.replace(before, after)


@cache
def single_process_record(cli: Cli, name: str) -> Record:
    """Return the record of the same training in one process by the library, with the recipe's network and data."""
    with tempfile.TemporaryDirectory() as folder:
        write_recipe(Path(folder), name)
        (Path(folder) / "workload.py").write_text(WORKLOADS[name])
        return test_recipes.train_workload(cli, Path(folder), "single:precision=float64", size=1)


@pytest.mark.parametrize(("name", "before", "after"), MUTATIONS)
def test_mutation_differs(cli: Cli, tmp_path: Path, name: str, before: str, after: str) -> None:
    assert (
        difference_from_record(
            parse_output(run_recipe(tmp_path, name, text_with(name, before, after))), single_process_record(cli, name)
        )
        > 1e-9
    )


BUILD_IN_THREADS_SCRIPT = """
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
def test_parts_built_concurrently_have_the_right_weights(tmp_path: Path, before: str, after: str, status: int) -> None:
    """The server builds the parts in two threads, which share the random generator of the process."""
    write_recipe(tmp_path, "rpc_rnn", text_with("rpc_rnn", before, after) if before else "")
    (tmp_path / "weights.py").write_text(BUILD_IN_THREADS_SCRIPT)
    result = run_commands(tmp_path, "python weights.py", status)
    assert ("is another one" in result.stderr) == bool(status)


# --- reinforcement learning


@cache
def episodes_in_one_process() -> str:
    """Return the output of the same training in one process without RPC."""
    with tempfile.TemporaryDirectory() as folder:
        write_recipe(Path(folder), "rpc_reinforcement")
        (Path(folder) / "alone.py").write_text(SINGLE_PROCESS_SCRIPT)
        return run_commands(Path(folder), "python alone.py").stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DISCOUNT * rewards[step + 1]", "DISCOUNT * 0"),  # an action gets only the reward of its own step
        ("generator=self.generators[observer]", "generator=None"),  # draws from the generator of the process
        ("SEED + observer", "SEED"),  # all observers have the same environment
    ],
)
def test_reinforcement_mutation_differs(tmp_path: Path, before: str, after: str) -> None:
    text = text_with("rpc_reinforcement", before, after)
    assert run_recipe(tmp_path, "rpc_reinforcement", text) != episodes_in_one_process()


# --- properties of all RPC recipes, each tested with one recipe


def test_all_scripts_end_with_the_same_code() -> None:
    """Only the line that suppresses a warning of the distributed optimizer may be missing."""
    endings: set[str] = set()
    for name in RPC_RECIPES:
        text = (RECIPES_FOLDER / f"{name}.py").read_text()
        ending = text[text.index("# --- the same in every script over RPC") :]
        lines = [line for line in ending.splitlines() if "it warns about TorchScript" not in line]
        endings.add("\n".join(lines))
        assert "unpickles arguments" in text
        assert "trusted networks only" in text
    assert len(endings) == 1


def test_torch_without_rpc_is_reported(tmp_path: Path) -> None:
    write_recipe(tmp_path, "rpc_autograd")
    code = (
        "import runpy; from torch.distributed import rpc; rpc.is_available = lambda: False; "
        "runpy.run_path('rpc_autograd.py', None, '__main__')"
    )
    result = run_commands(tmp_path, f"python -c {shlex.quote(code)}", 3)
    [line] = result.stderr.splitlines()
    assert line.startswith("rpc_autograd.py: ")
    assert "without RPC" in line
    assert not result.stdout


PRINT_LISTENING_SOCKETS = """
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
    """All listening sockets of all workers use loopback. With TP_SOCKET_IFNAME they use that interface."""
    text = text_with("rpc_reinforcement", "\n    rpc.shutdown()", PRINT_LISTENING_SOCKETS).replace(
        "UPDATES = 40", "UPDATES = 2"
    )
    addresses = re.findall(r"^listens (tcp6?) (\w+):", run_recipe(tmp_path, "rpc_reinforcement", text), re.MULTILINE)
    assert len(addresses) >= 3
    assert set(addresses) == {("tcp", "0100007F")}
    addresses_by_interface = {name: address for name, address in usable_interfaces().items() if "." in address}
    for name, address in addresses_by_interface.items():
        result = run_commands(tmp_path, "python rpc_reinforcement.py", TP_SOCKET_IFNAME=name)
        expected_sockets = {("tcp", socket.inet_aton(address)[::-1].hex().upper())}
        assert expected_sockets <= set(re.findall(r"^listens (tcp6?) (\w+):", result.stdout, re.MULTILINE))


@pytest.mark.parametrize(
    ("worker_name", "signal_number", "status", "message"),
    [
        ("server", signal.SIGKILL, 1, "rpc_batched.py: worker server was lost"),
        ("trainer1", signal.SIGKILL, 1, "rpc_batched.py: worker trainer1 was lost"),
        ("", signal.SIGINT, 130, ""),
        ("", signal.SIGTERM, 143, ""),
    ],
)
def test_lost_worker_or_signal_ends_all_workers(
    tmp_path: Path, worker_name: str, signal_number: int, status: int, message: str
) -> None:
    """A worker is killed, or the program gets a signal, in the middle of the training. No process is left."""
    text = text_with("rpc_batched", "EPOCHS = 2", "EPOCHS = 100_000")
    text = text.replace(
        '    """Run one worker; torch.multiprocessing.spawn passes its rank as the first argument."""\n', WRITE_PID_FILE
    )
    text = text.replace(
        "                self.optimizer.step()\n", "                self.optimizer.step()\n" + CREATE_TRAINS_FILE
    )
    write_recipe(tmp_path, "rpc_batched", text)
    program = [str(test_recipes.PROGRAM_FOLDER / "python"), "rpc_batched.py"]
    process = subprocess.Popen(
        program, cwd=tmp_path, env={**os.environ, **test_recipes.COMMAND_ENVIRONMENT}, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(tmp_path / "trains")
        workers = {path.stem: int(path.read_text()) for path in tmp_path.glob("*.pid")}
        assert set(workers) == {"server", "trainer0", "trainer1"}
        os.kill(workers[worker_name], signal_number) if worker_name else process.send_signal(signal_number)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    # earlier lines are errors of calls to the lost worker, which RPC prints where the function ran
    assert not message or stderr.splitlines()[-1].startswith(message)
    assert "KeyboardInterrupt" not in stderr
    assert process.returncode == status
    for pid in workers.values():
        assert not is_running(pid)


WRITE_PID_FILE = """    me = Path(WORKERS[rank] + ".pid")
    me.with_suffix(".new").write_text(str(os.getpid()))
    me.with_suffix(".new").rename(me)
"""
CREATE_TRAINS_FILE = """                Path("trains").touch()
"""


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Return whether the process runs. A zombie has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_backward_of_a_detached_output_times_out(tmp_path: Path) -> None:
    """As the header of the recipe says, it waits until TIMEOUT."""
    write_recipe(
        tmp_path,
        "rpc_rnn",
        text_with("rpc_rnn", "forward(output)", "forward(output.detach())").replace("= 60  #", "= 2  #"),
    )
    result = run_commands(tmp_path, "python rpc_rnn.py", 1)
    assert "timeout (2000 ms)" in result.stderr
    assert not result.stdout


def test_exception_of_a_worker_ends_the_recipe_with_its_traceback(tmp_path: Path) -> None:
    """The other workers are in rpc.shutdown() or wait for an answer."""
    text = text_with(
        "rpc_autograd",
        "            losses.append(loss.detach())",
        '            raise ValueError("too large")',
    )
    write_recipe(tmp_path, "rpc_autograd", text)
    result = run_commands(tmp_path, "python rpc_autograd.py", 1)
    assert "ValueError: too large" in result.stderr
    assert not result.stdout
