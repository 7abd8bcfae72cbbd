"""Names, addresses and interfaces of this host among others. Imports no torch."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from everyrank.errors import UsageError

__all__ = [
    "LOOPBACK",
    "addresses_of",
    "boot_id",
    "check_known",
    "check_port",
    "check_reachable",
    "choose_interface",
    "host_name",
    "is_loopback",
    "local_address_towards",
    "pid_namespace",
    "port_refused",
    "split_endpoint",
    "start_time",
    "usable_interfaces",
]

_STARTTIME = 19  # of the fields of /proc/PID/stat behind the name of the program
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_LOOK_UP_SECONDS = 5.0


def host_name() -> str:
    """What this host is called: by Slurm, where it has a name for it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def boot_id() -> str:
    """The same for all processes of one running machine, whatever names it has; two machines never share it."""
    with contextlib.suppress(OSError):
        # containers of one machine may each have a loopback of their own
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + _namespace("net")
    return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def pid_namespace() -> str:
    """The same for all processes that know each other by their numbers: of one machine, and one container."""
    return boot_id() + _namespace("pid")


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):
        return " " + os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115  (a name, not a path)
    return ""


def start_time(pid: int) -> float:
    """When a process started, to tell it from a later one with its number. Raises `psutil.NoSuchProcess`.

    In ticks since the machine started: `psutil.Process.create_time` moves when somebody sets the clock. Seconds of the
    wall clock where the system has no /proc.
    """
    if not Path("/proc/self/stat").exists():
        return psutil.Process(pid).create_time()
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return float(text.rpartition(")")[2].split()[_STARTTIME])


def usable_interfaces() -> dict[str, str]:
    """Network interfaces that are up, each with an address (IPv4 where it has one)."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        own = [a for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        own.sort(key=lambda a: a.family != socket.AF_INET)
        if name in up and own:
            found[name] = own[0].address.partition("%")[0]
    return found


def addresses_of(name: str) -> list[str]:
    """What a name stands for; nothing where it is not known, or a name server takes too long to say so."""
    found: list[str] = []

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(timeout=_LOOK_UP_SECONDS)
    return list(found)


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def local_address_towards(host: str) -> str | None:
    """The address of this host on the way to another; None where there is no way. Nothing is sent."""
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
    """The addresses of a name. Raises `UsageError` for one that has none."""
    found = addresses_of(host)
    if not found:
        raise UsageError(
            f"{flag} {host}: the name has no address here; give the address itself, or add it to /etc/hosts"
        )
    return found


def check_reachable(host: str, flag: str) -> None:
    """Whether other hosts can come to `host`. Raises `UsageError` for a name that is unknown, or means this host alone.

    Debian gives each host's own name the address 127.0.1.1: its ranks would wait there for others that never come.
    """
    found = check_known(host, flag)
    if all(map(is_loopback, found)):
        outside = [address for address in usable_interfaces().values() if not is_loopback(address)]
        hint = f"give its own address ({', '.join(outside)})" if outside else "give the address of an interface"
        raise UsageError(f"{flag} {host}: that is {found[0]} here, loopback, which no other host can reach; {hint}")


def check_port(host: str, port: int) -> None:
    """Whether a store can be opened there; of a host that is not this one, nothing is said. Raises `UsageError`."""
    own = [address for address in addresses_of(host) if is_loopback(address) or _by_any_address(address)]
    if not own:
        return
    with socket.socket(socket.AF_INET6 if ":" in own[0] else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((own[0], port))
        except OSError as error:
            raise UsageError(port_refused(host, port, error)) from error


def port_refused(host: str, port: int, error: OSError) -> str:
    """In one line, for those who look before the start and for the rank that opens the store."""
    what = f"port {port} at {host or 'this host'}: {os.strerror(error.errno or 0)}"
    return f"{what}; give another port, or leave it out: the launcher finds a free one"


def choose_interface(
    asked: str | None,
    variable: str | None,
    is_one_machine: bool,
    own_address: str | None,
    interfaces: Mapping[str, str],
) -> tuple[str | None, str]:
    """The network interface that ranks talk over, and why; None leaves the choice to the backend.

    asked            by --interface
    variable         GLOO_SOCKET_IFNAME of the environment
    is_one_machine   whether all ranks are on this one
    own_address      of this machine, on the way to the others; None where it is not known

    Raises `UsageError` for one that was asked for and is not up.
    """
    if asked is not None:
        if asked not in interfaces:
            raise UsageError(f"--interface {asked}: it is not up here; there are {_shown(interfaces)}")
        return asked, "asked for"
    if variable:
        return None, f"GLOO_SOCKET_IFNAME={variable}"
    if is_one_machine:
        return LOOPBACK, "all ranks are on this machine"
    if own_address is None:
        return None, "left to the backend"
    found = [name for name, address in interfaces.items() if address == own_address]
    found += _by_any_address(own_address)
    return (found[0], f"it has {own_address}, the way to the others") if found else (None, "left to the backend")


def _by_any_address(address: str) -> Sequence[str]:
    """Interfaces may have several addresses."""
    return [
        name
        for name, rows in psutil.net_if_addrs().items()
        if any(row.address.partition("%")[0] == address for row in rows)
    ]


def _shown(interfaces: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces.items()) or "none"
