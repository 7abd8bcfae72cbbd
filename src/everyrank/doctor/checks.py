"""Runs all checks in order, and formats their results for pasting into an issue."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everyrank._version import __version__
from everyrank.doctor.machine import check_machine
from everyrank.doctor.network import check_network
from everyrank.doctor.results import PROBLEM, CheckResult, absent, ok, problem
from everyrank.doctor.software import check_optional, check_software, installed_versions
from everyrank.errors import CannotRunError, EveryrankError
from everyrank.launch import Launch, run_ranks
from everyrank.layout import STRATEGIES

__all__ = ["DoctorReport", "paste", "run_checks"]

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # Linux, WSL, ROCm
_PRIVATE = ("host name", "interfaces", "temporary files")


@dataclass(frozen=True)
class DoctorReport:
    """The results by section, and the versions of the installed packages."""

    sections: dict[str, list[CheckResult]]
    versions: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def problems(self) -> list[CheckResult]:
        """The results that will break runs on this machine."""
        return [
            result
            for section_results in self.sections.values()
            for result in section_results
            if result.status == PROBLEM
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON, for `--json`."""
        return {
            "schema": 1,
            "everyrank": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "versions": self.versions,
            "sections": {
                name: [asdict(result) for result in section_results] for name, section_results in self.sections.items()
            },
        }


def run_checks(timeout_seconds: float = 60.0, advance: Callable[[str], None] = lambda _: None) -> DoctorReport:
    """Run all checks; `advance` is called with the name of each section. Starts two ranks for each tested backend."""
    environment = dict(os.environ)
    versions = installed_versions()
    driver = next((path for path in _DRIVERS if Path(path).exists()), None)
    sections: dict[str, list[CheckResult]] = {}
    advance("software")
    sections["software"] = check_software(versions, driver)
    advance("machine")
    sections["machine"] = check_machine(environment)
    advance("network")
    sections["network"] = check_network(environment)
    advance("backends")
    sections["backends"], torch_facts = _backends(
        [*sections["machine"], *sections["network"]], versions, timeout_seconds
    )
    num_cuda = len(torch_facts["devices"]) if torch_facts else 0
    default_backend = "nccl" if num_cuda else "shm"
    is_broken = any(result.what == default_backend and result.status == PROBLEM for result in sections["backends"])
    advance("layouts")
    sections["layouts"] = layouts_here(
        num_cuda,
        runs=torch_facts is not None,
        has_horovod="horovod" in versions,
        broken_backend=default_backend if is_broken else "",
    )
    sections["optional"] = check_optional(versions)
    return DoctorReport(sections, versions)


def _backends(
    earlier_results: Sequence[CheckResult], versions: Mapping[str, str], timeout_seconds: float
) -> tuple[list[CheckResult], dict[str, Any] | None]:
    """Test gloo, shm and nccl. Returns the results, and the facts about torch or None if no rank started."""
    if "torch" not in versions:
        return [absent("gloo", "not tested: torch is not installed")], None
    causes = ("GLOO_SOCKET_IFNAME", "launcher", "temporary files")
    failed_check = next(
        (result for result in earlier_results if result.status == PROBLEM and result.what in causes), None
    )
    if failed_check is not None:
        return [absent("gloo", f"not tested, because of the problem with {failed_check.what}")], None
    results, gloo_result = _selftest("gloo", 2, "cpu", timeout_seconds)
    if results is None:
        return [gloo_result], None
    facts: dict[str, Any] = results[0]["torch"]
    results = [_devices(facts), gloo_result, _selftest("shm", 2, "cpu", timeout_seconds)[1]]
    num_cuda = len(facts["devices"])
    if not facts["backends"]["nccl"]:
        results.append(absent("nccl", "not in this build of torch; needed for communication between CUDA devices"))
    elif num_cuda == 0:
        results.append(absent("nccl", "not verified here: torch sees no CUDA device"))
    else:
        results.append(_selftest("nccl", min(2, num_cuda), "cuda", timeout_seconds)[1])
    missing_backends = [name for name in ("mpi", "ucc") if not facts["backends"][name]]
    results += [absent(name, "not in this build of torch; everyrank does not need it") for name in missing_backends]
    return [*results, _rpc(facts)], facts


