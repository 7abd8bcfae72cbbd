"""`everyrank doctor`: checks with mocked machines, the self-test with wrong collectives, and the real command."""

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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everyrank.doctor import CheckResult, DoctorReport, paste
from everyrank.doctor.checks import layouts_here
from everyrank.doctor.machine import (
    cgroup_quota,
    check_cores,
    check_files,
    check_machine,
    check_memory_size,
    check_shared_memory,
    check_space,
    check_threads,
)
from everyrank.doctor.memory import _this_machine, memory_results
from everyrank.doctor.network import (
    check_host_name,
    check_interface,
    check_launcher,
    check_network,
    check_rendezvous_port,
)
from everyrank.doctor.results import ABSENT, OK, PROBLEM, WARNING, absent, ok, problem, warning
from everyrank.doctor.selftest import _torch_facts, _wrong_answers
from everyrank.doctor.software import (
    NEWEST_TESTED_TORCH,
    OLDEST_TORCH,
    check_combinations,
    check_optional,
    check_software,
    installed_versions,
)
from everyrank.errors import RankFailedError
from everyrank.launch.host_info import container_memory_bytes
from everyrank.train.trackers import TRACKERS
from everyrank.world import World
from forkserver import ForkServer
from launching import OPEN_MPI, SRUN
from processes import refusal_message
from try_versions import TORCHES

checks_module: Any = importlib.import_module("everyrank.doctor.checks")

MIB = 2**20


def test_memory_results_compare_each_layout_with_the_memory_of_the_machine() -> None:
    """A layout that does not fit is a problem, with the smallest change that makes it fit."""
    common = {"allocated_bytes": 3 * 2**30, "note": "traced whole"}
    change = {"what": "bf16", "command": "everyrank train w.py --layout ddp:precision=bf16"}
    plan = {
        "cluster": {"memory_bytes": 2 * 2**30},
        "layouts": [
            {"layout": "fsdp", "verdict": "fits", **common},
            {"layout": "zero1", "verdict": "may not fit", **common},
            {"layout": "ddp", "verdict": "does not fit", "change": change, **common},
            {"layout": "tensor", "verdict": "not possible", "reason": "no tensor_plan"},
        ],
    }
    results = memory_results(plan)
    assert [result.status for result in results] == [OK, WARNING, PROBLEM, ABSENT]
    assert results[2].line == f"ddp: does not fit: 3 GiB of 2 GiB for each rank; bf16: {change['command']}"
    assert "no tensor_plan" in results[3].text


@pytest.mark.parametrize(
    ("device", "processes", "gib"), [(None, None, 80), (None, 2, 80), (None, 3, 40), ("cuda", 4, 40)]
)
def test_ranks_that_share_a_gpu_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, device: str | None, processes: int | None, gib: int
) -> None:
    properties = SimpleNamespace(name="card", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert _this_machine(device, processes).gpu.memory == gib * 2**30
    assert _this_machine("cpu", processes).gpu.name == "cpu"


INTERFACES = {"lo": "127.0.0.1", "eth0": "192.0.2.2"}
LAUNCHER_VARIABLES = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "192.0.2.77",
    "MASTER_PORT": "29501",
}
SRUN_SHELL = {  # in a shell that `srun --pty bash` starts
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_NNODES": "1",
}
REMOVED_VARIABLES = (
    *LAUNCHER_VARIABLES,
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
)


def assert_one_line_with_fix(result: CheckResult, *texts: str, status: str = PROBLEM) -> None:
    """Check that the result has this status and a fix, and that its one line contains all `texts`."""
    assert result.status == status, result
    assert result.fix
    assert result.line.isprintable(), result.line
    assert [text for text in texts if text not in result.line] == [], result.line


def doctor(*arguments: str | Path, setup: str = "", program: Path | str = sys.executable, **environment: str) -> Any:
    """Run `everyrank doctor` without inherited variables of launchers, threads and interfaces.

    `setup` is shell code that runs before it.
    """
    command = [program, "-m", "everyrank", "doctor", *map(str, arguments)]
    if setup:
        command = ["unshare", "-m", "-u", "sh", "-e", "-c", setup + '\nexec "$@"', "sh", *command]
    inherited = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**inherited, **environment}, check=False
    )


def problem_lines(ended: Any) -> list[str]:
    """Return the lines on stderr, all of which doctor printed: there is no traceback."""
    lines = ended.stderr.splitlines()
    assert "Traceback" not in ended.stderr, ended.stderr
    assert all(line.startswith("everyrank: ") for line in lines), ended.stderr
    return lines


