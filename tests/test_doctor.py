"""Doctor: each check against made-up machines, the self-test against wrong collectives, and the command for real."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from everyrank.doctor import CheckResult, DoctorReport, paste
from everyrank.doctor.checks import layouts_here
from everyrank.doctor.machine import (
    cgroup_quota,
    check_cores,
    check_files,
    check_machine,
    check_shared_memory,
    check_space,
    check_threads,
)
from everyrank.doctor.memory import memory_results
from everyrank.doctor.network import (
    check_host_name,
    check_interface,
    check_launcher,
    check_network,
    check_rendezvous_port,
)
from everyrank.doctor.results import ABSENT, OK, PROBLEM, WARNING, absent, ok, problem, warning
from everyrank.doctor.selftest import _wrong_answers
from everyrank.doctor.software import (
    NEWEST_TESTED_TORCH,
    OLDEST_TORCH,
    check_combinations,
    check_optional,
    check_software,
    installed_versions,
)
from everyrank.errors import RankFailedError
from everyrank.train.trackers import TRACKERS
from everyrank.world import World
from forkserver import ForkServer
from processes import refused
from try_versions import TORCHES

examining: Any = importlib.import_module("everyrank.doctor.checks")  # the package has a function of that name

MIB = 2**20


def test_a_workload_is_held_against_the_memory_here() -> None:
    """Each layout with its verdict; what does not fit ends with the smallest change, and fails the command."""
    common = {"allocated_bytes": 3 * 2**30, "note": "traced whole"}
    change = {"what": "bf16", "command": "everyrank train w.py --layout ddp:precision=bf16"}
    answer = {
        "cluster": {"memory_bytes": 2 * 2**30},
        "layouts": [
            {"layout": "fsdp", "verdict": "fits", **common},
            {"layout": "zero1", "verdict": "may not fit", **common},
            {"layout": "ddp", "verdict": "does not fit", "change": change, **common},
            {"layout": "tensor", "verdict": "not possible", "reason": "no tensor_plan"},
        ],
    }
    results = memory_results(answer)
    assert [result.status for result in results] == [OK, WARNING, PROBLEM, ABSENT]
    assert results[2].line == f"ddp: does not fit: 3 GiB of 2 GiB for each rank; bf16: {change['command']}"
    assert "no tensor_plan" in results[3].text


INTERFACES = {"lo": "127.0.0.1", "eth0": "192.0.2.2"}
LAUNCHED = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "192.0.2.77",
    "MASTER_PORT": "29501",
}
CHOSEN = (
    *LAUNCHED,
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
)


def is_one_line(finding: CheckResult, *words: str) -> None:
    """It is a problem or a warning, with a fix, on one line that holds all `words`."""
    assert finding.status in (PROBLEM, WARNING), finding
    assert finding.fix
    assert finding.line.isprintable(), finding.line
    assert [word for word in words if word not in finding.line] == [], finding.line


def doctor(*words: str | Path, before: str = "", program: Path | str = sys.executable, **environment: str) -> Any:
    """`everyrank doctor` in an environment where nobody chose anything; `before` is shell that runs first."""
    command = [program, "-m", "everyrank", "doctor", *map(str, words)]
    if before:
        command = ["unshare", "-m", "-u", "sh", "-e", "-c", before + '\nexec "$@"', "sh", *command]
    own = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**own, **environment}, check=False)


def problem_lines(done: Any) -> list[str]:
    """The lines on stderr; all of them are doctor's, so none is of a traceback."""
    lines = done.stderr.splitlines()
    assert "Traceback" not in done.stderr, done.stderr
    assert all(line.startswith("everyrank: ") for line in lines), done.stderr
    return lines


