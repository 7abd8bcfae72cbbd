"""Diagnoses a failed start: checks the launcher's environment and the rendezvous, then starts the ranks once."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everyrank.doctor.network import check_network
from everyrank.doctor.results import PROBLEM, CheckResult, absent, ok, problem, warning
from everyrank.errors import EveryrankError, UsageError
from everyrank.launch import Launch, run_ranks
from everyrank.launch.host_info import (
    addresses_of,
    check_port,
    check_reachable,
    choose_interface,
    interfaces_with,
    is_loopback,
    local_address_towards,
    split_endpoint,
    usable_interfaces,
)

__all__ = ["check_launch", "check_rendezvous", "check_slurm", "check_start"]

_MOST_SKEW_SECONDS = 1.0


def check_launch(
    launch: Launch, advance: Callable[[str], None] = lambda _: None, starts_ranks: bool = True
) -> dict[str, list[CheckResult]]:
    """Return the results by section. Starts the ranks of `launch` once, unless an earlier check found a problem."""
    advance("environment")
    environment = [*check_network(os.environ), *check_slurm(os.environ), check_program(launch)]
    advance("rendezvous")
    rendezvous = check_rendezvous(launch)
    advance("start")
    problems = [result for result in [*environment, *rendezvous] if result.status == PROBLEM]
    not_tried = [absent("start", f"not tried, because of the problem with {failed.what}") for failed in problems[:1]]
    if not starts_ranks:
        not_tried = [absent("start", "not tried: --dry-run")]
    return {"environment": environment, "rendezvous": rendezvous, "start": not_tried or check_start(launch)}


def check_program(launch: Launch) -> CheckResult:
    """Check that the launcher is installed."""
    try:
        program = launch.row.find()
    except EveryrankError as error:
        return problem(launch.launcher, str(error), "or another --launcher")
    return ok(launch.launcher, program, private=Path(program).is_absolute())


def check_slurm(environment: Mapping[str, str]) -> list[CheckResult]:
    """Check that the variables of Slurm agree with each other and with those of mpirun."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return []
    results = [
        problem("Slurm", f"{name}={environment[name]} is not a whole number", f"unset {name}")
        for name in ("SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
        if not environment.get(name, "1").isdecimal()
    ]
    if results:
        return results
    nodes, tasks = environment.get("SLURM_NNODES", "1"), environment.get("SLURM_NTASKS")
    if environment.get("SLURM_STEP_ID") is None:
        results.append(
            ok("Slurm", f"job {job}: {tasks or 'no number of'} tasks on {nodes} nodes; use --launcher slurm")
        )
    per_node = environment.get("SLURM_NTASKS_PER_NODE")
    if tasks and per_node and int(per_node) * int(nodes) != int(tasks):
        results.append(
            problem(
                "Slurm",
                f"SLURM_NTASKS={tasks}, but SLURM_NTASKS_PER_NODE={per_node} on {nodes} nodes",
                f"--ntasks={int(per_node) * int(nodes)}, or leave one of the two out",
            )
        )
    size = environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("PMI_SIZE")
    if size and tasks and size != tasks:
        results.append(
            problem("Slurm", f"SLURM_NTASKS={tasks}, but mpirun started {size}", f"mpirun -n {tasks}, or use only srun")
        )
    return results


def check_rendezvous(launch: Launch) -> list[CheckResult]:
    """Check the rendezvous address and the network interface."""
    results: list[CheckResult] = []
    endpoint = launch.rendezvous
    if endpoint is None and isinstance(launch.init_method, str) and launch.init_method.startswith("tcp://"):
        endpoint = launch.init_method.removeprefix("tcp://")
    host = None
    if endpoint is not None:
        host, port = split_endpoint(endpoint, "--rendezvous")
        try:
            if launch.nodes > 1:
                check_reachable(host, "--rendezvous")
            results.append(_check_endpoint(host, port))
        except UsageError as error:
            results.append(problem("rendezvous", str(error), "see docs/launching.md", private=True))
    try:
        local_address = local_address_towards(host) if host is not None and launch.nodes > 1 else None
        variable = os.environ.get("GLOO_SOCKET_IFNAME")
        name, reason = choose_interface(
            launch.interface, variable, launch.nodes == 1, local_address, usable_interfaces()
        )
        results.append(ok("interface", f"{name or 'the backend chooses'}: {reason}", private=True))
    except UsageError as error:
        results.append(problem("interface", str(error), "leave it out, or name one of those", private=True))
    return results


def _check_endpoint(host: str, port: int) -> CheckResult:
    """Check that the port is free if `host` is this machine, else that it accepts connections."""
    if any(is_loopback(address) or interfaces_with(address) for address in addresses_of(host)):
        try:
            check_port(host, port)
        except UsageError as error:
            return problem("rendezvous", str(error), "or end the process that uses it", private=True)
        return ok("rendezvous", f"{host}:{port} is this host, and the port is free", private=True)
    try:
        with socket.create_connection((host, port), timeout=5.0):
            return ok("rendezvous", f"{host}:{port} answers", private=True)
    except ConnectionRefusedError:
        return warning(
            "rendezvous", f"{host}:{port} can be reached, but no process listens there yet", "start node 0 first", True
        )
    except (OSError, UnicodeError) as error:
        return problem(
            "rendezvous",
            f"{host}:{port} does not answer: {getattr(error, 'strerror', None) or error}",
            "check for a firewall, and that the hosts can reach each other",
            private=True,
        )


def check_start(launch: Launch) -> list[CheckResult]:
    """Start the ranks once and report the host, process and device of each."""
    started_at = time.monotonic()
    try:
        answers = run_ranks(launch, "everyrank.doctor.selftest:introduce_rank", launch)
    except EveryrankError as error:
        fix = f"the whole traceback is in {error.log}" if error.log else "docs/launching.md has the usual causes"
        return [problem("start", f"{launch.launcher}: {error}", fix, private=True)]
    seconds = time.monotonic() - started_at
    rows: list[dict[str, Any]] = answers.get(0) or []
    if not rows:
        return [ok("start", f"{len(answers)} ranks of this host started; the host of rank 0 prints all ranks")]
    rank_0 = rows[0]
    results = [
        ok("start", f"{len(rows)} ranks by {launch.launcher}, started, connected and ended in {seconds:.1f} s"),
        ok("backend", rank_0["choices"]["backend"]),
        ok(
            "versions",
            f"torch {rank_0['torch']}, Python {rank_0['python']}, everyrank {rank_0['everyrank']} on all ranks",
        ),
    ]
    for row in rows:
        text = f"on {row['host']}, process {row['pid']}, local rank {row['local_rank']} of {row['local_size']}"
        results.append(
            ok(f"rank {row['rank']}", f"{text}, {row['device']}, over {row['choices']['interface']}", private=True)
        )
    skew_seconds, host = max((abs(row["skew_seconds"]), row["host"]) for row in rows)
    if skew_seconds > _MOST_SKEW_SECONDS:
        results.append(
            warning(
                "clocks",
                f"the clock of {host} differs by {skew_seconds:.1f} s from rank 0's: log times are not comparable",
                "chronyc makestep, or ask your administrator",
                private=True,
            )
        )
    else:
        results.append(ok("clocks", f"differ by at most {max(skew_seconds, 0.001):.3f} s"))
    return results
