"""Hosts and ranks are lost during a run and come back: the losses are those of a run without failures.

Hosts are network namespaces. To lose a host, a test kills all its processes. Each update is slow until the file `hurry`
exists, so that failures occur in the middle of the run. Later updates of a process are slower, because the run must not
end before a host has joined it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from everyrank import read_records
from forkserver import ForkServer
from integration.conftest import Hosts, skip_without_ray
from integration.test_conformance import EVERYRANK, fork_server_command
from processes import Cli

SLOW = """
import dataclasses
import itertools
import time
from pathlib import Path

from everyrank import find_workload


def workload():
    digits = find_workload("digits")
    calls = itertools.count()

    def loss(output, batch):
        if not Path(__file__).with_name("hurry").exists():
            time.sleep(0.2 if next(calls) < 20 else 2.0)
        return digits.loss(output, batch)

    return dataclasses.replace(digits, loss=loss)
"""
# of 24 samples three and four ranks read the same number each
TRAIN = [
    *("train", "slow.py:workload", "--layout", "ddp:precision=float64", "--batch", "24", "--steps", "70"),
    *("--save-every", "5", "--timeout", "60", "--json", "r.json"),
]


@pytest.fixture(scope="module")
def undisturbed(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of four ranks without failures."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "slow.py").write_text(SLOW)
    (folder / "hurry").touch()
    done = cli(folder, *TRAIN, "--processes", "4", "--out", "out")
    assert done.status == 0, done.err
    return read_records(folder / "r.json")[0].loss


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file; [] if it is missing or only partly written."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []


def wait_until(reached: Callable[[], bool], what: str, logs: Path, seconds: float = 200.0) -> None:
    """Wait until `reached` returns true. After `seconds` the test fails with the last output of launchers and ranks."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}\n{ends_of_logs(logs)}")
        time.sleep(0.05)


def ends_of_logs(folder: Path) -> str:
    """Return the last output of launchers and ranks."""
    return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(folder.rglob("*.log")))


def has_gone_on(out: Path, start: int) -> Callable[[], bool]:
    """Return a function that returns whether the first update after this start is done."""

    def reached() -> bool:
        rows = lines(out / "memberships.jsonl")
        return len(rows) > start and rows[start]["lost_seconds"] is not None

    return reached


@pytest.mark.timeout(500)
def test_training_resumes_without_a_lost_host_and_again_with_it(
    python: ForkServer, tmp_path: Path, four_hosts: Hosts, undisturbed: list[float]
) -> None:
    """The first host, which has rank 0, is lost and comes back later. The user types the same command on each host."""
    (tmp_path / "slow.py").write_text(SLOW)
    names, out = four_hosts.names, tmp_path / "out"
    words = [*fork_server_command(python), *TRAIN, "--launcher", "torchrun", "--nodes", "3:4"]
    words += ["--rendezvous-kind", "c10d", "--rendezvous", f"{four_hosts.addresses[1]}:29660"]
    words += ["--processes", "4", "--restarts", "3", "--resume", "--out", "out"]
    words += ["--timeout", "180"]  # a host that waits longer than that to be admitted would end the job of all
    started = [four_hosts.start(index, words, tmp_path) for index in range(4)]

    def begun() -> int:
        """Return the number of starts until all four hosts train, or 0. If one host is late, three start without it."""
        rows = lines(out / "memberships.jsonl")
        are_there = bool(rows) and rows[-1]["world_size"] == 4
        return len(rows) if are_there and (len(rows) == 1 or has_gone_on(out, len(rows) - 1)()) else 0

    wait_until(lambda: begun() > 0 and len(lines(out / "log.jsonl")) >= 8, "the first updates", out)
    starts = begun()
    four_hosts.kill(names[0])
    wait_until(has_gone_on(out, starts), "the other three go on", out)
    next_checkpoint = lines(out / "memberships.jsonl")[starts]["first_update"] + 5
    wait_until(lambda: lines(out / "log.jsonl")[-1]["step"] > next_checkpoint, "a checkpoint of the three", out)
    late = four_hosts.start(0, words, tmp_path)

    def four_have_gone_on() -> bool:
        """Return whether all four train again. If a host is late, three others may have started in between."""
        rows = lines(out / "memberships.jsonl")
        return len(rows) > starts + 1 and rows[-1]["world_size"] == 4 and rows[-1]["lost_seconds"] is not None

    wait_until(four_have_gone_on, "four go on", out)
    (tmp_path / "hurry").touch()
    screens, failures = {}, {}
    for name, process in zip([*names[1:], names[0]], [*started[1:], late], strict=True):
        screens[name], err = process.communicate(timeout=150)
        if process.returncode or err:
            failures[name] = f"{process.returncode}: {err}"
    assert not failures, "\n".join(map(str, [*failures.items(), ends_of_logs(out)]))
    record = read_records(tmp_path / "r.json")[0]
    assert record.world_size == 4
    assert record.loss == pytest.approx(undisturbed, rel=1e-12)
    first, second, third = (record.memberships[index] for index in (starts - 1, starts, -1))
    assert [row.hosts for row in (first, second, third)] == [names, names[1:], names]
    assert [row.world_size for row in (first, second, third)] == [4, 3, 4]
    assert (first.lost_seconds is None) == (starts == 1)
    for row, before, where in ((second, 4, names[1]), (third, 3, names[0])):
        assert row.first_update % 5 == 0
        assert row.repeated_updates < 10
        assert row.lost_seconds is not None
        assert 0 < row.lost_seconds < 150
        said = f"{row.world_size} ranks on {', '.join(row.hosts)} ({before} before): resumed after update "
        said += f"{row.first_update}, {row.repeated_updates} update{'s' * (row.repeated_updates != 1)} repeated, "
        assert said in screens[where]
    assert 0 < second.first_update < third.first_update < 70