@pytest.fixture
def namespaces() -> None:
    """Skip where this machine cannot be made ill for real."""
    reason = "a full /dev/shm, a read-only /tmp or another host name is not verified for real"
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip(f"{reason}: needs Linux, root and unshare")
    done = subprocess.run(
        ["unshare", "-m", "-u", "sh", "-e", "-c", "mount -t tmpfs tmpfs /dev/shm; hostname box"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{reason}: {done.stderr.strip()}")


# --- machine


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_as_many_threads_as_cores_are_fine_and_one_more_is_not(name: str) -> None:
    assert check_threads({name: "4"}, cores=4).status == OK
    assert check_threads({name: "1"}, cores=4).status == OK
    found = check_threads({name: "5"}, cores=4)
    assert found.status == PROBLEM
    is_one_line(found, f"{name}=5", "4 cores", f"unset {name}", f"{name}=2")


def test_threads_nobody_chose_are_fine() -> None:
    assert check_threads({}, cores=1).status == OK


def test_a_second_variable_of_threads_is_looked_at_too() -> None:
    found = check_threads({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "64"}, cores=2)
    is_one_line(found, "MKL_NUM_THREADS=64", "unset MKL_NUM_THREADS")


def test_one_core_is_not_halved_to_none() -> None:
    is_one_line(check_threads({"OMP_NUM_THREADS": "2"}, cores=1), "OMP_NUM_THREADS=1 ")


@pytest.mark.parametrize("text", ["abc", "0", "", "-1", "2.5", "1e3", "²"])
def test_what_is_no_number_of_threads_is_named(text: str) -> None:
    found = check_threads({"OMP_NUM_THREADS": text}, cores=4)
    assert found.status == PROBLEM
    is_one_line(found, f"OMP_NUM_THREADS={text} ", "unset OMP_NUM_THREADS")


def test_a_number_of_threads_with_more_digits_than_python_reads_is_named() -> None:
    assert check_threads({"OMP_NUM_THREADS": "9" * 5000}, cores=4).status == PROBLEM


def test_a_number_of_threads_for_each_level_is_one_that_openmp_takes() -> None:
    """`OMP_NUM_THREADS=4,2` is in OpenMP's standard: 4 threads, and 2 in those that they start."""
    assert check_threads({"OMP_NUM_THREADS": "4,2"}, cores=4).status == OK
    assert check_threads({"OMP_NUM_THREADS": "64,2"}, cores=4).status == PROBLEM


def test_a_container_with_fewer_cores_than_it_sees_is_warned_of() -> None:
    assert check_cores(8, 8, None).status == OK
    assert check_cores(8, 8, 8.0).status == OK
    assert check_cores(4, 8, 6.0).status == OK
    found = check_cores(8, 8, 1.5)
    assert found.status == WARNING
    is_one_line(found, "8", "1.5", "taskset -c 0-1 ")
    is_one_line(check_cores(8, 8, 0.5), "taskset -c 0-0 ")


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("abc 1", None), ("5", None)]
)
def test_the_quota_of_a_container_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cgroup_quota(tmp_path) == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path / "nowhere") is None


def test_shared_memory_that_is_nearly_full_is_a_problem() -> None:
    found = check_shared_memory(1024 * MIB, 16 * MIB - 1)
    assert found.status == PROBLEM
    is_one_line(found, "/dev/shm", "1.0 GiB", "--shm-size")
    assert check_shared_memory(64 * MIB, 0).status == PROBLEM


def test_little_shared_memory_is_a_warning() -> None:
    assert check_shared_memory(1024 * MIB, 16 * MIB).status == WARNING
    found = check_shared_memory(1024 * MIB, 128 * MIB - 1)
    assert found.status == WARNING
    is_one_line(found, "/dev/shm", "--shm-size")
    assert check_shared_memory(1024 * MIB, 128 * MIB).status == OK


def test_shared_memory_that_was_always_too_small_is_no_better_than_a_full_one() -> None:
    """A megabyte that is free carries no more batches than a megabyte that is left of many."""
    assert check_shared_memory(1024 * MIB, MIB).status == PROBLEM
    assert check_shared_memory(MIB, MIB).status == PROBLEM


def test_shared_memory_that_cannot_be_written_is_a_problem() -> None:
    found = check_shared_memory(1024 * MIB, 1024 * MIB, writable=False)
    assert found.status == PROBLEM
    is_one_line(found, "/dev/shm", "chmod 1777 /dev/shm")


def test_few_open_files_are_a_problem() -> None:
    unlimited = resource.RLIM_INFINITY
    assert check_files(1024, 1024).status == OK
    assert check_files(unlimited, unlimited).status == OK
    assert "unlimited" in check_files(unlimited, unlimited).text
    for hard, fix in ((unlimited, "ulimit -n 4096"), (524288, "ulimit -n 4096"), (2048, "ulimit -n 2048")):
        found = check_files(1023, hard)
        assert found.status == PROBLEM
        is_one_line(found, "1023", fix)


