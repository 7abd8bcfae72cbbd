"""Interfaces, host name, ports, and what launchers left in the environment."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from everyrank.doctor.results import CheckResult, ok, problem, warning
from everyrank.errors import UsageError
from everyrank.launch import rank_info_from_environment
from everyrank.launch.host_info import addresses_of, usable_interfaces

__all__ = ["check_host_name", "check_interface", "check_launcher", "check_network", "check_rendezvous_port"]

_DEFAULT_PORT = 29500  # torchrun's


def check_network(environment: Mapping[str, str]) -> list[CheckResult]:
    """All checks of this file, on this machine."""
    interfaces = usable_interfaces()
    name = socket.gethostname()
    results = [check_host_name(name, addresses_of(name), interfaces)]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        finding = check_interface(variable, environment.get(variable), list(interfaces))
        results += [finding] if finding is not None else []
    names = ", ".join(f"{name} ({address})" for name, address in interfaces.items())
    results.append(ok("interfaces", names, True) if names else problem("interfaces", "none is up", "ip link set lo up"))
    results.append(check_rendezvous_port("127.0.0.1", 0))
    results.append(check_rendezvous_port("127.0.0.1", _DEFAULT_PORT))
    results.append(check_launcher(environment))
    return results


def check_host_name(name: str, addresses: Sequence[str], interfaces: Mapping[str, str]) -> CheckResult:
    """Ranks of other hosts come to the address that this host's name stands for."""
    outside = [interface for interface, address in interfaces.items() if not ipaddress.ip_address(address).is_loopback]
    choose = f"GLOO_SOCKET_IFNAME={outside[0]}" if outside else "GLOO_SOCKET_IFNAME to the interface between the hosts"
    if not addresses:
        return warning(
            "host name",
            f"{name} has no address: ranks of several hosts would not find this one",
            f"add it to /etc/hosts, or set {choose} and name the rendezvous by its address",
            private=True,
        )
    text = f"{name} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return warning(
            "host name",
            f"{text}, which is loopback: fine on one host, but ranks of other hosts would never reach this one",
            f"give its own address in /etc/hosts, or set {choose} on every host",
            private=True,
        )
    return ok("host name", text, private=True)


def check_interface(variable: str, value: str | None, interfaces: Sequence[str]) -> CheckResult | None:
    """Whether `variable` names an interface of this machine; None where it is not set."""
    if not value:
        return None
    existing = ", ".join(interfaces)
    if variable == "NCCL_SOCKET_IFNAME":
        # how names begin; ^ leaves those out, = asks for the whole name, ^= leaves out the whole name
        names = [name for name in value.lstrip("^=").split(",") if name]
        is_exact = "=" in value[:2]
        meant = [i for i in interfaces if any(i == name if is_exact else i.startswith(name) for name in names)]
        left = [i for i in interfaces if i not in meant] if value.startswith("^") else meant
        if left:
            return ok(variable, value)
        return problem(
            variable, f"{value}: that leaves no interface; there are {existing}", f"unset {variable}", private=True
        )
    if value.startswith(("^", "=")):
        return problem(
            variable,
            f"{value}: the sign {value[0]} is NCCL's; gloo wants the name of an interface",
            f"{variable}={_first_outside(interfaces)}",
        )
    missing = [name for name in value.split(",") if name not in interfaces]
    if missing:
        return problem(
            variable,
            f"{value}: there is no interface {missing[0]}; there are {existing}",
            f"unset {variable} on one host, or {variable}={_first_outside(interfaces)}",
            private=True,
        )
    return ok(variable, value)


def _first_outside(interfaces: Sequence[str]) -> str:
    return next((name for name in interfaces if not name.startswith("lo")), "lo0" if sys.platform == "darwin" else "lo")


def check_rendezvous_port(address: str, port: int) -> CheckResult:
    """Whether a rendezvous can be opened; port 0 is any free one."""
    subject = "ports" if port == 0 else f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            if port == 0:
                return problem(subject, f"none can be opened on {address}: {reason}", "allow loopback in the sandbox")
            return warning(
                subject,
                f"taken on {address} ({reason}): torchrun without --standalone would fail",
                "torchrun --standalone, or --master-port 0",
            )
        return ok(subject, f"free on {address}" + (" (torchrun's default)" if port else ""))


def check_launcher(environment: Mapping[str, str]) -> CheckResult:
    """Variables of a launcher: none, or one full set."""
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    try:
        info = rank_info_from_environment(environment)
    except UsageError as error:
        return problem("launcher", str(error), f"or unset {names}", private=True)
    if info is not None:
        return problem(
            "launcher",
            f"the environment says that this is rank {info.rank} of {info.size} at {info.rendezvous_url}: "
            "every command would wait for the others there",
            f"unset {names}, unless a launcher has just set them",
            private=True,
        )
    left = [name for name in names.split() if environment.get(name)]
    if left:
        return ok("launcher", f"{', '.join(left)} alone mean nothing; everyrank starts its ranks itself")
    return ok("launcher", "nothing left in the environment; everyrank starts its ranks itself")