def _rpc(facts: dict[str, Any]) -> CheckResult:
    """Check torch.distributed.rpc, which the recipes rpc_* and ddp_rpc use; TensorPipe is its only backend."""
    if not facts["rpc"]:
        return absent("rpc", "not in this build of torch; the RPC recipes need it", "use a build for Linux")
    return ok(
        "rpc",
        f"{', '.join(facts['rpc'])}; it unpickles what it receives: use it on trusted networks only (docs/rpc.md)",
    )


def _selftest(backend: str, ranks: int, device: str, timeout: float) -> tuple[list[dict[str, Any]] | None, CheckResult]:
    launch = Launch(processes=ranks, device=device, backend=backend, timeout_seconds=timeout)
    try:
        answers = run_ranks(launch, "everyrank.doctor.selftest:selftest_rank", launch)
    except CannotRunError as error:
        return None, absent(backend, str(error))
    except EveryrankError as error:
        fix = f"the whole traceback is in {error.log}" if error.log else "paste this into an issue"
        return None, problem(backend, f"{ranks} ranks could not communicate: {error}", fix, private=True)
    results = [answers[rank] for rank in sorted(answers)]
    wrong_results = [text for result in results for text in result["wrong"]]
    if wrong_results:
        return results, problem(
            backend, f"wrong result: {wrong_results[0]}", "pip install 'torch>=2.11', or another backend"
        )
    checks_text = "sum, average, maximum, all-gather and broadcast are correct"
    if ranks == 1:
        checks_text += "; not verified between devices: needs 2 CUDA devices"
    return results, ok(backend, f"{ranks} rank{'s' * (ranks > 1)} on {device}: {checks_text}")


def _devices(facts: dict[str, Any]) -> CheckResult:
    """Return the CUDA devices, or why there are none."""
    if facts["cuda_error"]:
        return problem(
            "devices",
            f"CUDA cannot be used: {facts['cuda_error']}",
            "update the driver, or install torch for an older CUDA (pytorch.org); until then, use --device cpu",
        )
    if facts["devices"]:
        names = [f"{device['name']} ({device['memory_bytes'] / 2**30:.0f} GiB)" for device in facts["devices"]]
        return ok("devices", "CPU, " + ", ".join(names))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and facts["cuda"]:
        return absent("devices", f"only the CPU: CUDA_VISIBLE_DEVICES={hidden!r} hides other devices", "unset it")
    reason = "this torch is built without CUDA" if not facts["cuda"] else "no driver or no GPU"
    return absent("devices", f"only the CPU: {reason}")


def layouts_here(num_cuda: int, runs: bool, has_horovod: bool, broken_backend: str = "") -> list[CheckResult]:
    """Return a result for each layout: whether it can run here. `broken_backend` is the default one, if it fails."""
    results: list[CheckResult] = []
    for name in STRATEGIES:
        if not runs:
            results.append(absent(name, "not verified here: no rank started"))
        elif broken_backend and STRATEGIES[name].axis is not None:
            results.append(absent(name, f"not verified here, because of the problem with {broken_backend}"))
        elif name == "dataparallel" and num_cuda < 2:
            results.append(absent(name, "not verified here: needs 2 CUDA devices"))
        elif name == "horovod" and not has_horovod:
            results.append(absent(name, "not verified here: Horovod is not installed"))
        else:
            devices = f"{num_cuda} CUDA device{'s' * (num_cuda > 1)}" if num_cuda else "CPU"
            results.append(ok(name, f"runs on {devices}"))
    return results


def paste(report: DoctorReport) -> str:
    """Return a folded Markdown block for an issue, without host names, addresses and paths of the user."""
    lines = ["<details><summary>everyrank doctor</summary>", "", "```"]
    lines.append(f"everyrank {__version__} · Python {platform.python_version()} · {platform.platform()}")
    lines.append(" ".join(f"{name}={version}" for name, version in report.versions.items()))
    for section, section_results in report.sections.items():
        for result in section_results:
            text = "(left out)" if result.private or result.what in _PRIVATE else result.text
            if section != "optional":
                lines.append(f"{result.status:8}{result.what}: {text}")
    return "\n".join([*lines, "```", "</details>"])