def test_the_fix_for_open_files_is_no_limit_that_is_there_already() -> None:
    """Where the hard limit is as low, `ulimit -n` with the same number changes nothing."""
    found = check_files(256, 256)
    assert found.status == PROBLEM
    assert found.fix
    assert not found.fix.startswith("ulimit -n 256 ")


def test_a_folder_for_temporary_files_needs_space_and_permission(tmp_path: Path) -> None:
    assert check_space(tmp_path, 64 * MIB).status == OK
    is_one_line(check_space(tmp_path, 64 * MIB - 1), str(tmp_path), "64 MiB", "TMPDIR")
    is_one_line(check_space(tmp_path, 2**40, writable=False), str(tmp_path), "TMPDIR")
    assert check_space(tmp_path, 0).status == check_space(tmp_path, 2**40, writable=False).status == PROBLEM


def test_no_folder_for_temporary_files_at_all_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises where it finds none: in a container that is read-only, or on a disk that is full."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    found = next(finding for finding in check_machine({}) if finding.what == "temporary files")
    assert found.status == PROBLEM
    is_one_line(found, "TMPDIR")


def test_all_of_this_machine_is_looked_at() -> None:
    found = [finding.what for finding in check_machine({})]
    assert {"cores", "threads", "memory", "open files", "temporary files"} <= set(found)
    assert sys.platform != "linux" or "shared memory" in found


# --- network


@pytest.mark.parametrize("addresses", [["127.0.1.1"], ["127.0.0.1", "::1"], ["::1"]])
def test_a_host_name_that_is_loopback_is_named_with_the_fix(addresses: list[str]) -> None:
    found = check_host_name("box", addresses, INTERFACES)
    is_one_line(found, "box", *addresses, "loopback", "/etc/hosts", "GLOO_SOCKET_IFNAME=eth0")


@pytest.mark.parametrize("addresses", [["192.0.2.2"], ["127.0.1.1", "192.0.2.2"], ["2001:db8::7"], ["fe80::1%eth0"]])
def test_a_host_name_with_an_address_of_its_own_is_fine(addresses: list[str]) -> None:
    assert check_host_name("box", addresses, INTERFACES).status == OK


def test_a_host_name_without_an_address_is_named_with_the_fix() -> None:
    is_one_line(check_host_name("box", [], INTERFACES), "box", "/etc/hosts", "GLOO_SOCKET_IFNAME=eth0")


def test_the_interface_that_is_proposed_is_never_loopback() -> None:
    found = check_host_name("box", ["127.0.1.1"], {"lo": "::1", "wlan0": "fe80::12%wlan0", "eth0": "192.0.2.2"})
    is_one_line(found, "GLOO_SOCKET_IFNAME=wlan0")
    for interfaces in ({}, {"lo": "127.0.0.1", "lo2": "::1"}):
        found = check_host_name("box", ["127.0.1.1"], interfaces)
        is_one_line(found, "GLOO_SOCKET_IFNAME")
        assert "GLOO_SOCKET_IFNAME=" not in found.line


