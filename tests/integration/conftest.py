"""Fixtures that start a Slurm of two nodes and hosts in network namespaces on this machine, and checks of libraries.

A test whose launcher or library is missing is skipped, with the package to install. `make test-integrations` installs
what it can. Each test that `make test` leaves out belongs to one of the `PARTS`; the Makefile lists which parts each
command runs.
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

# part: pattern of the file, the name or a fixture of its tests. A test belongs to the first part whose pattern matches.
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
    # spawn, torchrun, and tests of all launchers
    "launchers": r"test_conformance|test_failures|test_elastic|test_hanging_scripts|test_scripts",
    "suite": r"",  # tests with the marker `integration` outside of tests/integration and of FOLDER_PARTS
}
FOLDER_PARTS = {"recipes": "recipes", "parity": "layouts", "checkpoint": "layouts"}  # folder of tests/: part

# The tests of each of these files share an expensive result: a build, ranks that have imported transformers, or parity
# references. Tests in the folders of FOLDER_PARTS share trained models.
ONE_WORKER_FILES = (
    *("test_site", "test_wheel", "test_causal_lm", "test_port_libraries", "test_port_mistakes"),
    *("test_mutations_model_parallel", "test_mutations_experts", "test_saving_meshes", "test_cuda_steps"),
)
ONE_WORKER_PARTS = ("slurm", "ray", "hosts", "benches")  # their tests share a cluster, or measure time


def part_of(item: pytest.Item) -> str:
    """Return the part that a test belongs to."""
    if Path(__file__).parent not in item.path.parents:
        return FOLDER_PARTS.get(item.path.parent.name, "suite")
    names = " ".join([item.path.stem, item.name, *getattr(item, "fixturenames", ())]).lower()
    part = next((part for part, pattern in PARTS.items() if pattern and re.search(pattern, names)), None)
    if part is None:
        raise pytest.UsageError(f"{item.nodeid} belongs to no part: add it to PARTS in tests/integration/conftest.py")
    return part


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --parts."""
    parser.addoption("--parts", default="", help="run only these parts of the integration tests: " + " ".join(PARTS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the marker `integration` to the tests of this folder, and deselect the parts that --parts does not name."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
    requested = config.getoption("--parts").split()
    if unknown := set(requested) - PARTS.keys():
        raise pytest.UsageError(f"--parts: unknown {' '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    parts = {item: part_of(item) for item in items if item.get_closest_marker("integration")}
    deselected = [item for item, part in parts.items() if requested and part not in requested]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
    if hasattr(config, "workerinput"):
        groups = {item.nodeid: group for item in items if (group := group_of(item, parts.get(item)))}
        path = groups_path(config.workerinput["testrunuid"])
        worker_path = path.with_suffix(f".{os.getpid()}")
        worker_path.write_text(json.dumps(groups))
        worker_path.rename(path)


def group_of(item: pytest.Item, part: str | None) -> str | None:
    """Return the name of the group whose tests run one after another on one worker, or None."""
    if part in ONE_WORKER_PARTS:
        return part
    if part is not None and "compiled" in item.name:
        return "compiled"  # so that each rank of a pool imports the compiler only once
    if part is not None and (item.path.parent.name in FOLDER_PARTS or item.path.stem in ONE_WORKER_FILES):
        return item.path.stem
    return None


def groups_path(run_id: str) -> Path:
    """Return the path to which the workers write the groups for the scheduler. All workers write the same content."""
    return Path(tempfile.gettempdir()) / f"everyrank-groups-{run_id}.json"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler for `--dist loadgroup`. The one of pytest-xdist 3.8 finds no groups under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    if config.getoption("dist") != "loadgroup":
        return None

    class GroupScheduling(LoadScopeScheduling):
        """A scheduler that runs the groups in order of their size, then the other tests."""

        groups: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            """Return the group of a test, or its own id if it is in no group."""
            groups = self.groups
            if groups is None:
                path = groups_path(self.nodes[0].workerinput["testrunuid"])
                groups = self.groups = json.loads(path.read_text())
                path.unlink()
            return groups.get(nodeid, nodeid)

    return GroupScheduling(config, log)


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


def skip_without(requirement: str) -> None:
    """Skip the test because the requirement is missing."""
    pytest.skip(f"not verified here: needs {requirement}")


def skip_without_ray() -> None:
    """Skip the test if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        skip_without("Ray (pip install 'everyrank[ray]')")


def needs_library(name: str) -> None:
    """Skip the test if the package of the benchmarks is not installed."""
    if importlib.util.find_spec(name) is None:
        skip_without(f"{name} (pip install 'everyrank[benchmarks]')")


def path_with(*folders: Path) -> dict[str, str]:
    """Return the variable PATH that begins with these folders."""
    return {"PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]])}


def skip_without_horovod() -> None:
    """Skip the test if Horovod is not installed."""
    if importlib.util.find_spec("horovod") is None:
        skip_without("Horovod (tests/integration/install_horovod)")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a Slurm of two nodes on this machine, and yield the environment variables for its commands."""
    for program in ("slurmctld", "slurmd", "munged", "srun"):
        if shutil.which(program) is None:
            skip_without("Slurm (apt install slurm-wlm munge)")
    if os.geteuid() != 0:
        skip_without("root, to start a Slurm of its own")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for parent in folder.parents:
        if parent.name.startswith("pytest"):
            parent.chmod(0o755)  # munge refuses a socket in a folder that other users cannot enter
    # the ports of a job are derived from its id, so two Slurms on one machine must count from different ids
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(SLURM_CONF.format(host=socket.gethostname(), ports=ports, folder=folder))
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    environment = {**os.environ, **variables}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(start_munge(folder))
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            log = (folder / f"{'-'.join(command)}.out").open("wb")
            daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        wait_for_nodes(environment, folder)
        yield variables
    finally:
        stop_slurm(daemons, environment)


def stop_slurm(daemons: Sequence[subprocess.Popen[bytes]], environment: dict[str, str]) -> None:
    """Cancel the jobs, then stop the daemons. This also works if some daemons have not started."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # a controller that did not start does not answer
        subprocess.run(["scancel", "--user=root"], env=environment, timeout=20, check=False, capture_output=True)
    for process in reversed(daemons):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()


def start_munge(folder: Path) -> subprocess.Popen[bytes]:
    """Start munged, which authenticates the messages of Slurm, with a new key and socket in `folder`."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    options = ["--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    options += [
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]
    log = (folder / "munged.out").open("wb")
    return subprocess.Popen(["munged", *options], stdout=log, stderr=log, start_new_session=True)


def wait_for_nodes(environment: dict[str, str], folder: Path) -> None:
    """Wait until both nodes are idle. Fail with the logs after 120 seconds."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        process = subprocess.run(
            ["sinfo", "-h", "-o", "%T %D"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        if process.stdout.strip() == "idle 2":
            return
        time.sleep(0.3)
    logs = "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("*.out")))
    pytest.fail(f"the Slurm nodes were not idle within 120 s: {process.stdout}{process.stderr}\n{logs}")


def run_batch_job(folder: Path, command: str, variables: dict[str, str]) -> int:
    """Submit a job with `command` (`sbatch ...`), wait for it and return its exit status.

    This does not use `sbatch --wait`, which checks the job less and less often.
    """
    environment = {**os.environ, **variables}

    def output_of(arguments: list[str]) -> str:
        """Run a Slurm command and return its output."""
        process = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, process.stderr
        return process.stdout

    job_id = output_of(shlex.split(command)).split()[-1]  # it prints "Submitted batch job 7"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        state = dict(re.findall(r"(\w+)=(\S+)", output_of(["scontrol", "show", "job", job_id])))
        if state["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            return int(state["ExitCode"].partition(":")[0])
        time.sleep(0.2)
    pytest.fail(f"job {job_id} did not end within 200 s: {state}")


def free_port() -> int:
    """Return a TCP port that is free on the loopback address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Hosts:
    """Hosts in network namespaces that a bridge connects. Each has its own name, address and loopback."""

    def __init__(self, count: int) -> None:
        self.prefix = f"er{os.getpid() % 10_000}"
        self.names = [f"{self.prefix}h{index}" for index in range(count)]
        self.addresses = [f"10.77.{os.getpid() % 200}.{index + 1}" for index in range(count)]
        self.bridge = f"{self.prefix}sw"
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
        """Start a command on a host. The command sees the name of that host."""
        shell_script = f"hostname {self.names[index]}; exec " + '"$@"'
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[index], "unshare", "--uts", "sh", "-c", shell_script, "sh", *command],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def disconnect(self, index: int) -> None:
        """Disconnect a host from the bridge, as if its network cable was unplugged."""
        ip("-n", self.bridge, "link", "set", f"port{index}", "down")

    def kill(self, name: str) -> None:
        """Kill all processes on a host with SIGKILL, as if it had lost power."""
        process = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in process.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)

    def close(self) -> None:
        """Kill all processes on all hosts, and delete the namespaces."""
        for name in [*self.names, self.bridge]:
            self.kill(name)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    """Run the `ip` command with these arguments."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def three_hosts() -> Iterator[Hosts]:
    """Yield three hosts on this machine."""
    yield from make_hosts(3)


@pytest.fixture
def four_hosts() -> Iterator[Hosts]:
    """Yield four hosts on this machine."""
    yield from make_hosts(4)


def make_hosts(count: int) -> Iterator[Hosts]:
    """Yield `count` hosts, and remove them after the test. Skip the test if namespaces are not available."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        skip_without("Linux, root and iproute2, for hosts in network namespaces")
    try:
        hosts = Hosts(count)
    except subprocess.CalledProcessError as error:
        skip_without(f"network namespaces: {error.stderr.strip()}")
    yield hosts
    hosts.close()