@pytest.fixture
def namespaces() -> None:
    """Skip the test if this machine cannot create mount and host name namespaces."""
    reason = "a full /dev/shm, a read-only /tmp or another host name is not verified for real"
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip(f"{reason}: needs Linux, root and unshare")
    ended = subprocess.run(
        ["unshare", "-m", "-u", "sh", "-e", "-c", "mount -t tmpfs tmpfs /dev/shm; hostname box"],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        pytest.skip(f"{reason}: {ended.stderr.strip()}")


# --- machine


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_more_threads_than_cores_are_a_problem(name: str) -> None:
    assert check_threads({name: "4"}, cores=4).status == OK
    assert check_threads({name: "1"}, cores=4).status == OK
    result = check_threads({name: "5"}, cores=4)
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, f"{name}=5", "4 cores", f"unset {name}", f"{name}=2")


def test_unset_thread_variables_are_ok() -> None:
    assert check_threads({}, cores=1).status == OK


def test_every_thread_variable_is_checked() -> None:
    result = check_threads({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "64"}, cores=2)
    assert_one_line_with_fix(result, "MKL_NUM_THREADS=64", "unset MKL_NUM_THREADS")


def test_suggested_number_of_threads_is_at_least_one() -> None:
    assert_one_line_with_fix(check_threads({"OMP_NUM_THREADS": "2"}, cores=1), "OMP_NUM_THREADS=1 ")


@pytest.mark.parametrize("text", ["abc", "0", "", "-1", "2.5", "1e3", "²"])
def test_invalid_number_of_threads_is_a_problem(text: str) -> None:
    result = check_threads({"OMP_NUM_THREADS": text}, cores=4)
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, f"OMP_NUM_THREADS={text} ", "unset OMP_NUM_THREADS")


def test_number_of_threads_with_too_many_digits_is_a_problem() -> None:
    assert check_threads({"OMP_NUM_THREADS": "9" * 5000}, cores=4).status == PROBLEM


def test_number_of_threads_for_each_nesting_level() -> None:
    """`OMP_NUM_THREADS=4,2` is valid OpenMP: 4 threads, and 2 in nested parallel regions."""
    assert check_threads({"OMP_NUM_THREADS": "4,2"}, cores=4).status == OK
    assert check_threads({"OMP_NUM_THREADS": "64,2"}, cores=4).status == PROBLEM


def test_container_quota_below_visible_cores_is_a_warning() -> None:
    assert check_cores(8, 8, None).status == OK
    assert check_cores(8, 8, 8.0).status == OK
    assert check_cores(4, 8, 6.0).status == OK
    result = check_cores(8, 8, 1.5)
    assert result.status == WARNING
    assert_one_line_with_fix(result, "8", "1.5", "taskset -c 0-1 ", status=WARNING)
    assert_one_line_with_fix(check_cores(8, 8, 0.5), "taskset -c 0-0 ", status=WARNING)


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("abc 1", None), ("5", None)]
)
def test_cgroup_quota_is_read_from_cpu_max(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cgroup_quota(tmp_path) == quota


def test_no_cgroup_means_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path / "nowhere") is None


def test_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    assert check_memory_size(128 * 2**30, 2**30, 128 * 2**30).text == "128.0 GiB, 1.0 GiB of it free"
    assert check_memory_size(128 * 2**30, 2**30, 2**31).text.startswith("2.0 GiB for this container")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1048576\n")
    assert container_memory_bytes(tmp_path) == MIB


def test_nearly_full_shared_memory_is_a_problem() -> None:
    result = check_shared_memory(1024 * MIB, 16 * MIB - 1)
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, "/dev/shm", "1.0 GiB", "--shm-size")
    assert check_shared_memory(64 * MIB, 0).status == PROBLEM


def test_little_shared_memory_is_a_warning() -> None:
    assert check_shared_memory(1024 * MIB, 16 * MIB).status == WARNING
    result = check_shared_memory(1024 * MIB, 128 * MIB - 1)
    assert_one_line_with_fix(result, "/dev/shm", "--shm-size", status=WARNING)
    assert check_shared_memory(1024 * MIB, 128 * MIB).status == OK


def test_too_small_shared_memory_is_a_problem_like_a_full_one() -> None:
    """One free megabyte holds as few batches in a large /dev/shm as in a small one."""
    assert check_shared_memory(1024 * MIB, MIB).status == PROBLEM
    assert check_shared_memory(MIB, MIB).status == PROBLEM


def test_read_only_shared_memory_is_a_problem() -> None:
    result = check_shared_memory(1024 * MIB, 1024 * MIB, writable=False)
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, "/dev/shm", "chmod 1777 /dev/shm")