@pytest.mark.parametrize("name", ["a" * 64, "a..b"])
def test_a_host_name_that_cannot_be_looked_up_is_a_finding(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Linux takes 64 letters for a host name and two dots; a part of a name in DNS has 1 to 63 letters."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    found = next(finding for finding in check_network({}) if finding.what == "host name")
    is_one_line(found, name, "/etc/hosts")


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there_is_named_with_those_that_are(variable: str) -> None:
    found = check_interface(variable, "nosuch0", list(INTERFACES))
    assert found is not None
    assert found.status == PROBLEM
    is_one_line(found, variable, "nosuch0", "lo, eth0", f"unset {variable}")


@pytest.mark.parametrize("value", ["lo", "eth0", "eth0,lo"])
def test_interfaces_that_are_there_are_fine(value: str) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        found = check_interface(variable, value, list(INTERFACES))
        assert found == ok(variable, value)


def test_an_interface_nobody_chose_is_no_finding() -> None:
    assert check_interface("GLOO_SOCKET_IFNAME", None, ["lo"]) is None
    assert check_interface("GLOO_SOCKET_IFNAME", "", ["lo"]) is None


def test_one_missing_interface_among_several_is_named() -> None:
    found = check_interface("GLOO_SOCKET_IFNAME", "lo,nosuch0", list(INTERFACES))
    assert found is not None
    is_one_line(found, "no interface nosuch0")


@pytest.mark.parametrize("value", ["^lo", "=eth0", "^docker,lo"])
def test_the_signs_of_nccl_mean_nothing_to_gloo(value: str) -> None:
    found = check_interface("GLOO_SOCKET_IFNAME", value, list(INTERFACES))
    assert found is not None
    assert found.status == PROBLEM
    is_one_line(found, value, "NCCL", "GLOO_SOCKET_IFNAME=eth0")


@pytest.mark.parametrize(
    ("value", "status"), [("^lo", OK), ("eth", OK), ("=eth0", OK), ("nosuch,eth", OK), ("=x", PROBLEM)]
)
def test_nccl_takes_prefixes_and_signs(value: str, status: str) -> None:
    found = check_interface("NCCL_SOCKET_IFNAME", value, list(INTERFACES))
    assert found is not None
    assert found.status == status


@pytest.mark.parametrize("value", ["=eth", "^lo,eth"])
def test_nccl_without_any_interface_left_is_a_problem(value: str) -> None:
    """= asks for the exact name, so eth is not eth0; ^ leaves out all that begin so, here every one."""
    found = check_interface("NCCL_SOCKET_IFNAME", value, list(INTERFACES))
    assert found is not None
    assert found.status == PROBLEM


def test_a_port_that_is_taken_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = check_rendezvous_port("127.0.0.1", port)
    assert found.status == WARNING
    is_one_line(found, f"port {port}", "127.0.0.1", "--standalone")
    assert check_rendezvous_port("127.0.0.1", port).status == OK


def test_no_port_at_all_is_a_problem() -> None:
    assert check_rendezvous_port("127.0.0.1", 0) == ok("ports", "free on 127.0.0.1")
    found = check_rendezvous_port("203.0.113.1", 0)  # for documentation: no machine has it
    assert found.status == PROBLEM
    is_one_line(found, "203.0.113.1")


def test_what_a_launcher_left_behind_is_a_problem() -> None:
    """Every command would take itself for that rank, and wait for the others."""
    assert check_launcher({}).status == OK
    assert check_launcher({"MASTER_ADDR": "192.0.2.77"}).status == OK
    found = check_launcher(LAUNCHED)
    assert found.status == PROBLEM
    is_one_line(found, "rank 1 of 2", "unset RANK")


@pytest.mark.parametrize("left", [["RANK"], ["WORLD_SIZE"], ["RANK", "WORLD_SIZE", "MASTER_ADDR"]])
def test_half_a_launcher_is_a_problem(left: list[str]) -> None:
    found = check_launcher({name: LAUNCHED[name] for name in left})
    assert found.status == PROBLEM
    is_one_line(found, *LAUNCHED, "unset")


@pytest.mark.parametrize(("name", "value"), [("RANK", "abc"), ("RANK", "2"), ("RANK", "-1"), ("MASTER_PORT", "x")])
def test_a_launcher_that_contradicts_itself_is_a_problem(name: str, value: str) -> None:
    found = check_launcher({**LAUNCHED, name: value})
    assert found.status == PROBLEM
    is_one_line(found, value)


# --- software


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.10.0+cpu", PROBLEM),
        ("1.13.1", PROBLEM),
        ("nonsense", PROBLEM),
        ("2.11.0", OK),
        ("2.13.0", OK),
        ("2.13.1+cu130", OK),
        ("2.14.1", OK),
        ("2.15.0", OK),
        ("2.15.1+cu132", OK),
        ("2.16.0", WARNING),
        ("2.16.0.dev20261201", WARNING),
        ("3.0.0", WARNING),
    ],
)
def test_torch_has_to_be_one_that_was_tested(version: str, status: str) -> None:
    found = check_combinations({"torch": version, "numpy": "2.0.0"}, has_driver=False)
    assert [finding.status for finding in found] == [status]
    assert version in found[0].text
    if status != OK:
        is_one_line(found[0], "2.11")


