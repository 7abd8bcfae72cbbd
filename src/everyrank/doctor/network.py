"""Checks interfaces, the host name, ports, and launcher variables in the environment."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from everyrank.doctor.results import CheckResult, ok, problem, warning
from everyrank.errors import UsageError
from everyrank.launch import find_launcher, rank_info_from_environment
from everyrank.launch.host_info import addresses_of, usable_interfaces

__all__ = ["check_host_name", "check_interface", "check_launcher", "check_network", "check_rendezvous_port"]

_DEFAULT_PORT = 29500  # the default of torchrun


def check_network(environment: Mapping[str, str]) -> list[CheckResult]:
    """Run all checks of this file on this machine."""
    interfaces = usable_interfaces()
    name = socket.gethostname()
    results = [check_host_name(name, addresses_of(name), interfaces)]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        result = check_interface(variable, environment.get(variable), list(interfaces))
        results += [result] if result is not None else []
    names = ", ".join(f"{name} ({address})" for name, address in interfaces.items())
    results.append(ok("interfaces", names, True) if names else problem("interfaces", "none is up", "ip link set lo up"))
    results.append(check_rendezvous_port("127.0.0.1", 0))
    results.append(check_rendezvous_port("127.0.0.1", _DEFAULT_PORT))
    results.append(check_launcher(environment))
    return results


def check_host_name(name: str, addresses: Sequence[str], interfaces: Mapping[str, str]) -> CheckResult:
    """Check the address of this host's name, to which ranks on other hosts connect."""
    external_interfaces = [
        interface for interface, address in interfaces.items() if not ipaddress.ip_address(address).is_loopback
    ]
    interface_setting = (
        f"GLOO_SOCKET_IFNAME={external_interfaces[0]}"
        if external_interfaces
        else "GLOO_SOCKET_IFNAME to the interface between the hosts"
    )
    if not addresses:
        return warning(
            "host name",
            f"{name} has no address: ranks on other hosts cannot find this one",
            f"add it to /etc/hosts, or set {interface_setting} and name the rendezvous by its address",
            private=True,
        )
    text = f"{name} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return warning(
            "host name",
            f"{text}, which is loopback: fine on one host, but ranks on other hosts cannot reach this one",
            f"set its real address in /etc/hosts, or set {interface_setting} on every host",
            private=True,
        )
    return ok("host name", text, private=True)


def check_interface(variable: str, value: str | None, interfaces: Sequence[str]) -> CheckResult | None:
    """Check that `variable` names an interface of this machine; None if it is not set."""
    if not value:
        return None
    existing = ", ".join(interfaces)
    if variable == "NCCL_SOCKET_IFNAME":
        # NCCL compares prefixes; ^ excludes names, = compares whole names, ^= excludes whole names
        names = [name for name in value.lstrip("^=").split(",") if name]
        is_exact = "=" in value[:2]
        matching = [i for i in interfaces if any(i == name if is_exact else i.startswith(name) for name in names)]
        usable = [i for i in interfaces if i not in matching] if value.startswith("^") else matching
        if usable:
            return ok(variable, value)
        return problem(
            variable, f"{value}: matches no interface; there are {existing}", f"unset {variable}", private=True
        )
    if value.startswith(("^", "=")):
        return problem(
            variable,
            f"{value}: only NCCL supports {value[0]}; gloo needs the name of an interface",
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
    """Check that a rendezvous port can be opened; port 0 is any free port."""
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
    """Check the variables of launchers: there are none, or a complete set."""
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    try:
        info = rank_info_from_environment(environment)
    except UsageError as error:
        return problem("launcher", str(error), f"or unset {names}", private=True)
    if info is not None:
        launcher = find_launcher(info.started_by)
        if launcher is not None and launcher.marker_variable is None:  # it sets variables of its own
            names = " ".join(name for group in launcher.rank_variables for name in group if environment.get(name))
        effect = "wait for the other ranks there" if info.size > 1 else "run as this rank, and start no others"
        return problem(
            "launcher",
            f"the environment makes this rank {info.rank} of {info.size} at {info.rendezvous_url}: "
            f"every command would {effect}",
            f"unset {names}, unless a launcher has just set them",
            private=True,
        )
    set_names = [name for name in names.split() if environment.get(name)]
    if set_names:
        return ok("launcher", f"{', '.join(set_names)} are ignored: incomplete; everyrank starts its ranks itself")
    return ok("launcher", "no launcher variables in the environment; everyrank starts its ranks itself")