@pytest.mark.timeout(400)
def test_killed_rank_restarts_from_the_last_checkpoint(cli: Cli, tmp_path: Path, undisturbed: list[float]) -> None:
    """With --restarts, all ranks start again from the last checkpoint, and print how many updates are repeated."""
    (tmp_path / "slow.py").write_text(SLOW)
    out = tmp_path / "out"
    words = [*TRAIN, "--launcher", "torchrun", "--restarts", "2", "--processes", "4", "--out", "out"]
    running = cli.start(tmp_path, *words)
    wait_until(lambda: len(lines(out / "log.jsonl")) >= 8, "the first updates", out)
    before = process_of(out, 2)
    os.kill(before, signal.SIGKILL)
    wait_until(has_gone_on(out, 1), "they go on", out)
    (tmp_path / "hurry").touch()
    status, screen, err = running.end(200)
    assert (status, err) == (0, ""), err
    record = read_records(tmp_path / "r.json")[0]
    assert record.loss == pytest.approx(undisturbed, rel=1e-12)
    assert [row.world_size for row in record.memberships] == [4, 4]
    again = record.memberships[1]
    assert again.first_update >= 5
    assert f"resumed after update {again.first_update}, {again.repeated_updates} update" in screen
    assert "before)" not in screen  # their number is the same
    assert process_of(out, 2) != before


def test_launcher_ends_after_the_command_is_killed(cli: Cli, tmp_path: Path) -> None:
    """Otherwise the launcher would restart ranks, and would end the job of all other hosts when it gives up."""
    (tmp_path / "slow.py").write_text(SLOW)
    out = tmp_path / "out"
    running = cli.start(
        tmp_path,
        *TRAIN,
        "--launcher",
        "torchrun",
        "--restarts",
        "3",
        "--processes",
        "2",
        "--out",
        "out",
        is_forked=False,
    )
    wait_until(lambda: len(lines(out / "log.jsonl")) >= 2, "the first updates", out)
    command = next(pid for pid, words in running.processes().items() if " -m everyrank train" in words)
    os.kill(command, signal.SIGKILL)
    running.end(60)
    assert running.remaining_processes() == {}
    assert "failed" not in (out / "ranks" / "torchrun.log").read_text()


def process_of(out: Path, rank: int) -> int:
    """Return the process id of a rank, from the first line that its latest start wrote to its log."""
    lines = (out / "ranks" / f"rank{rank}.log").read_text().splitlines()
    return int([line for line in lines if line.startswith(f"# rank {rank} ")][-1].rpartition(" ")[2])