def test_the_tested_versions_are_those_that_are_installed(repository: Path) -> None:
    """pyproject.toml, constraints.txt, `make test-versions` and the README name what doctor accepts."""
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TORCH, NEWEST_TESTED_TORCH))
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    major, minor = NEWEST_TESTED_TORCH
    assert f"torch>={oldest},<{major}.{minor + 1}" in project["dependencies"]
    pinned = re.search(r"^torch==(\d+\.\d+)\.", (repository / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] in TORCHES
    assert (TORCHES[0], TORCHES[-1]) == (oldest, newest)
    assert f"PyTorch {oldest} to {newest}" in (repository / "README.md").read_text()


def test_a_newer_torch_is_a_warning_and_no_failure() -> None:
    """pip does not install it, but somebody who has it can go on."""
    (found,) = check_combinations({"torch": "2.16.1", "numpy": "2.0.0"}, has_driver=False)
    is_one_line(found, "2.16.1", "2.11 to 2.15", "pip install 'torch==2.15.*'")
    assert found.status == WARNING
    assert DoctorReport({"software": [found]}).problems == []


def test_without_torch_or_numpy_the_fix_is_to_install_it() -> None:
    (found,) = check_combinations({}, has_driver=True)
    is_one_line(found, "pip install torch")
    assert found.status == PROBLEM
    is_one_line(check_combinations({"torch": "2.13.0"}, has_driver=False)[-1], "numpy", "pip install numpy")


def test_a_build_for_cpu_beside_a_driver_is_a_problem() -> None:
    versions = {"torch": "2.13.0+cpu", "numpy": "2.0.0"}
    assert [finding.status for finding in check_combinations(versions, has_driver=False)] == [OK]
    found = check_combinations(versions, has_driver=True)
    assert [finding.status for finding in found] == [OK, PROBLEM]
    is_one_line(found[1], "2.13.0+cpu", "CPU", "driver", "pip install")
    assert [f.status for f in check_combinations({**versions, "torch": "2.13.0"}, has_driver=True)] == [OK]


def test_torchvision_for_cuda_beside_torch_for_cpu_is_a_problem() -> None:
    versions = {"torch": "2.13.0+cpu", "numpy": "2.0.0", "torchvision": "0.28.0"}
    found = check_combinations(versions, has_driver=False)[-1]
    assert found.status == PROBLEM
    is_one_line(found, "torchvision", "0.28.0", "2.13.0+cpu", "pip uninstall torchvision")
    for torch, torchvision in (("2.13.0+cpu", "0.28.0+cpu"), ("2.13.0", "0.28.0")):
        fine = {**versions, "torch": torch, "torchvision": torchvision}
        assert [finding.status for finding in check_combinations(fine, has_driver=False)] == [OK]


def test_what_is_optional_says_how_to_get_it() -> None:
    found = check_optional({"jinja2": "3.1.6"}, find_program=lambda name: f"/opt/{name}" if name == "gcc" else None)
    by_name = {finding.what: finding for finding in found}
    assert {name for name, finding in by_name.items() if finding.status == OK} == {"jinja2", "gcc"}
    assert "3.1.6" in by_name["jinja2"].text
    others = [finding for finding in found if finding.what not in ("jinja2", "gcc")]
    assert {finding.what for finding in others} >= {"matplotlib", "accelerate", "lightning", "nvidia-smi"}
    assert all(finding.status == ABSENT and finding.fix for finding in others)


def test_what_is_optional_is_what_the_package_names(repository: Path) -> None:
    """Every extra for people is there, with what it is for; what can be used is not said to be of no use."""
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = {finding.what: finding for finding in check_optional({}, find_program=lambda _: None)}
    for extra in set(extras) - {"dev", "mpi", "docs"}:
        for package in extras[extra]:
            name = re.split("[^a-z0-9]", package)[0]
            assert "does not drive" not in found[name].text, name
            assert extra in ("benchmarks", "html") or f"everyrank[{extra}]" in found[name].fix, name
    assert set(TRACKERS) <= set(found)


def test_the_installed_versions_are_those_of_the_environment() -> None:
    import torch

    # the CUDA wheel is 2.15.0 for pip and 2.15.0+cu132 for Python
    assert torch.__version__.partition("+")[0] == installed_versions()["torch"].partition("+")[0]
    assert [finding.what for finding in check_software(installed_versions(), has_driver=False)][:2] == [
        "everyrank",
        "torch",
    ]


# --- what can run, and what is pasted


def test_layouts_need_ranks_dataparallel_two_devices_and_horovod_itself() -> None:
    def status(num_cuda: int, runs: bool, has_horovod: bool = True) -> dict[str, str]:
        return {finding.what: finding.status for finding in layouts_here(num_cuda, runs, has_horovod)}

    assert {name for name, value in status(0, runs=True).items() if value == ABSENT} == {"dataparallel"}
    assert {name for name, value in status(1, runs=True).items() if value == ABSENT} == {"dataparallel"}
    assert set(status(2, runs=True).values()) == {OK}
    assert {name for name, value in status(2, True, has_horovod=False).items() if value == ABSENT} == {"horovod"}
    assert set(status(2, runs=False).values()) == {ABSENT}


def test_devices_that_are_hidden_are_not_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = examining._devices({"devices": [], "cuda": "13.0"})
    assert found.status == ABSENT
    assert "CUDA_VISIBLE_DEVICES=''" in found.text
    assert found.fix
    assert "built without CUDA" in examining._devices({"devices": [], "cuda": None}).text
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "no driver" in examining._devices({"devices": [], "cuda": "13.0"}).text
    card = {"name": "H200", "memory_bytes": 139 * 2**30}
    assert examining._devices({"devices": [card], "cuda": "13.0"}) == ok("devices", "CPU, H200 (139 GiB)")


def _answers(wrong: list[str], devices: int = 0, nccl: bool = False) -> Callable[..., dict[int, Any]]:
    facts = {
        "devices": [{"name": "card", "memory_bytes": 2**30}] * devices,
        "cuda": "13.0" if nccl else None,
        "backends": {"gloo": True, "nccl": nccl, "mpi": False, "ucc": False},
        "rpc": ["TENSORPIPE"],
    }
    return lambda launch, *_: {rank: {"torch": facts, "wrong": wrong} for rank in range(launch.processes)}


def test_each_backend_is_tested_where_it_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def statuses() -> dict[str, str]:
        found, _ = examining._backends([], {"torch": "2.13.0"}, 5.0)
        return {finding.what: finding.status for finding in found}

    monkeypatch.setattr(examining, "run_ranks", _answers([], devices=2, nccl=True))
    here = {"devices": OK, "gloo": OK, "shm": OK, "nccl": OK, "rpc": OK}
    assert statuses() == here | {"mpi": ABSENT, "ucc": ABSENT}
    monkeypatch.setattr(examining, "run_ranks", _answers([], nccl=True))
    assert statuses()["nccl"] == ABSENT
    monkeypatch.setattr(examining, "run_ranks", _answers([]))
    assert statuses()["nccl"] == ABSENT


def test_rpc_is_said_to_be_there_or_not() -> None:
    assert "TENSORPIPE; it unpickles" in examining._rpc({"rpc": ["TENSORPIPE"]}).text
    assert examining._rpc({"rpc": []}).status == ABSENT


def test_a_wrong_answer_is_a_problem_of_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "run_ranks", _answers(["all-reduce average of 3 numbers: element 1 is 3, not 1.5"]))
    _, found = examining._selftest("gloo", 2, "cpu", 5.0)
    assert found.status == PROBLEM
    is_one_line(found, "gloo", "average", "3, not 1.5")


