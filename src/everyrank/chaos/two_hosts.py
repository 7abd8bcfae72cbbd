"""Runs a call on two simulated hosts: network namespaces of this machine, connected by a link.

    unshare --net python -m everyrank.chaos.two_hosts CALL.json

The kernel removes the namespaces when this process ends. Imports no torch.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from everyrank.launch.job import PYTHON

__all__ = ["LINK", "NUM_HOSTS", "RENDEZVOUS", "SLOW_LINK", "in_own_network", "why_no_link"]

NUM_HOSTS = 2
LINK = "eth0"  # name of the interface on both hosts
SLOW_LINK = f"tc qdisc add dev {LINK} root tbf rate 1mbit burst 16kb latency 2s".split()
RENDEZVOUS = "10.77.0.1:29511"
_START_SECONDS = 20.0
# `read` waits until the link exists
_HOST_SCRIPT = (
    "read -r _; ip link set lo up; ip addr add {address}/24 dev {link}; ip link set {link} up; exec {command}"
)
_TEST_SCRIPT = f"ip link add name {LINK} type veth peer name other; {shlex.join(SLOW_LINK)}"


def in_own_network(script: str) -> list[str]:
    """Return the command that runs a shell script as administrator of a new network namespace."""
    user_option = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user_option, "--net", "sh", "-ec", script]


@functools.cache
def why_no_link() -> str:
    """Return why two connected hosts cannot be simulated here; "" if they can."""
    try:
        completed = subprocess.run(in_own_network(_TEST_SCRIPT), capture_output=True, text=True, timeout=20)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot simulate two hosts: unshare: {error}"
    error_lines = completed.stderr.strip().splitlines() or ["unshare, ip or tc failed"]
    return (
        ""
        if completed.returncode == 0
        else f"cannot simulate two hosts (needs ip and tc of iproute2): {error_lines[-1]}"
    )


def main() -> None:
    """Start both hosts and connect them; exit with the first status that is not 0."""
    hosts = [_start(node, Path(sys.argv[1])) for node in range(NUM_HOSTS)]
    command = ["ip", "link", "add", "name", LINK, "netns", str(hosts[0].pid), "type", "veth"]
    command += ["peer", "name", LINK, "netns", str(hosts[1].pid)]
    subprocess.run(command, check=True, timeout=_START_SECONDS)  # noqa: S603
    for host in hosts:
        assert host.stdin is not None
        host.stdin.write(b"\n")
        host.stdin.close()
    statuses = [host.wait() for host in hosts]
    sys.exit(next((status for status in statuses if status), 0))


def _start(node: int, call: Path) -> subprocess.Popen[bytes]:
    """Start a host, which waits for the link and then trains."""
    address = RENDEZVOUS.partition(":")[0][:-1] + str(node + 1)
    trainer = [*PYTHON, "-m", "everyrank.chaos.trainer_process", str(call), str(node)]
    script = _HOST_SCRIPT.format(address=address, link=LINK, command=shlex.join(trainer))
    host = subprocess.Popen(in_own_network(script), stdin=subprocess.PIPE)  # noqa: S603
    deadline = time.monotonic() + _START_SECONDS
    while _network(host.pid) == _network(os.getpid()):
        if host.poll() is not None or time.monotonic() > deadline:
            sys.exit("a simulated host got no network namespace")
        time.sleep(0.01)
    return host


def _network(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:  # the process has ended
        return ""


if __name__ == "__main__":
    main()