def test_low_limit_of_open_files_is_a_problem() -> None:
    unlimited = resource.RLIM_INFINITY
    assert check_files(1024, 1024).status == OK
    assert check_files(unlimited, unlimited).status == OK
    assert "unlimited" in check_files(unlimited, unlimited).text
    for hard, fix in ((unlimited, "ulimit -n 4096"), (524288, "ulimit -n 4096"), (2048, "ulimit -n 2048")):
        result = check_files(1023, hard)
        assert result.status == PROBLEM
        assert_one_line_with_fix(result, "1023", fix)


def test_fix_for_open_files_differs_from_the_current_limit() -> None:
    """If the hard limit is as low, `ulimit -n` with the same number changes nothing."""
    result = check_files(256, 256)
    assert result.status == PROBLEM
    assert result.fix
    assert not result.fix.startswith("ulimit -n 256 ")


def test_temporary_folder_needs_space_and_write_permission(tmp_path: Path) -> None:
    assert check_space(tmp_path, 64 * MIB).status == OK
    assert_one_line_with_fix(check_space(tmp_path, 64 * MIB - 1), str(tmp_path), "64 MiB", "TMPDIR")
    assert_one_line_with_fix(check_space(tmp_path, 2**40, writable=False), str(tmp_path), "TMPDIR")
    assert check_space(tmp_path, 0).status == check_space(tmp_path, 2**40, writable=False).status == PROBLEM