def test_ranks_that_cannot_talk_are_a_problem_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RankFailedError("rank 0 of 2: RuntimeError: connect failed")

    monkeypatch.setattr(examining, "run_ranks", fail)
    found, facts = examining._backends([], {"torch": "2.13.0"}, 5.0)
    assert facts is None
    assert found[-1].status == PROBLEM
    is_one_line(found[-1], "gloo", "connect failed")


def test_ranks_that_would_fail_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    bad = problem("GLOO_SOCKET_IFNAME", "nosuch0: there is no interface nosuch0", "unset GLOO_SOCKET_IFNAME")
    found, facts = examining._backends([bad], {"torch": "2.13.0"}, 5.0)
    assert facts is None
    assert found[0].status == ABSENT  # the problem has been named already
    assert "GLOO_SOCKET_IFNAME" in found[0].text
    assert examining._backends([], {}, 5.0)[0][0].status == ABSENT


def test_what_is_pasted_leaves_out_names_addresses_and_paths() -> None:
    sections = {
        "machine": [ok("cores", "2"), ok("temporary files", "/home/ann/tmp, 3 GiB free")],
        "network": [
            warning("host name", "anns-laptop is 127.0.1.1", "fix"),
            ok("interfaces", "lo (127.0.0.1), eth0 (192.0.2.2)"),
        ],
        "optional": [ok("gcc", "/home/ann/bin/gcc, for --layout ...:compile on CPU")],
        "layouts": [absent("dataparallel", "not verified here: needs 2 CUDA devices")],
    }
    text = paste(DoctorReport(sections, {"torch": "2.13.0"}))
    assert [word for word in ("ann", "laptop", "127.0.1.1", "192.0.2.2", "/home") if word in text] == []
    assert "torch=2.13.0" in text
    assert "ok      cores: 2" in text
    assert "warning host name:" in text
    assert "dataparallel" in text


