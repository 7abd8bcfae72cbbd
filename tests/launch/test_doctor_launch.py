"""`doctor --launch`: what would keep ranks from starting."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from everyrank.doctor import launching as doctor
from everyrank.errors import CannotRunError
from everyrank.launch import (
    Launch,
    host_info,
    mpi,
)
from everyrank.launch.host_info import LOOPBACK
from launching import JOB, MPICH, OPEN_MPI, SRUN
from processes import free_port


@pytest.mark.parametrize(
    ("environment", "status", "fragments"),
    [
        ({}, None, []),
        (SRUN, None, []),
        (JOB, "ok", ["job 7: 6 tasks on 2 nodes", "--launcher slurm"]),
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "3"}, None, []),
        (
            {**SRUN, "SLURM_NTASKS_PER_NODE": "4"},
            "problem",
            ["SLURM_NTASKS=6", "SLURM_NTASKS_PER_NODE=4 on 2 nodes", "--ntasks=8"],
        ),
        ({**SRUN, **OPEN_MPI}, "problem", ["SLURM_NTASKS=6", "mpirun started 4", "mpirun -n 6"]),
        ({**SRUN, **MPICH}, "problem", ["SLURM_NTASKS=6", "mpirun started 5"]),
        ({**SRUN, "SLURM_NTASKS": "x", "SLURM_NTASKS_PER_NODE": "4"}, "problem", ["SLURM_NTASKS=x"]),
        ({**SRUN, "SLURM_NNODES": "x", "SLURM_NTASKS_PER_NODE": "3"}, "problem", ["SLURM_NNODES=x"]),
    ],
)
def test_doctor_sees_variables_that_contradict_each_other(
    environment: dict[str, str], status: str | None, fragments: list[str]
) -> None:
    """Slurm's among themselves, and with mpirun's."""
    found = doctor.check_slurm(environment)
    assert [finding.status for finding in found] == ([status] if status else [])
    for fragment in fragments:
        assert fragment in found[0].line


def test_doctor_sees_a_port_in_use(busy: int) -> None:
    """And one that is free; for a rendezvous, and for a tcp:// method."""
    for launch in (
        Launch(rendezvous=f"127.0.0.1:{busy}"),
        Launch(init_method=f"tcp://127.0.0.1:{busy}"),
    ):
        finding = doctor.check_rendezvous(launch)[0]
        assert finding.status == "problem"
        assert f"port {busy} at 127.0.0.1: Address already in use" in finding.line
        assert "another port" in finding.line
    free = doctor.check_rendezvous(Launch(rendezvous=f"127.0.0.1:{free_port()}"))[0]
    assert free.status == "ok"


def test_doctor_takes_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host whose interface has no other."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(doctor, "usable_interfaces", lambda: {"lo": "::1"})
    finding = doctor.check_rendezvous(Launch(rendezvous=f"[::1]:{free_port()}"))[0]
    assert finding.status == "ok", finding


@pytest.mark.parametrize(
    ("error", "status", "fragment"),
    [
        (None, "ok", "answers"),
        (ConnectionRefusedError(), "warning", "start node 0 first"),
        (TimeoutError("timed out"), "problem", "firewall"),
        (OSError(113, "No route to host"), "problem", "No route to host"),
    ],
)
def test_doctor_asks_at_another_host(
    monkeypatch: pytest.MonkeyPatch, busy: int, error: OSError | None, status: str, fragment: str
) -> None:
    """It answers, nobody listens yet, or something is between."""

    def connect(*_: object, **__: object) -> socket.socket:
        if error is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(doctor.socket, "create_connection", connect)
    monkeypatch.setattr(doctor, "addresses_of", lambda _: ["10.0.0.1"])
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["10.0.0.1"])
    launch = Launch(processes=2, nodes=2, node_rank=1, rendezvous=f"10.0.0.1:{busy}")
    finding = doctor.check_rendezvous(launch)[0]
    assert (finding.status, finding.private) == (status, True)
    assert fragment in finding.line


def test_doctor_sees_a_host_name_that_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """For several hosts; on one it is fine."""
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["127.0.1.1"])
    launch = Launch(processes=2, nodes=2, node_rank=0, rendezvous="localhost:29500")
    finding = doctor.check_rendezvous(launch)[0]
    assert finding.status == "problem"
    assert "loopback" in finding.line


@pytest.mark.parametrize(("asked", "status"), [(LOOPBACK, "ok"), ("eth9", "problem"), (None, "ok")])
def test_doctor_sees_the_interface(asked: str | None, status: str) -> None:
    """The one that would be used, or that it is not there."""
    finding = doctor.check_rendezvous(Launch(interface=asked))[-1]
    assert (finding.what, finding.status) == ("interface", status)


@pytest.mark.parametrize("name", ["a..b", "nosuch.invalid"])
def test_doctor_survives_a_name_that_no_host_has(name: str) -> None:
    """A finding, whatever was typed."""
    finding = doctor.check_rendezvous(Launch(init_method=f"tcp://{name}:29500"))[0]
    assert finding.status == "problem"


def row(rank: int, **changes: Any) -> dict[str, Any]:
    place = {"rank": rank, "host": f"n{rank}", "pid": 7, "local_rank": 0, "local_size": 1, "device": "cpu"}
    versions = {"torch": "2.9", "python": "3.11", "everyrank": "0.1"}
    return {
        **place,
        **versions,
        "choices": {"interface": "eth0: the way", "backend": "gloo: cpu"},
        "skew_seconds": 0.0,
        **changes,
    }


@pytest.mark.parametrize(("skew", "status"), [(0.2, "ok"), (-0.2, "ok"), (90.0, "warning"), (-90.0, "warning")])
def test_doctor_sees_clocks_that_differ(monkeypatch: pytest.MonkeyPatch, skew: float, status: str) -> None:
    """In either direction, and whose."""
    monkeypatch.setattr(doctor, "run_ranks", lambda *_: {0: [row(0), row(1, skew_seconds=skew)]})
    found = {finding.what: finding for finding in doctor.check_start(Launch(processes=2))}
    assert found["clocks"].status == status
    assert status == "ok" or "n1" in found["clocks"].line
    assert "on n1, process 7" in found["rank 1"].line
    assert "torch 2.9" in found["versions"].line


def test_doctor_sees_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of versions that differ: the line of the start is the finding's."""

    def start(*_: object) -> None:
        raise CannotRunError(
            "rank 1 on n1 has torch 2.8, and rank 0 on n0 has 2.9: install the same version on all hosts"
        )

    monkeypatch.setattr(doctor, "run_ranks", start)
    [finding] = doctor.check_start(Launch(processes=2))
    assert finding.status == "problem"
    assert "rank 1 on n1 has torch 2.8" in finding.line


def test_doctor_starts_nothing_after_a_problem(monkeypatch: pytest.MonkeyPatch, busy: int) -> None:
    """A start that would hang is not tried, and it says so."""

    def start(*_: object) -> None:
        raise AssertionError("a start was tried")

    monkeypatch.setattr(doctor, "run_ranks", start)
    sections = doctor.check_launch(Launch(rendezvous=f"127.0.0.1:{busy}"))
    [finding] = sections["start"]
    assert finding.status == "absent"
    assert "rendezvous" in finding.line


@pytest.mark.parametrize(("launcher", "fragment"), [("mpi", "mpirun"), ("slurm", "srun")])
def test_doctor_sees_a_launcher_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str, fragment: str
) -> None:
    """Before it tries to start by it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mpi, "find_mpirun", lambda: None)
    finding = doctor.check_program(Launch(launcher))
    assert finding.status == "problem"
    assert fragment in finding.line
