"""`everyrank doctor --launch` finds what prevents ranks from starting."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
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
from launching import MPICH, OPEN_MPI, SLURM_JOB, SRUN
from processes import free_port, refusal_message


@pytest.mark.parametrize(
    ("environment", "status", "fragments"),
    [
        ({}, None, []),
        (SRUN, None, []),
        (SLURM_JOB, "ok", ["job 7: 6 tasks on 2 nodes", "--launcher slurm"]),
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
def test_doctor_reports_contradictory_variables(
    environment: dict[str, str], status: str | None, fragments: list[str]
) -> None:
    """Variables of Slurm contradict each other, or those of mpirun."""
    findings = doctor.check_slurm(environment)
    assert [finding.status for finding in findings] == ([status] if status else [])
    for fragment in fragments:
        assert fragment in findings[0].line


def test_doctor_reports_a_port_in_use(busy_port: int) -> None:
    """The port is that of a rendezvous or of a tcp:// method. A free port is "ok"."""
    for launch in (
        Launch(rendezvous=f"127.0.0.1:{busy_port}"),
        Launch(init_method=f"tcp://127.0.0.1:{busy_port}"),
    ):
        finding = doctor.check_rendezvous(launch)[0]
        assert finding.status == "problem"
        assert f"port {busy_port} at 127.0.0.1: Address already in use" in finding.line
        assert "another port" in finding.line
    free_port_finding = doctor.check_rendezvous(Launch(rendezvous=f"127.0.0.1:{free_port()}"))[0]
    assert free_port_finding.status == "ok"


def test_doctor_accepts_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface of the host has only this address."""
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
def test_doctor_connects_to_another_host(
    monkeypatch: pytest.MonkeyPatch, busy_port: int, error: OSError | None, status: str, fragment: str
) -> None:
    """The host answers, no process listens yet, or the network blocks the connection."""

    def connect(*_: object, **__: object) -> socket.socket:
        if error is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(doctor.socket, "create_connection", connect)
    monkeypatch.setattr(doctor, "addresses_of", lambda _: ["10.0.0.1"])
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["10.0.0.1"])
    launch = Launch(processes=2, nodes=2, node_rank=1, rendezvous=f"10.0.0.1:{busy_port}")
    finding = doctor.check_rendezvous(launch)[0]
    assert (finding.status, finding.private) == (status, True)
    assert fragment in finding.line


def test_doctor_reports_a_loopback_address_for_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host, a loopback address is fine."""
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["127.0.1.1"])
    launch = Launch(processes=2, nodes=2, node_rank=0, rendezvous="localhost:29500")
    finding = doctor.check_rendezvous(launch)[0]
    assert finding.status == "problem"
    assert "loopback" in finding.line


@pytest.mark.parametrize(("interface", "status"), [(LOOPBACK, "ok"), ("eth9", "problem"), (None, "ok")])
def test_doctor_reports_the_interface(interface: str | None, status: str) -> None:
    """It reports the interface that would be used, or that the named one is missing."""
    finding = doctor.check_rendezvous(Launch(interface=interface))[-1]
    assert (finding.what, finding.status, finding.private) == ("interface", status, True)


def test_doctor_recognizes_the_second_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface may have several addresses, for example IPv4 and IPv6. No other host is asked."""
    rows = [SimpleNamespace(family=socket.AF_INET, address="192.0.2.2"), SimpleNamespace(address="2001:db8::7")]
    monkeypatch.setattr(host_info.psutil, "net_if_addrs", lambda: {"eth0": rows})
    monkeypatch.setattr(doctor, "addresses_of", lambda _: ["2001:db8::7"])
    monkeypatch.setattr(doctor, "check_port", lambda *_: None)
    monkeypatch.setattr(doctor.socket, "create_connection", pytest.fail)
    finding = doctor._check_endpoint("2001:db8::7", 29500)
    assert finding.status == "ok"
    assert "is this host" in finding.line


def test_dry_run_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_ranks", pytest.fail)
    [start] = doctor.check_launch(Launch(), starts_ranks=False)["start"]
    assert (start.status, start.text) == ("absent", "not tried: --dry-run")


@pytest.mark.parametrize("flag", ["--launcher spawn", "--interface lo", "--backend gloo", "--dry-run", "--device cpu"])
def test_doctor_without_launch_refuses_launch_flags(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert f"{flag.split()[0]}: doctor uses it only with --launch" in refusal_message(capsys, "doctor", *flag.split())


@pytest.mark.parametrize("name", ["a..b", "nosuch.invalid"])
def test_doctor_reports_an_invalid_host_name(name: str) -> None:
    """The result is a finding and not an exception."""
    finding = doctor.check_rendezvous(Launch(init_method=f"tcp://{name}:29500"))[0]
    assert finding.status == "problem"


def rank_row(rank: int, **changes: Any) -> dict[str, Any]:
    """Return what one rank reports at a test start."""
    process = {"rank": rank, "host": f"n{rank}", "pid": 7, "local_rank": 0, "local_size": 1, "device": "cpu"}
    versions = {"torch": "2.9", "python": "3.11", "everyrank": "0.1"}
    return {
        **process,
        **versions,
        "choices": {"interface": "eth0: the way", "backend": "gloo: cpu"},
        "skew_seconds": 0.0,
        **changes,
    }


@pytest.mark.parametrize(("skew", "status"), [(0.2, "ok"), (-0.2, "ok"), (90.0, "warning"), (-90.0, "warning")])
def test_doctor_reports_clocks_that_differ(monkeypatch: pytest.MonkeyPatch, skew: float, status: str) -> None:
    """The difference is in either direction. The finding names the host."""
    monkeypatch.setattr(doctor, "run_ranks", lambda *_: {0: [rank_row(0), rank_row(1, skew_seconds=skew)]})
    findings = {finding.what: finding for finding in doctor.check_start(Launch(processes=2))}
    assert findings["clocks"].status == status
    assert status == "ok" or "n1" in findings["clocks"].line
    assert "on n1, process 7" in findings["rank 1"].line
    assert "torch 2.9" in findings["versions"].line


def test_doctor_reports_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding has the error message of the start, for example about different versions."""

    def fail_to_start(*_: object) -> None:
        raise CannotRunError(
            "rank 1 on n1 has torch 2.8, and rank 0 on n0 has 2.9: install the same version on all hosts"
        )

    monkeypatch.setattr(doctor, "run_ranks", fail_to_start)
    [finding] = doctor.check_start(Launch(processes=2))
    assert finding.status == "problem"
    assert "rank 1 on n1 has torch 2.8" in finding.line


def test_doctor_skips_the_start_after_a_problem(monkeypatch: pytest.MonkeyPatch, busy_port: int) -> None:
    """The start would hang. The finding gives the reason."""

    def fail_on_start(*_: object) -> None:
        raise AssertionError("a start was tried")

    monkeypatch.setattr(doctor, "run_ranks", fail_on_start)
    sections = doctor.check_launch(Launch(rendezvous=f"127.0.0.1:{busy_port}"))
    [finding] = sections["start"]
    assert finding.status == "absent"
    assert "rendezvous" in finding.line


@pytest.mark.parametrize(("launcher", "fragment"), [("mpi", "mpirun"), ("slurm", "srun")])
def test_doctor_reports_a_missing_launcher_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str, fragment: str
) -> None:
    """The check runs before the start."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mpi, "find_mpirun", lambda: None)
    finding = doctor.check_program(Launch(launcher))
    assert finding.status == "problem"
    assert fragment in finding.line