def test_problems_are_what_breaks_runs() -> None:
    bad = problem("threads", "OMP_NUM_THREADS=64", "unset it")
    sections = {"a": [ok("x", "y"), bad], "b": [warning("x", "y", "z"), absent("x", "y")]}
    assert DoctorReport(sections).problems == [bad]
    assert json.loads(json.dumps(DoctorReport(sections).as_json()))["sections"]["a"][1]["fix"] == "unset it"


# --- the self-test, in real ranks


def test_the_self_test_finds_nothing_where_all_is_well(ranks: Any) -> None:
    assert ranks(2, lambda world: _wrong_answers(world, 3) + _wrong_answers(world, 1500)) == [[], []]


def _with_average_as_sum(world: World) -> list[str]:
    real = dist.all_reduce

    def patched(tensor: Any, op: Any = dist.ReduceOp.SUM, **words: Any) -> Any:
        return real(tensor, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **words)

    dist.all_reduce = patched
    try:
        return _wrong_answers(world, 3)
    finally:
        dist.all_reduce = real


def test_the_self_test_finds_an_average_that_is_a_sum(ranks: Any) -> None:
    for wrong in ranks(2, _with_average_as_sum):
        assert len(wrong) == 1
        assert "average" in wrong[0]
        assert "is 3, not 1.5" in wrong[0]


def _with_collective_that_does_nothing(world: World, name: str) -> list[str]:
    real = getattr(dist, name)
    setattr(dist, name, lambda tensors, *_, **__: [t.zero_() for t in tensors] if name == "all_gather" else None)
    try:
        return _wrong_answers(world, 3)
    finally:
        setattr(dist, name, real)


@pytest.mark.parametrize(
    ("name", "word"), [("all_reduce", "sum"), ("all_gather", "gather"), ("broadcast", "broadcast")]
)
def test_the_self_test_finds_a_collective_that_does_nothing(ranks: Any, name: str, word: str) -> None:
    wrong = ranks(2, _with_collective_that_does_nothing, name)
    assert word in wrong[1][0]  # rank 0 has what it broadcasts
    if name == "all_reduce":
        assert any("maximum" in text for text in wrong[0])  # rank 1 has it already


# --- the command


def test_doctor_on_this_machine(tmp_path: Path) -> None:
    """Its exit status, its lines on stderr and its file agree; nothing private is in what is to be pasted."""
    done = doctor("--json", tmp_path / "new" / "found.json")
    found = json.loads((tmp_path / "new" / "found.json").read_text())
    assert list(found["sections"]) == ["software", "machine", "network", "backends", "layouts", "optional"]
    rows = [row for section in found["sections"].values() for row in section]
    problems = [f"everyrank: {row['what']}: {row['text']}; {row['fix']}" for row in rows if row["status"] == "problem"]
    assert problem_lines(done) == problems
    assert done.returncode == (1 if problems else 0)
    assert found["versions"] == installed_versions()
    gloo = next(row for row in rows if row["what"] == "gloo")
    assert gloo["status"] == "ok"
    assert "average" in gloo["text"]
    block = done.stdout[done.stdout.index("<details>") : done.stdout.index("</details>")]
    words = block.replace("127.0.0.1", "").replace(":", " ").split()
    addresses = [address for row in rows if row["what"] == "interfaces" for address in row["text"].split("(")[1:]]
    private = [socket.gethostname(), *[address.partition(")")[0] for address in addresses]]
    assert [word for word in private if word != "127.0.0.1" and word in words] == []
    assert str(Path.home()) not in block
    assert str(tmp_path) not in block
    assert tempfile.gettempdir() + "," not in block


def test_doctor_with_an_interface_that_is_not_there() -> None:
    done = doctor(GLOO_SOCKET_IFNAME="nosuch0")
    assert done.returncode == 1
    # what could not be tested because of a problem is no second problem
    (line,) = [line for line in problem_lines(done) if "nosuch0" in line or "gloo" in line.lower()]
    assert line.startswith("everyrank: GLOO_SOCKET_IFNAME")
    assert "nosuch0" in line
    assert "unset GLOO_SOCKET_IFNAME" in line


