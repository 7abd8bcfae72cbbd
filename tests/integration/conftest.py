"""Real launchers on this machine: a Slurm of two nodes, MPI, Ray, and hosts in network namespaces.

What cannot be had here is skipped, with what it needs: `make test-integrations` installs it where it may. Each test
that `make test` leaves out belongs to one of the `PARTS`; the Makefile says which of them are run by which command.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# What makes a test one of a part: a word of its name, a fixture it asks for, or its file. The first that fits is it.
PARTS = {
    "horovod": r"horovod",
    "slurm": r"slurm|srun|sbatch|scancel|out_of_time",
    "mpi": r"(\b|_)mpi",
    "ray": r"\bray\b|test_ray",
    "hosts": r"three_hosts|four_hosts",
    "libraries": r"test_port_libraries",
    "recipes": r"test_recipe_commands|test_audit_recipes",
    "benches": r"test_benches|test_benchmarks",
    "package": r"test_wheel|test_notebook|test_site",
    "models": r"test_odd_models|test_causal_lm|test_larger_models",
    "layouts": r"test_more_ranks|test_saving_meshes|_model_parallel|_experts",
    # spawn and torchrun, and what all of them share
    "launchers": r"test_conformance|test_failures|test_elastic|test_hanging_scripts|test_scripts",
    "suite": r"",  # what is marked beside the other tests of a room
}
ROOMS = {"recipes": "recipes", "parity": "layouts", "checkpoint": "layouts"}  # of tests/, and their parts; else suite

# what was built for them, or ranks that have imported transformers, or keep their reference; those of ROOMS share what
# was trained
SHARE = (
    *("test_site", "test_wheel", "test_causal_lm", "test_port_libraries", "test_port_mistakes"),
    *("test_mutations_model_parallel", "test_mutations_experts", "test_saving_meshes"),
)
ONE_AT_A_TIME = ("slurm", "ray", "hosts", "benches")  # share what was started for them, or measure


def part_of(item: pytest.Item) -> str:
    """The part a test belongs to."""
    if Path(__file__).parent not in item.path.parents:
        return ROOMS.get(item.path.parent.name, "suite")
    words = " ".join([item.path.stem, item.name, *getattr(item, "fixturenames", ())]).lower()
    found = next((part for part, pattern in PARTS.items() if pattern and re.search(pattern, words)), None)
    if found is None:
        raise pytest.UsageError(f"{item.nodeid} belongs to no part: add it to PARTS in tests/integration/conftest.py")
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parts", default="", help="of the integration tests, one or more: " + " ".join(PARTS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what stands here as single tests elsewhere are marked: make test leaves both out; keep the part asked."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
    asked = config.getoption("--parts").split()
    if unknown := set(asked) - PARTS.keys():
        raise pytest.UsageError(f"--parts {' '.join(sorted(unknown))}: give some of {', '.join(PARTS)}")
    parts = {item: part_of(item) for item in items if item.get_closest_marker("integration")}
    left_out = [item for item, part in parts.items() if asked and part not in asked]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        groups = {item.nodeid: group for item in items if (group := group_of(item, parts.get(item)))}
        path = groups_file(config.workerinput["testrunuid"])
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(groups))
        own.rename(path)


def group_of(item: pytest.Item, part: str | None) -> str | None:
    """Which tests run on the same worker, one after the other; None for one that may run anywhere."""
    if part in ONE_AT_A_TIME:
        return part
    if part is not None and "compiled" in item.name:
        return "compiled"  # the compiler is imported once by each rank of a pool
    if part is not None and (item.path.parent.name in ROOMS or item.path.stem in SHARE):
        return item.path.stem
    return None


def groups_file(run: str) -> Path:
    """Where the workers of this run, which have all collected the same tests, write the groups for the scheduler."""
    return Path(tempfile.gettempdir()) / f"everyrank-groups-{run}.json"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup`, whose groups pytest-xdist 3.8 writes where pytest 9.2 does not look."""
    from xdist.scheduler import LoadScopeScheduling

    if config.getoption("dist") != "loadgroup":
        return None

    class Grouped(LoadScopeScheduling):
        """Groups in order of their size, then the other tests."""

        groups: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            groups = self.groups
            if groups is None:
                path = groups_file(self.nodes[0].workerinput["testrunuid"])
                groups = self.groups = json.loads(path.read_text())
                path.unlink()
            return groups.get(nodeid, nodeid)

    return Grouped(config, log)