def test_missing_temporary_folder_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tempfile.gettempdir` raises if there is none: in a read-only container, or on a full disk."""

    def raise_error() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", raise_error)
    result = next(row for row in check_machine({}) if row.what == "temporary files")
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, "TMPDIR")


def test_check_machine_runs_every_check() -> None:
    names = [result.what for result in check_machine({})]
    assert {"cores", "threads", "memory", "open files", "temporary files"} <= set(names)
    assert sys.platform != "linux" or "shared memory" in names


# --- network


@pytest.mark.parametrize("addresses", [["127.0.1.1"], ["127.0.0.1", "::1"], ["::1"]])
def test_host_name_that_resolves_to_loopback_is_reported_with_the_fix(addresses: list[str]) -> None:
    result = check_host_name("box", addresses, INTERFACES)
    assert_one_line_with_fix(
        result, "box", *addresses, "loopback", "/etc/hosts", "GLOO_SOCKET_IFNAME=eth0", status=WARNING
    )


@pytest.mark.parametrize("addresses", [["192.0.2.2"], ["127.0.1.1", "192.0.2.2"], ["2001:db8::7"], ["fe80::1%eth0"]])
def test_host_name_with_a_non_loopback_address_is_ok(addresses: list[str]) -> None:
    assert check_host_name("box", addresses, INTERFACES).status == OK


def test_host_name_without_an_address_is_reported_with_the_fix() -> None:
    assert_one_line_with_fix(
        check_host_name("box", [], INTERFACES), "box", "/etc/hosts", "GLOO_SOCKET_IFNAME=eth0", status=WARNING
    )


def test_suggested_interface_is_never_loopback() -> None:
    result = check_host_name("box", ["127.0.1.1"], {"lo": "::1", "wlan0": "fe80::12%wlan0", "eth0": "192.0.2.2"})
    assert_one_line_with_fix(result, "GLOO_SOCKET_IFNAME=wlan0", status=WARNING)
    for interfaces in ({}, {"lo": "127.0.0.1", "lo2": "::1"}):
        result = check_host_name("box", ["127.0.1.1"], interfaces)
        assert_one_line_with_fix(result, "GLOO_SOCKET_IFNAME", status=WARNING)
        assert "GLOO_SOCKET_IFNAME=" not in result.line


@pytest.mark.parametrize("name", ["a" * 64, "a..b"])
def test_host_name_that_cannot_be_resolved_is_reported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Linux accepts a host name of 64 letters or with two dots in a row. A DNS label has 1 to 63 letters."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    result = next(row for row in check_network({}) if row.what == "host name")
    assert_one_line_with_fix(result, name, "/etc/hosts", status=WARNING)


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"])
def test_missing_interface_is_reported_with_the_existing_ones(variable: str) -> None:
    result = check_interface(variable, "nosuch0", list(INTERFACES))
    assert result is not None
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, variable, "nosuch0", "lo, eth0", f"unset {variable}")


@pytest.mark.parametrize("value", ["lo", "eth0", "eth0,lo"])
def test_existing_interfaces_are_ok(value: str) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        result = check_interface(variable, value, list(INTERFACES))
        assert result == ok(variable, value)


def test_unset_interface_variable_gives_no_result() -> None:
    assert check_interface("GLOO_SOCKET_IFNAME", None, ["lo"]) is None
    assert check_interface("GLOO_SOCKET_IFNAME", "", ["lo"]) is None


def test_one_missing_interface_in_a_list_is_reported() -> None:
    result = check_interface("GLOO_SOCKET_IFNAME", "lo,nosuch0", list(INTERFACES))
    assert result is not None
    assert_one_line_with_fix(result, "no interface nosuch0")


@pytest.mark.parametrize("value", ["^lo", "=eth0", "^docker,lo"])
def test_gloo_does_not_support_the_interface_prefixes_of_nccl(value: str) -> None:
    result = check_interface("GLOO_SOCKET_IFNAME", value, list(INTERFACES))
    assert result is not None
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, value, "NCCL", "GLOO_SOCKET_IFNAME=eth0")


@pytest.mark.parametrize(
    ("value", "status"), [("^lo", OK), ("eth", OK), ("=eth0", OK), ("nosuch,eth", OK), ("=x", PROBLEM)]
)
def test_nccl_matches_interfaces_by_prefix(value: str, status: str) -> None:
    result = check_interface("NCCL_SOCKET_IFNAME", value, list(INTERFACES))
    assert result is not None
    assert result.status == status


@pytest.mark.parametrize("value", ["=eth", "^lo,eth"])
def test_nccl_filter_that_matches_no_interface_is_a_problem(value: str) -> None:
    """= matches the exact name, so eth does not match eth0. ^ excludes interfaces by prefix, here all of them."""
    result = check_interface("NCCL_SOCKET_IFNAME", value, list(INTERFACES))
    assert result is not None
    assert result.status == PROBLEM


def test_taken_rendezvous_port_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = check_rendezvous_port("127.0.0.1", port)
    assert result.status == WARNING
    assert_one_line_with_fix(result, f"port {port}", "127.0.0.1", "--standalone", status=WARNING)
    assert check_rendezvous_port("127.0.0.1", port).status == OK


def test_address_without_a_free_port_is_a_problem() -> None:
    assert check_rendezvous_port("127.0.0.1", 0) == ok("ports", "free on 127.0.0.1")
    result = check_rendezvous_port("203.0.113.1", 0)  # reserved for documentation, so no machine has it
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, "203.0.113.1")


def test_leftover_launcher_variables_are_a_problem() -> None:
    """With them, every command would act as that rank and wait for the others."""
    assert check_launcher({}).status == OK
    assert check_launcher({"MASTER_ADDR": "192.0.2.77"}).status == OK
    result = check_launcher(LAUNCHER_VARIABLES)
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, "rank 1 of 2", "unset RANK")


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (SRUN, "wait for the other ranks"),
        (SRUN_SHELL, "start no others"),
        (OPEN_MPI, "wait for the other ranks"),
        (LAUNCHER_VARIABLES, "wait for the other ranks"),
    ],
)
def test_fix_names_the_variables_that_make_a_rank(environment: dict[str, str], text: str) -> None:
    """A launcher sets its own variables, so there may be no RANK to unset."""
    result = check_launcher(environment)
    assert_one_line_with_fix(result, text)
    names = result.fix.partition(",")[0].removeprefix("unset ").split()
    assert set(names) <= set(environment)
    assert check_launcher({name: value for name, value in environment.items() if name not in names}).status == OK


@pytest.mark.parametrize("remaining", [["RANK"], ["WORLD_SIZE"], ["RANK", "WORLD_SIZE", "MASTER_ADDR"]])
def test_incomplete_launcher_variables_are_a_problem(remaining: list[str]) -> None:
    result = check_launcher({name: LAUNCHER_VARIABLES[name] for name in remaining})
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, *LAUNCHER_VARIABLES, "unset")


@pytest.mark.parametrize(("name", "value"), [("RANK", "abc"), ("RANK", "2"), ("RANK", "-1"), ("MASTER_PORT", "x")])
def test_contradicting_launcher_variables_are_a_problem(name: str, value: str) -> None:
    result = check_launcher({**LAUNCHER_VARIABLES, name: value})
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, value)


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
def test_untested_torch_versions_are_reported(version: str, status: str) -> None:
    results = check_combinations({"torch": version, "numpy": "2.0.0"}, driver=None)
    assert [result.status for result in results] == [status]
    assert version in results[0].text
    if status != OK:
        assert_one_line_with_fix(results[0], "2.11", status=status)


def test_supported_torch_versions_agree_in_all_files(repository: Path) -> None:
    """pyproject.toml, constraints.txt, `make test-versions` and the README name the versions that doctor accepts."""
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TORCH, NEWEST_TESTED_TORCH))
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    major, minor = NEWEST_TESTED_TORCH
    assert f"torch>={oldest},<{major}.{minor + 1}" in project["dependencies"]
    pinned = re.search(r"^torch==(\d+\.\d+)\.", (repository / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] in TORCHES
    assert (TORCHES[0], TORCHES[-1]) == (oldest, newest)
    assert f"PyTorch {oldest} to {newest}" in (repository / "README.md").read_text()


def test_newer_torch_is_only_a_warning() -> None:
    """pip does not install it, but a user who has it can continue."""
    (result,) = check_combinations({"torch": "2.16.1", "numpy": "2.0.0"}, driver=None)
    assert_one_line_with_fix(result, "2.16.1", "2.11 to 2.15", "pip install 'torch==2.15.*'", status=WARNING)
    assert DoctorReport({"software": [result]}).problems == []


def test_fix_for_missing_torch_or_numpy_is_to_install_it() -> None:
    (result,) = check_combinations({}, driver="/dev/nvidiactl")
    assert_one_line_with_fix(result, "pip install torch")
    assert result.status == PROBLEM
    assert_one_line_with_fix(check_combinations({"torch": "2.13.0"}, driver=None)[-1], "numpy", "pip install numpy")


def test_cpu_build_of_torch_with_a_gpu_driver_is_a_problem() -> None:
    versions = {"torch": "2.13.0+cpu", "numpy": "2.0.0"}
    assert [result.status for result in check_combinations(versions, driver=None)] == [OK]
    results = check_combinations(versions, driver="/dev/nvidiactl")
    assert [result.status for result in results] == [OK, PROBLEM]
    assert_one_line_with_fix(results[1], "2.13.0+cpu", "CPU", "driver", "pip install")
    assert [row.status for row in check_combinations({**versions, "torch": "2.13.0"}, driver="/dev/nvidiactl")] == [OK]


@pytest.mark.parametrize("driver", ["/dev/kfd", "/dev/dxg"])
def test_cpu_build_of_torch_with_other_graphics_is_no_problem(driver: str) -> None:
    """They exist with graphics that torch does not support, too."""
    results = check_combinations({"torch": "2.13.0+cpu", "numpy": "2.0.0"}, driver=driver)
    assert [result.status for result in results] == [OK, WARNING]
    assert driver in results[1].line
    assert "NVIDIA" not in results[1].line


def test_torchvision_for_cuda_with_torch_for_cpu_is_a_problem() -> None:
    versions = {"torch": "2.13.0+cpu", "numpy": "2.0.0", "torchvision": "0.28.0"}
    result = check_combinations(versions, driver=None)[-1]
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, "torchvision", "0.28.0", "2.13.0+cpu", "pip uninstall torchvision")
    for torch_version, torchvision in (("2.13.0+cpu", "0.28.0+cpu"), ("2.13.0", "0.28.0")):
        matching_versions = {**versions, "torch": torch_version, "torchvision": torchvision}
        assert [row.status for row in check_combinations(matching_versions, driver=None)] == [OK]


def test_missing_optional_software_has_an_install_command() -> None:
    results = check_optional({"jinja2": "3.1.6"}, find_program=lambda name: f"/opt/{name}" if name == "gcc" else None)
    by_name = {result.what: result for result in results}
    assert {name for name, result in by_name.items() if result.status == OK} == {"jinja2", "gcc"}
    assert "3.1.6" in by_name["jinja2"].text
    missing = [result for result in results if result.what not in ("jinja2", "gcc")]
    assert {result.what for result in missing} >= {"matplotlib", "accelerate", "lightning", "nvidia-smi"}
    assert all(result.status == ABSENT and result.fix for result in missing)


def test_optional_software_covers_every_extra_of_the_package(repository: Path) -> None:
    """Each package of a user extra is listed with the extra, and is described as usable."""
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    result_by_name = {result.what: result for result in check_optional({}, find_program=lambda _: None)}
    for extra in set(extras) - {"dev", "mpi", "docs"}:
        for package in extras[extra]:
            name = re.split("[^a-z0-9]", package)[0]
            assert "does not drive" not in result_by_name[name].text, name
            assert extra in ("benchmarks", "html") or f"everyrank[{extra}]" in result_by_name[name].fix, name
    assert set(TRACKERS) <= set(result_by_name)


def test_installed_versions_are_those_of_this_environment() -> None:
    import torch

    # the CUDA wheel is 2.15.0 for pip and 2.15.0+cu132 for Python
    assert torch.__version__.partition("+")[0] == installed_versions()["torch"].partition("+")[0]
    assert [result.what for result in check_software(installed_versions(), driver=None)][:2] == [
        "everyrank",
        "torch",
    ]


# --- what can run, and what is pasted


def test_requirements_of_layouts() -> None:
    """All layouts need working ranks, dataparallel needs two GPUs, and horovod needs Horovod."""

    def statuses(num_cuda: int, runs: bool, has_horovod: bool = True) -> dict[str, str]:
        return {result.what: result.status for result in layouts_here(num_cuda, runs, has_horovod)}

    assert {name for name, value in statuses(0, runs=True).items() if value == ABSENT} == {"dataparallel"}
    assert {name for name, value in statuses(1, runs=True).items() if value == ABSENT} == {"dataparallel"}
    assert set(statuses(2, runs=True).values()) == {OK}
    assert {name for name, value in statuses(2, True, has_horovod=False).items() if value == ABSENT} == {"horovod"}
    assert set(statuses(2, runs=False).values()) == {ABSENT}


def test_layouts_of_several_ranks_need_a_backend_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cuda, backend, names in ((0, "shm", {"single"}), (2, "nccl", {"single", "dataparallel"})):
        run_ranks = _rank_results([], devices=num_cuda, nccl=num_cuda > 0)

        def fail_in(launch: Any, *arguments: Any, run_ranks: Any = run_ranks, backend: str = backend) -> dict[int, Any]:
            if launch.backend == backend:
                raise RankFailedError("rank 0 of 2: no peer access")
            return run_ranks(launch, *arguments)

        monkeypatch.setattr(checks_module, "run_ranks", fail_in)
        sections = checks_module.run_checks().sections
        assert {result.what for result in sections["layouts"] if result.status == OK} == names


def test_driver_that_is_too_old_is_a_problem_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    facts = _torch_facts()
    assert facts["devices"] == []
    assert_one_line_with_fix(checks_module._devices(facts), "too old", "--device cpu")


def test_reason_for_no_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is CUDA_VISIBLE_DEVICES, a build without CUDA, or a missing driver."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    facts: dict[str, Any] = {"devices": [], "cuda_error": ""}
    result = checks_module._devices({**facts, "cuda": "13.0"})
    assert result.status == ABSENT
    assert "CUDA_VISIBLE_DEVICES=''" in result.text
    assert result.fix
    assert "built without CUDA" in checks_module._devices({**facts, "cuda": None}).text
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "no driver" in checks_module._devices({**facts, "cuda": "13.0"}).text
    gpu = {"name": "H200", "memory_bytes": 139 * 2**30}
    assert checks_module._devices({**facts, "devices": [gpu], "cuda": "13.0"}) == ok("devices", "CPU, H200 (139 GiB)")


def _rank_results(wrong: list[str], devices: int = 0, nccl: bool = False) -> Callable[..., dict[int, Any]]:
    facts = {
        "devices": [{"name": "card", "memory_bytes": 2**30}] * devices,
        "cuda": "13.0" if nccl else None,
        "cuda_error": "",
        "backends": {"gloo": True, "nccl": nccl, "mpi": False, "ucc": False},
        "rpc": ["TENSORPIPE"],
    }
    return lambda launch, *_: {rank: {"torch": facts, "wrong": wrong} for rank in range(launch.processes)}


def test_each_backend_is_tested_if_it_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def statuses() -> dict[str, str]:
        results, _ = checks_module._backends([], {"torch": "2.13.0"}, 5.0)
        return {result.what: result.status for result in results}

    monkeypatch.setattr(checks_module, "run_ranks", _rank_results([], devices=2, nccl=True))
    expected = {"devices": OK, "gloo": OK, "shm": OK, "nccl": OK, "rpc": OK}
    assert statuses() == expected | {"mpi": ABSENT, "ucc": ABSENT}
    monkeypatch.setattr(checks_module, "run_ranks", _rank_results([], nccl=True))
    assert statuses()["nccl"] == ABSENT
    monkeypatch.setattr(checks_module, "run_ranks", _rank_results([]))
    assert statuses()["nccl"] == ABSENT


def test_rpc_availability_is_reported() -> None:
    assert "TENSORPIPE; it unpickles" in checks_module._rpc({"rpc": ["TENSORPIPE"]}).text
    assert checks_module._rpc({"rpc": []}).status == ABSENT


def test_wrong_collective_result_is_a_problem_of_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks_module, "run_ranks", _rank_results(["all-reduce average of 3 numbers: element 1 is 3, not 1.5"])
    )
    _, result = checks_module._selftest("gloo", 2, "cpu", 5.0)
    assert result.status == PROBLEM
    assert_one_line_with_fix(result, "gloo", "average", "3, not 1.5")


def test_ranks_that_cannot_connect_are_a_problem_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RankFailedError("rank 0 of 2: RuntimeError: connect failed")

    monkeypatch.setattr(checks_module, "run_ranks", fail)
    results, facts = checks_module._backends([], {"torch": "2.13.0"}, 5.0)
    assert facts is None
    assert results[-1].status == PROBLEM
    assert_one_line_with_fix(results[-1], "gloo", "connect failed")


def test_no_ranks_are_started_after_a_network_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    interface_problem = problem(
        "GLOO_SOCKET_IFNAME", "nosuch0: there is no interface nosuch0", "unset GLOO_SOCKET_IFNAME"
    )
    results, facts = checks_module._backends([interface_problem], {"torch": "2.13.0"}, 5.0)
    assert facts is None
    assert results[0].status == ABSENT  # that problem is reported already
    assert "GLOO_SOCKET_IFNAME" in results[0].text
    assert checks_module._backends([], {}, 5.0)[0][0].status == ABSENT


def test_paste_contains_no_host_names_addresses_or_paths() -> None:
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
    assert [private for private in ("ann", "laptop", "127.0.1.1", "192.0.2.2", "/home") if private in text] == []
    assert "torch=2.13.0" in text
    assert "ok      cores: 2" in text
    assert "warning host name:" in text
    assert "dataparallel" in text


def test_problems_of_a_report_exclude_warnings_and_absent_software() -> None:
    threads_problem = problem("threads", "OMP_NUM_THREADS=64", "unset it")
    sections = {"a": [ok("x", "y"), threads_problem], "b": [warning("x", "y", "z"), absent("x", "y")]}
    assert DoctorReport(sections).problems == [threads_problem]
    assert json.loads(json.dumps(DoctorReport(sections).as_json()))["sections"]["a"][1]["fix"] == "unset it"


# --- the self-test, in real ranks


def test_self_test_passes_with_correct_collectives(ranks: Any) -> None:
    assert ranks(2, lambda world: _wrong_answers(world, 3) + _wrong_answers(world, 1500)) == [[], []]


def _with_average_as_sum(world: World) -> list[str]:
    original = dist.all_reduce

    def sum_instead_of_average(tensor: Any, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        return original(tensor, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **options)

    dist.all_reduce = sum_instead_of_average
    try:
        return _wrong_answers(world, 3)
    finally:
        dist.all_reduce = original


def test_self_test_detects_an_average_that_is_a_sum(ranks: Any) -> None:
    for wrong_results in ranks(2, _with_average_as_sum):
        assert len(wrong_results) == 1
        assert "average" in wrong_results[0]
        assert "is 3, not 1.5" in wrong_results[0]


def _with_collective_that_does_nothing(world: World, name: str) -> list[str]:
    original = getattr(dist, name)
    setattr(dist, name, lambda tensors, *_, **__: [t.zero_() for t in tensors] if name == "all_gather" else None)
    try:
        return _wrong_answers(world, 3)
    finally:
        setattr(dist, name, original)


@pytest.mark.parametrize(
    ("name", "operation"), [("all_reduce", "sum"), ("all_gather", "gather"), ("broadcast", "broadcast")]
)
def test_self_test_detects_a_collective_that_does_nothing(ranks: Any, name: str, operation: str) -> None:
    wrong_results = ranks(2, _with_collective_that_does_nothing, name)
    assert operation in wrong_results[1][0]  # rank 0 has the broadcast values already
    if name == "all_reduce":
        assert any("maximum" in text for text in wrong_results[0])  # rank 1 has the maximum already


# --- the command


def test_doctor_on_this_machine(tmp_path: Path) -> None:
    """Exit status, stderr and JSON file agree. The block to paste contains no private data."""
    ended = doctor("--json", tmp_path / "new" / "found.json")
    report = json.loads((tmp_path / "new" / "found.json").read_text())
    assert list(report["sections"]) == ["software", "machine", "network", "backends", "layouts", "optional"]
    rows = [row for section in report["sections"].values() for row in section]
    problems = [f"everyrank: {row['what']}: {row['text']}; {row['fix']}" for row in rows if row["status"] == "problem"]
    assert problem_lines(ended) == problems
    assert ended.returncode == (1 if problems else 0)
    assert report["versions"] == installed_versions()
    gloo = next(row for row in rows if row["what"] == "gloo")
    assert gloo["status"] == "ok"
    assert "average" in gloo["text"]
    block = ended.stdout[ended.stdout.index("<details>") : ended.stdout.index("</details>")]
    words_of_block = block.replace("127.0.0.1", "").replace(":", " ").split()
    addresses = [address for row in rows if row["what"] == "interfaces" for address in row["text"].split("(")[1:]]
    private = [socket.gethostname(), *[address.partition(")")[0] for address in addresses]]
    assert [text for text in private if text != "127.0.0.1" and text in words_of_block] == []
    assert str(Path.home()) not in block
    assert str(tmp_path) not in block
    assert tempfile.gettempdir() + "," not in block


def test_doctor_with_a_missing_interface() -> None:
    ended = doctor(GLOO_SOCKET_IFNAME="nosuch0")
    assert ended.returncode == 1
    # a backend that could not be tested because of a problem is not a second problem
    (line,) = [line for line in problem_lines(ended) if "nosuch0" in line or "gloo" in line.lower()]
    assert line.startswith("everyrank: GLOO_SOCKET_IFNAME")
    assert "nosuch0" in line
    assert "unset GLOO_SOCKET_IFNAME" in line


@pytest.mark.integration
def test_doctor_with_more_threads_than_cores() -> None:
    ended = doctor(OMP_NUM_THREADS="4096")
    assert ended.returncode == 1
    (line,) = problem_lines(ended)
    assert "OMP_NUM_THREADS=4096" in line
    assert "unset OMP_NUM_THREADS" in line


def test_doctor_with_full_shared_memory(namespaces: None, python: ForkServer) -> None:
    fill_shared_memory = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm; dd if=/dev/zero of=/dev/shm/left bs=4k count=256 2>/dev/null"
    )
    ended = doctor(setup=fill_shared_memory, program=python.programs / "python")
    assert ended.returncode == 1
    [line] = [line for line in problem_lines(ended) if "/dev/shm has" in line]
    assert "has 0 MiB" in line
    assert "--shm-size" in line


@pytest.mark.integration
def test_doctor_with_a_host_name_that_resolves_to_loopback(namespaces: None, tmp_path: Path) -> None:
    """The cause and the fix are on one line, like those of every other problem."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 box-of-ann\n")
    ended = doctor(setup=f"hostname box-of-ann; mount --bind {tmp_path}/hosts /etc/hosts")
    assert ended.returncode in (0, 1)
    problem_lines(ended)
    assert "box-of-ann" not in ended.stdout[ended.stdout.index("<details>") :]
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if "box-of-ann is 127.0.1.1" in line]
    assert lines
    assert any("/etc/hosts" in line for line in lines), lines


def test_doctor_with_a_host_name_of_64_letters(namespaces: None) -> None:
    """Linux accepts such a name, but it cannot be resolved."""
    ended = doctor(setup=f"hostname {'a' * 64}", GLOO_SOCKET_IFNAME="nosuch0")
    assert "a" * 64 in ended.stdout, ended.stderr
    assert ended.returncode == 1
    problem_lines(ended)


def test_doctor_without_a_writable_temporary_folder(namespaces: None) -> None:
    """This happens in a read-only container."""
    # the folders stay readable, because this checkout may be in one of them
    read_only = "mount --bind $folder $folder; mount -o remount,ro,bind $folder"
    folders = f"for folder in /tmp /var/tmp /usr/tmp; do [ ! -d $folder ] || {{ {read_only}; }}; done"
    ended = doctor(setup=f"{folders}; cd /tmp", GLOO_SOCKET_IFNAME="nosuch0", TMPDIR="/tmp")
    assert ended.returncode == 1
    assert any("temporary files" in line and "TMPDIR" in line for line in problem_lines(ended)), ended.stderr


def test_block_to_paste_omits_the_address_of_a_failed_connection(python: ForkServer) -> None:
    """Leftover launcher variables make this process rank 1, which cannot connect to rank 0 at that address."""
    ended = doctor("--timeout", "2", program=python.programs / "python", **LAUNCHER_VARIABLES)
    assert ended.returncode == 1
    assert "192.0.2.77" in ended.stderr  # the user needs it to find the cause
    assert "192.0.2.77" not in ended.stdout[ended.stdout.index("<details>") :]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "abc", "inf"])
def test_doctor_refuses_an_invalid_timeout_before_any_check(
    seconds: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same invalid argument gives the same error on every machine."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    line = refusal_message(capsys, "doctor", "--timeout", seconds)
    assert "--timeout" in line
    assert seconds in line


def test_doctor_refuses_a_json_path_that_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "found.json"):
        line = refusal_message(capsys, "doctor", "--json", path)
        assert str(path) in line
        assert "give another path" in line


def test_doctor_on_a_terminal_without_unicode() -> None:
    ended = doctor(GLOO_SOCKET_IFNAME="nosuch0", PYTHONIOENCODING="ascii")
    assert ended.returncode == 1
    assert any("nosuch0" in line for line in problem_lines(ended))


def test_doctor_with_a_closed_stdout_still_prints_problems() -> None:
    """`everyrank doctor | head -1` closes stdout early."""
    reading, writing = os.pipe()
    os.close(reading)
    inherited = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    command = [sys.executable, "-m", "everyrank", "doctor"]
    environment = {**inherited, "GLOO_SOCKET_IFNAME": "nosuch0"}
    with os.fdopen(writing) as closed:
        ended = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, env=environment, check=False
        )
    assert any("nosuch0" in line for line in problem_lines(ended)), ended.stderr
    assert ended.returncode == 1