@pytest.mark.integration
def test_doctor_with_more_threads_than_cores() -> None:
    done = doctor(OMP_NUM_THREADS="4096")
    assert done.returncode == 1
    (line,) = problem_lines(done)
    assert "OMP_NUM_THREADS=4096" in line
    assert "unset OMP_NUM_THREADS" in line


def test_doctor_with_shared_memory_that_is_full(namespaces: None, python: ForkServer) -> None:
    full = "mount -t tmpfs -o size=1m tmpfs /dev/shm; dd if=/dev/zero of=/dev/shm/left bs=4k count=256 2>/dev/null"
    done = doctor(before=full, program=python.programs / "python")
    assert done.returncode == 1
    [line] = [line for line in problem_lines(done) if "/dev/shm has" in line]
    assert "has 0 MiB" in line
    assert "--shm-size" in line


@pytest.mark.integration
def test_doctor_with_a_host_name_that_is_loopback(namespaces: None, tmp_path: Path) -> None:
    """The cause and the fix stand on one line, as those of every other illness do."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 box-of-ann\n")
    done = doctor(before=f"hostname box-of-ann; mount --bind {tmp_path}/hosts /etc/hosts")
    assert done.returncode in (0, 1)
    problem_lines(done)
    assert "box-of-ann" not in done.stdout[done.stdout.index("<details>") :]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "box-of-ann is 127.0.1.1" in line]
    assert lines
    assert any("/etc/hosts" in line for line in lines), lines


def test_doctor_with_a_host_name_of_64_letters(namespaces: None) -> None:
    """Linux takes it, and a lookup cannot."""
    done = doctor(before=f"hostname {'a' * 64}", GLOO_SOCKET_IFNAME="nosuch0")
    assert "a" * 64 in done.stdout, done.stderr
    assert done.returncode == 1
    problem_lines(done)


def test_doctor_without_a_folder_for_temporary_files(namespaces: None) -> None:
    """As in a container that is read-only."""
    # what is in them stays readable: this checkout may be there
    read_only = "mount --bind $folder $folder; mount -o remount,ro,bind $folder"
    folders = f"for folder in /tmp /var/tmp /usr/tmp; do [ ! -d $folder ] || {{ {read_only}; }}; done"
    done = doctor(before=f"{folders}; cd /tmp", GLOO_SOCKET_IFNAME="nosuch0", TMPDIR="/tmp")
    assert done.returncode == 1
    assert any("temporary files" in line and "TMPDIR" in line for line in problem_lines(done)), done.stderr


def test_what_doctor_says_of_a_failure_does_not_paste_its_address(python: ForkServer) -> None:
    """Left over from a launcher: rank 1 finds no rank 0 at an address that is nobody else's business."""
    done = doctor("--timeout", "2", program=python.programs / "python", **LAUNCHED)
    assert done.returncode == 1
    assert "192.0.2.77" in done.stderr  # the person at the screen needs it
    assert "192.0.2.77" not in done.stdout[done.stdout.index("<details>") :]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "abc", "inf"])
def test_doctor_refuses_a_timeout_whatever_else_is_wrong(
    seconds: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same mistake has the same answer on every machine, before anything is looked at."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    line = refused(capsys, "doctor", "--timeout", seconds)
    assert "--timeout" in line
    assert seconds in line


def test_doctor_refuses_a_file_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "found.json"):
        line = refused(capsys, "doctor", "--json", path)
        assert str(path) in line
        assert "give another path" in line


def test_doctor_on_a_terminal_without_unicode() -> None:
    done = doctor(GLOO_SOCKET_IFNAME="nosuch0", PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert any("nosuch0" in line for line in problem_lines(done))


def test_doctor_whose_reader_has_gone_still_says_what_is_wrong() -> None:
    """`everyrank doctor | head -1`"""
    reading, writing = os.pipe()
    os.close(reading)
    own = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    command = [sys.executable, "-m", "everyrank", "doctor"]
    environment = {**own, "GLOO_SOCKET_IFNAME": "nosuch0"}
    with os.fdopen(writing) as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, env=environment, check=False
        )
    assert any("nosuch0" in line for line in problem_lines(done)), done.stderr
    assert done.returncode == 1