def test_batch_that_is_not_divisible_by_ranks_prints_one_note(cli: Cli, tmp_path: Path) -> None:
    """The layout is not refused, because the result is still equivalent."""
    words = ["train", "digits", "--layout", "ddp", "--steps", "2", "--save-every", "0", "--processes", "3"]
    words += ["--launcher", "torchrun", "--rendezvous-kind", "c10d", "--nodes", "1:1", "--out", "out"]
    done = cli(tmp_path, *words)
    assert done.status == 0, done.err
    assert done.out.count("64 samples of an update over 3 ranks") == 1
    assert (tmp_path / "out" / "memberships.jsonl").exists()


@pytest.mark.timeout(400)
def test_ray_restarts_lost_ranks_and_actors(cli: Cli, tmp_path: Path, undisturbed: list[float]) -> None:
    """A rank gets SIGKILL, then an actor, as if a Ray node were lost. All ranks are placed and started again."""
    skip_without_ray()
    (tmp_path / "slow.py").write_text(SLOW)
    out = tmp_path / "out"
    words = [*TRAIN, "--launcher", "ray", "--restarts", "2", "--processes", "2", "--out", "out"]
    running = cli.start(tmp_path, *words, is_forked=False)
    wait_until(lambda: len(lines(out / "log.jsonl")) >= 8, "the first updates", out)
    os.kill(process_of(out, 1), signal.SIGKILL)
    wait_until(has_gone_on(out, 1), "they go on", out)
    supervisor = psutil.Process(process_of(out, 1)).parent()
    assert supervisor is not None
    actor = supervisor.parent()
    assert actor is not None
    assert "RankActor" in actor.cmdline()[0]
    actor.kill()
    wait_until(has_gone_on(out, 2), "they go on again", out)
    (tmp_path / "hurry").touch()
    status, screen, err = running.end(150)
    assert (status, err) == (0, ""), err
    record = read_records(tmp_path / "r.json")[0]
    assert record.loss == pytest.approx(undisturbed, rel=1e-12)
    assert [row.world_size for row in record.memberships] == [2, 2, 2]
    last = record.memberships[-1]
    assert f"2 ranks on {last.hosts[0]}: resumed after update {last.first_update}, " in screen
    assert running.remaining_processes() == {}


@pytest.fixture
def ray_nodes() -> Iterator[Any]:
    """Yield a Ray cluster with one node of one core. Tests add and remove nodes.

    It uses the address of this machine, because Ray redirects connections to 127.0.0.1 there.
    """
    skip_without_ray()
    # a node that was killed is noticed after a second and a half, not after a quarter of a minute
    checks = {"initial_delay_ms": 0, "period_ms": 500, "timeout_ms": 5000, "failure_threshold": 3}
    settings = {f"health_check_{name}": value for name, value in checks.items()}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": settings}
    made = importlib.import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()
    os.environ.pop("RAY_CLIENT_MODE", None)  # it sets that


@pytest.mark.timeout(400)
def test_ray_resumes_on_the_remaining_nodes(cli: Cli, tmp_path: Path, undisturbed: list[float], ray_nodes: Any) -> None:
    """A lost node leaves one of two ranks. A new node adds a rank, and no update is repeated."""
    second = ray_nodes.add_node(num_cpus=1)
    (tmp_path / "slow.py").write_text(SLOW)
    out = tmp_path / "out"
    words = [*TRAIN, "--launcher", "ray", "--address", ray_nodes.address, "--processes", "2", "--min-processes", "1"]
    running = cli.start(tmp_path, *words, "--device", "cpu", "--out", "out", is_forked=False)
    wait_until(lambda: len(lines(out / "log.jsonl")) >= 8, "the first updates", out)
    ray_nodes.remove_node(second, allow_graceful=False)
    wait_until(has_gone_on(out, 1), "one goes on", out)
    wait_until(lambda: len(lines(out / "log.jsonl")) >= 12, "further updates", out)
    ray_nodes.add_node(num_cpus=1)
    wait_until(has_gone_on(out, 2), "two go on", out)
    (tmp_path / "hurry").touch()
    status, screen, err = running.end(150)
    assert (status, err) == (0, ""), err
    record = read_records(tmp_path / "r.json")[0]
    assert record.world_size == 2
    assert record.loss == pytest.approx(undisturbed, rel=1e-12)
    lost, taken_in = record.memberships[1:]
    assert [row.world_size for row in record.memberships] == [2, 1, 2]
    assert lost.first_update % 5 == 0
    assert taken_in.repeated_updates == 0
    assert taken_in.first_update >= 12
    assert f" (2 before): resumed after update {lost.first_update}, " in screen
    assert f" (1 before): resumed after update {taken_in.first_update}, 0 updates repeated, " in screen
    assert running.remaining_processes() == {}


