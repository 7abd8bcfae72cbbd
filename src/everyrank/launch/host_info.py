"""The local host: its name, addresses, network interfaces, CPU cores and GPUs. Imports torch only to count GPUs."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

from everyrank.errors import UsageError

__all__ = [
    "CPU_PROCESSES",
    "LOOPBACK",
    "addresses_of",
    "boot_id",
    "cgroup_quota",
    "check_known",
    "check_port",
    "check_reachable",
    "choose_interface",
    "container_memory_bytes",
    "has_driver",
    "host_memory_bytes",
    "host_name",
    "interfaces_with",
    "is_loopback",
    "local_address_towards",
    "num_accelerators",
    "num_cores",
    "pid_namespace",
    "port_refused",
    "split_endpoint",
    "start_time",
    "usable_interfaces",
]

CPU_PROCESSES = 2
"""Default number of ranks without a GPU: the smallest with which a parallel layout communicates."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_STARTTIME_FIELD = 19  # in /proc/PID/stat, counted after the name of the program
_LOOK_UP_SECONDS = 5.0


# --- name and identity


def host_name() -> str:
    """Return the name of this host: Slurm's name for it, if there is one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def boot_id() -> str:
    """Return an identifier of this running machine and its network namespace, independent of its host name."""
    with contextlib.suppress(OSError):
        # Each container on a machine may have its own loopback interface.
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + _namespace("net")
    return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def pid_namespace() -> str:
    """Return an identifier of the machine and container in which a process number is valid."""
    return boot_id() + _namespace("pid")


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):
        return " " + os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115  (a name, not a path)
    return ""


def start_time(pid: int) -> float:
    """When a process started, to tell it from a later one with the same number. Raises `psutil.NoSuchProcess`.

    In ticks since boot: `psutil.Process.create_time` changes when the clock is set. In seconds of the wall clock where
    the system has no /proc.
    """
    if not Path("/proc/self/stat").exists():
        return psutil.Process(pid).create_time()
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return float(text.rpartition(")")[2].split()[_STARTTIME_FIELD])


# --- cores, memory and GPUs


def num_cores() -> int:
    """CPU cores that this process may use: its affinity mask, or fewer if the container's CPU quota is smaller."""
    num_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(Path("/sys/fs/cgroup"))
    return num_allowed if quota is None else max(1, min(num_allowed, int(quota)))


def cgroup_quota(folder: Path) -> float | None:
    """The CPU quota of the container in cores (cgroup v2, else v1); None without a limit, or if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (folder / "cpu.max").read_text().split()
        return None if text[0] == "max" else int(text[0]) / int(text[1])
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = int((folder / "cpu" / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu" / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    return None


def container_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory of this host without swap, or of this container if its limit is lower."""
    return _limited(psutil.virtual_memory().total, root, "memory.max", "memory/memory.limit_in_bytes")


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory and swap of this host, or of this container if its limits are lower."""
    swap = _limited(psutil.swap_memory().total, root, "memory.swap.max")
    return _limited(container_memory_bytes(root) + swap, root, "memory/memory.memsw.limit_in_bytes")


def _limited(num_bytes: int, root: Path, *names: str) -> int:
    """Return the smallest of this number and the limits in these files of cgroups (version 2 or 1)."""
    limits = [num_bytes]
    for name in names:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
            limits.append(int((root / "sys/fs/cgroup" / name).read_text()))
    return min(limits)


def num_accelerators() -> int:
    """Return the number of CUDA devices that torch sees. Without a driver it is 0, and torch is not imported."""
    if not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def has_driver() -> bool:
    """Whether the device file of a GPU driver exists: NVIDIA on Linux, WSL, ROCm."""
    return any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


# --- addresses and interfaces


def usable_interfaces() -> dict[str, str]:
    """Name -> address of the network interfaces that are up (the IPv4 address if there is one)."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    interfaces: dict[str, str] = {}
    for name, rows in psutil.net_if_addrs().items():
        addresses = [row for row in rows if row.family in (socket.AF_INET, socket.AF_INET6)]
        addresses.sort(key=lambda row: row.family != socket.AF_INET)
        if name in up and addresses:
            interfaces[name] = addresses[0].address.partition("%")[0]
    return interfaces


