"""The same call typed on two hosts: network namespaces of this machine, each with its own end of one link.

    unshare --net python -m everyrank.chaos.two_hosts CALL.json

A process of its own in a namespace of its own: what it makes is gone when it ends. Imports no torch.
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
LINK = "eth0"  # its name on both
SLOW_LINK = f"tc qdisc add dev {LINK} root tbf rate 1mbit burst 16kb latency 2s".split()
RENDEZVOUS = "10.77.0.1:29511"
_START_SECONDS = 20.0
# waits for a line: by then it has its end of the link
_HOST = "read -r _; ip link set lo up; ip addr add {address}/24 dev {link}; ip link set {link} up; exec {command}"
_PROBE = f"ip link add name {LINK} type veth peer name other; {shlex.join(SLOW_LINK)}"


def in_own_network(script: str) -> list[str]:
    """The shell's script in a network namespace of its own, whose interfaces it may change."""
    own_user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *own_user, "--net", "sh", "-ec", script]


@functools.cache
def why_no_link() -> str:
    """Why no hosts with a link can be made here; "" where they can."""
    try:
        done = subprocess.run(in_own_network(_PROBE), capture_output=True, text=True, timeout=20)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return f"no hosts with a link: unshare: {error}"
    error_lines = done.stderr.strip().splitlines() or ["unshare, ip or tc failed"]
    return "" if done.returncode == 0 else f"no hosts with a link (it takes ip and tc of iproute2): {error_lines[-1]}"


def main() -> None:
    """Start both, connect them, and end as host 0 does; where that ends well, as host 1."""
    hosts = [_start(node, Path(sys.argv[1])) for node in range(NUM_HOSTS)]
    words = ["ip", "link", "add", "name", LINK, "netns", str(hosts[0].pid), "type", "veth"]
    words += ["peer", "name", LINK, "netns", str(hosts[1].pid)]
    subprocess.run(words, check=True, timeout=_START_SECONDS)  # noqa: S603
    for host in hosts:
        assert host.stdin is not None
        host.stdin.write(b"\n")
        host.stdin.close()
    statuses = [host.wait() for host in hosts]
    sys.exit(next((status for status in statuses if status), 0))


def _start(node: int, call: Path) -> subprocess.Popen[bytes]:
    """A host that waits for its end of the link, and then trains."""
    address = RENDEZVOUS.partition(":")[0][:-1] + str(node + 1)
    trainer = [*PYTHON, "-m", "everyrank.chaos.trainer_process", str(call), str(node)]
    script = _HOST.format(address=address, link=LINK, command=shlex.join(trainer))
    host = subprocess.Popen(in_own_network(script), stdin=subprocess.PIPE)  # noqa: S603
    deadline = time.monotonic() + _START_SECONDS
    while _network(host.pid) == _network(os.getpid()):
        if host.poll() is not None or time.monotonic() > deadline:
            sys.exit("no network of its own for a host")
        time.sleep(0.01)
    return host


def _network(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:  # it has ended
        return ""


if __name__ == "__main__":
    main()