# --- Slurm


def slurm_says(command: str, slurm: dict[str, str]) -> str:
    """Return the output of a Slurm command."""
    done = subprocess.run(
        command.split(), env={**os.environ, **slurm}, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


def submit(folder: Path, slurm: dict[str, str], words: list[str]) -> str:
    """Submit a run to Slurm and return the job number."""
    (folder / "slow.py").write_text(SLOW)
    command = [*EVERYRANK, *TRAIN, "--launcher", "slurm", "--requeue", "--resume", "--out", "out", *words]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **slurm}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("submitted job ")[2].partition(":")[0]


@pytest.mark.timeout(400)
def test_slurm_job_is_requeued_after_losing_a_rank_and_a_node(
    tmp_path: Path, slurm: dict[str, str], undisturbed: list[float]
) -> None:
    """The job requeues itself and starts on the only node that Slurm has left. The losses are the same."""
    number = submit(tmp_path, slurm, ["--nodes", "1:2", "--processes", "4"])
    out, said = tmp_path / "out", tmp_path / f"slurm-{number}.out"
    wait_until(lambda: len(lines(out / "log.jsonl")) >= 8, "the first updates", out)
    slurm_says("scontrol update nodename=n2 state=drain reason=broken", slurm)
    try:
        os.kill(process_of(out, 3), signal.SIGKILL)
        wait_until(lambda: "is requeued" in said.read_text(), "the job is queued again", out)
        assert "rank 3 of 4 on n2: ended by SIGKILL" in said.read_text()
        time.sleep(5.0)  # as in test_conformance: nodes refuse a job that they have just ended

        def goes_on() -> bool:
            slurm_says(f"scontrol update job={number} StartTime=now", slurm)  # Slurm would wait for two minutes
            time.sleep(1.0)
            return has_gone_on(out, 1)()

        wait_until(goes_on, "it goes on", out)
        (tmp_path / "hurry").touch()
        wait_until(lambda: not slurm_says(f"squeue -h -j {number}", slurm).strip(), "it ends", out)
    finally:
        slurm_says("scontrol update nodename=n2 state=resume", slurm)
    record = read_records(tmp_path / "r.json")[0]
    assert record.loss == pytest.approx(undisturbed, rel=1e-12)
    assert [(row.world_size, row.hosts) for row in record.memberships] == [(4, ["n1", "n2"]), (2, ["n1"])]
    again = record.memberships[1]
    assert f"after update {again.first_update}, " in said.read_text()
    assert again.first_update >= 5


@pytest.mark.timeout(400)
def test_slurm_job_without_progress_is_not_requeued(tmp_path: Path, slurm: dict[str, str]) -> None:
    """The rank is killed before the first checkpoint, so the same would happen after each requeue."""
    number = submit(tmp_path, slurm, ["--nodes", "2", "--processes", "2", "--save-every", "1000"])
    out = tmp_path / "out"
    wait_until(lambda: len(lines(out / "log.jsonl")) >= 3, "the first updates", out)
    os.kill(process_of(out, 1), signal.SIGKILL)
    wait_until(lambda: not slurm_says(f"squeue -h -j {number}", slurm).strip(), "it ends", out)
    said = (tmp_path / f"slurm-{number}.out").read_text()
    assert "rank 1 of 2 on n2: ended by SIGKILL" in said
    assert "queue" not in said