SLURM_CONF = """\
ClusterName=everyrank
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def absent(what: str) -> None:
    pytest.skip(f"not verified here: needs {what}")


def needs_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        absent("Ray (pip install 'everyrank[ray]')")


def needs_library(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        absent(f"{name} (pip install 'everyrank[benchmarks]')")


def needs_horovod() -> None:
    if importlib.util.find_spec("horovod") is None:
        absent("Horovod (tests/integration/install_horovod)")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which a real Slurm of two nodes on this machine is found."""
    for program in ("slurmctld", "slurmd", "munged", "srun"):
        if shutil.which(program) is None:
            absent("Slurm (apt install slurm-wlm munge)")
    if os.geteuid() != 0:
        absent("root, to start a Slurm of its own")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for parent in folder.parents:
        if parent.name.startswith("pytest"):
            parent.chmod(0o755)  # munge wants to be reached
    # ports follow from the id of a job: two Slurms on one machine count from different ids
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(SLURM_CONF.format(host=socket.gethostname(), ports=ports, folder=folder))
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    environment = {**os.environ, **variables}
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(start_munge(folder))
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            log = (folder / f"{'-'.join(command)}.out").open("wb")
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        wait_for_nodes(environment, folder)
        yield variables
    finally:
        stop_slurm(started, environment)


def stop_slurm(started: Sequence[subprocess.Popen[bytes]], environment: dict[str, str]) -> None:
    """End the jobs, then all daemons, also where only some of them have been started."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # a controller that never came answers nothing
        subprocess.run(["scancel", "--user=root"], env=environment, timeout=20, check=False, capture_output=True)
    for process in reversed(started):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()


def start_munge(folder: Path) -> subprocess.Popen[bytes]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    words = ["--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    words += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
    log = (folder / "munged.out").open("wb")
    return subprocess.Popen(["munged", *words], stdout=log, stderr=log, start_new_session=True)


def wait_for_nodes(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["sinfo", "-h", "-o", "%T %D"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        if shown.stdout.strip() == "idle 2":
            return
        time.sleep(0.3)
    logs = "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("*.out")))
    pytest.fail(f"Slurm did not come up: {shown.stdout}{shown.stderr}\n{logs}")


def batch_job(folder: Path, command: str, variables: dict[str, str]) -> int:
    """Submit it by this command, `sbatch ...`, and wait; its exit status. `sbatch --wait` looks ever more seldom."""
    environment = {**os.environ, **variables}

    def told(words: list[str]) -> str:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    job = told(shlex.split(command)).split()[-1]  # Submitted batch job 7
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        shown = dict(re.findall(r"(\w+)=(\S+)", told(["scontrol", "show", "job", job])))
        if shown["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            return int(shown["ExitCode"].partition(":")[0])
        time.sleep(0.2)
    pytest.fail(f"job {job} did not end: {shown}")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Hosts:
    """Hosts in network namespaces, joined by a bridge: each with a name, an address and a loopback of its own."""

    def __init__(self, count: int) -> None:
        self.tag = f"er{os.getpid() % 10_000}"
        self.names = [f"{self.tag}h{index}" for index in range(count)]
        self.addresses = [f"10.77.{os.getpid() % 200}.{index + 1}" for index in range(count)]
        self.bridge = f"{self.tag}sw"
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "br0", "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{index}", "netns", self.bridge)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", self.bridge, "link", "set", f"port{index}", "master", "br0", "up")

    def start(self, index: int, command: Sequence[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
        """Start a command on a host, under that host's own name."""
        own = f"hostname {self.names[index]}; exec " + '"$@"'
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[index], "unshare", "--uts", "sh", "-c", own, "sh", *command],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def cut_off(self, index: int) -> None:
        """Its cable is pulled."""
        ip("-n", self.bridge, "link", "set", f"port{index}", "down")

    def kill(self, name: str) -> None:
        """All that runs there ends without a word, as if the host had lost its power."""
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in inside.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)

    def close(self) -> None:
        for name in [*self.names, self.bridge]:
            self.kill(name)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def three_hosts() -> Iterator[Hosts]:
    """Three hosts on this machine."""
    yield from hosts_of(3)


@pytest.fixture
def four_hosts() -> Iterator[Hosts]:
    """Four of them."""
    yield from hosts_of(4)


def hosts_of(count: int) -> Iterator[Hosts]:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        absent("Linux, root and iproute2, for hosts in network namespaces")
    try:
        hosts = Hosts(count)
    except subprocess.CalledProcessError as error:
        absent(f"network namespaces: {error.stderr.strip()}")
    yield hosts
    hosts.close()