def addresses_of(name: str) -> list[str]:
    """Return the addresses of a host name; [] if it is unknown, or the name server does not answer within 5 seconds."""
    addresses: list[str] = []

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            addresses.extend(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(timeout=_LOOK_UP_SECONDS)
    return list(addresses)


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def local_address_towards(host: str) -> str | None:
    """Return the address of this host on the route to another host; None without a route. Sends nothing."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    return None


def split_endpoint(text: str, flag: str) -> tuple[str, int]:
    """`host:port`, `[::1]:29500` -> (host, port). Raises `UsageError`."""
    host, _, port = text.rpartition(":")
    is_host = bool(re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]/]+", host))
    if not is_host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UsageError(f"{flag} {text}: give HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]"), int(port)


def check_known(host: str, flag: str) -> list[str]:
    """Return the addresses of a host name. Raises `UsageError` if it has none."""
    addresses = addresses_of(host)
    if not addresses:
        raise UsageError(
            f"{flag} {host}: the name has no address here; give the address itself, or add it to /etc/hosts"
        )
    return addresses


def check_reachable(host: str, flag: str) -> None:
    """Raise `UsageError` for a host name that is unknown, or resolves to loopback, which other hosts cannot reach.

    Debian gives each host's own name the address 127.0.1.1. Its ranks would wait there for ranks that never arrive.
    """
    addresses = check_known(host, flag)
    if all(map(is_loopback, addresses)):
        reachable = [address for address in usable_interfaces().values() if not is_loopback(address)]
        hint = f"give its own address ({', '.join(reachable)})" if reachable else "give the address of an interface"
        raise UsageError(
            f"{flag} {host}: the name resolves to {addresses[0]} (loopback), which no other host can reach; {hint}"
        )


def check_port(host: str, port: int) -> None:
    """Raise `UsageError` if a store cannot listen at this port. Does not check addresses of other hosts."""
    addresses = [address for address in addresses_of(host) if is_loopback(address) or interfaces_with(address)]
    if not addresses:
        return
    with socket.socket(socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((addresses[0], port))
        except OSError as error:
            raise UsageError(port_refused(host, port, error)) from error


def port_refused(host: str, port: int, error: OSError) -> str:
    """Return the message for a port that cannot be opened."""
    reason = f"port {port} at {host or 'this host'}: {os.strerror(error.errno or 0)}"
    return f"{reason}; give another port, or leave it out: the launcher finds a free one"


def choose_interface(
    requested: str | None,
    variable: str | None,
    is_one_machine: bool,
    local_address: str | None,
    interfaces: Mapping[str, str],
) -> tuple[str | None, str]:
    """Return the network interface for communication between ranks, and the reason; None: the backend chooses.

    requested        by --interface
    variable         the value of GLOO_SOCKET_IFNAME
    is_one_machine   whether all ranks are on this machine
    local_address    of this machine, on the route to the others; None if unknown

    Raises `UsageError` if the requested interface is not up.
    """
    if requested is not None:
        if requested not in interfaces:
            listed = ", ".join(f"{name} ({address})" for name, address in interfaces.items()) or "none"
            raise UsageError(f"--interface {requested}: this interface is not up; give one that is up: {listed}")
        return requested, "requested"
    if variable:
        return None, f"GLOO_SOCKET_IFNAME={variable}"
    if is_one_machine:
        return LOOPBACK, "all ranks are on this machine"
    if local_address is None:
        return None, "left to the backend"
    names = [name for name, address in interfaces.items() if address == local_address]
    names += interfaces_with(local_address)
    return (names[0], f"it has {local_address}, the route to the others") if names else (None, "left to the backend")


def interfaces_with(address: str) -> list[str]:
    """Return the interfaces with this address. An interface may have several addresses."""
    return [
        name
        for name, rows in psutil.net_if_addrs().items()
        if any(row.address.partition("%")[0] == address for row in rows)
    ]
