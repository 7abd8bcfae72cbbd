"""Checks cores, threads, memory, shared memory, open files and temporary files."""

from __future__ import annotations

import math
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from everyrank.doctor.results import CheckResult, absent, ok, problem, warning
from everyrank.launch import cgroup_quota, num_cores, threads_asked
from everyrank.launch.host_info import container_memory_bytes

__all__ = ["check_cores", "check_files", "check_machine", "check_shared_memory", "check_space", "check_threads"]

_MIB = 2**20
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def check_machine(environment: Mapping[str, str]) -> list[CheckResult]:
    """Run all checks of this file on this machine."""
    cores = num_cores()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = psutil.virtual_memory()
    results = [
        check_cores(cores, os.cpu_count() or 1, cgroup_quota(Path("/sys/fs/cgroup"))),
        check_threads(environment, cores),
        check_memory_size(memory.total, memory.available, container_memory_bytes()),
    ]
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir():
        usage = shutil.disk_usage(shared_memory)
        results.append(check_shared_memory(usage.total, usage.free, os.access(shared_memory, os.W_OK)))
    elif sys.platform == "linux":
        results.append(absent("shared memory", "/dev/shm is missing; loader workers (--workers) need it"))
    results.append(check_files(soft, hard))
    try:
        folder = Path(tempfile.gettempdir())  # gettempdir() has checked that it is writable
        results.append(check_space(folder, shutil.disk_usage(folder).free))
    except OSError as error:
        results.append(
            problem("temporary files", str(error), "set TMPDIR to a folder that can be written", private=True)
        )
    return results


def check_cores(usable: int, present: int, quota: float | None) -> CheckResult:
    """Check the cores that this process may use, and whether a container's quota is lower."""
    text = f"{usable} of {present}" if usable != present else str(usable)
    if quota is not None and quota < usable:
        return warning(
            "cores",
            f"{text} are visible, but the container may use {quota:g} on average, so threads will be throttled",
            f"limit the cores instead (taskset -c 0-{max(0, math.ceil(quota) - 1)} ..., docker --cpuset-cpus)",
        )
    return ok("cores", text)


def check_memory_size(total: int, free: int, limit: int) -> CheckResult:
    """Return the memory of this machine, or of this container if its limit is lower. All in bytes."""
    if limit < total:
        return ok("memory", f"{_size(limit)} for this container; its host has {_size(total)}, {_size(free)} of it free")
    return ok("memory", f"{_size(total)}, {_size(free)} of it free")


def check_threads(environment: Mapping[str, str], cores: int) -> CheckResult:
    """Check the variables that set the number of threads. Without them a rank gets cores // ranks."""
    for name in _THREAD_VARIABLES:
        text = environment.get(name)
        if text is None:
            continue
        levels = text.split(",")  # OpenMP allows one number per level of nesting; the first is for a rank
        numbers = [int(level) if level.strip().isdecimal() and len(level) < 10 else 0 for level in levels]
        if min(numbers) < 1:
            return problem("threads", f"{name}={text[:40]} is not a number of threads", f"unset {name}")
        if numbers[0] > cores:
            return problem(
                "threads",
                f"{name}={text}, but there are {cores} cores: threads would wait for each other",
                f"unset {name}, or {name}={max(1, cores // 2)} for two ranks here; "
                "unset, each rank gets its cores // ranks",
            )
    requested = threads_asked(environment)
    if requested is not None:
        return ok("threads", f"each rank gets {requested}, from the environment")
    return ok("threads", f"each rank gets {cores} cores // ranks on this host")


def check_shared_memory(total: int, free: int, writable: bool = True) -> CheckResult:
    """Check /dev/shm, which loader workers use to pass batches."""
    text = f"/dev/shm has {_size(free)} free of {_size(total)}"
    if not writable:
        return problem("shared memory", "/dev/shm cannot be written", "chmod 1777 /dev/shm")
    if total == 0:
        return ok("shared memory", "/dev/shm has no size limit")
    if free < 16 * _MIB:
        return problem(
            "shared memory",
            f"{text}: loader workers (--workers) would end with a bus error",
            "remove old files (ls -la /dev/shm), or make it larger (docker --shm-size=8g)",
        )
    if free < 128 * _MIB:
        return warning(
            "shared memory",
            f"{text}: too little for loader workers with large batches",
            "make it larger (docker --shm-size=8g; mount -o remount,size=8g /dev/shm)",
        )
    return ok("shared memory", text)


def check_files(soft: int, hard: int) -> CheckResult:
    """Check the limit of open files: each rank and each loader worker needs some."""
    if soft != resource.RLIM_INFINITY and soft < 1024:
        hard_text = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        fix = f"ulimit -n {4096 if hard == resource.RLIM_INFINITY else min(4096, hard)} (at most {hard_text} here)"
        if hard == soft:
            fix = "also raise the hard limit: docker --ulimit nofile=4096, or /etc/security/limits.conf"
        return problem(
            "open files", f"at most {soft}: many ranks or loader workers fail with 'Too many open files'", fix
        )
    return ok("open files", "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def check_space(folder: Path, free: int, writable: bool = True) -> CheckResult:
    """Check the temporary folder, which holds rendezvous files and logs."""
    if not writable:
        return problem(
            "temporary files", f"{folder} cannot be written", "set TMPDIR to a folder that can be written", True
        )
    if free < 64 * _MIB:
        return problem(
            "temporary files",
            f"{folder} has {_size(free)} free",
            "free some space, or set TMPDIR to another disk",
            True,
        )
    return ok("temporary files", f"{folder}, {_size(free)} free", private=True)


def _size(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / _MIB:.0f} MiB"
