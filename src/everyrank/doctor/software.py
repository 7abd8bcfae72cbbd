"""Checks versions, known-bad combinations and optional packages, without importing them."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from everyrank._version import __version__
from everyrank.doctor.results import CheckResult, absent, ok, problem, warning
from everyrank.launch import launchers

__all__ = [
    "NEWEST_TESTED_TORCH",
    "OLDEST_TORCH",
    "check_combinations",
    "check_optional",
    "check_software",
    "installed_versions",
]

_PACKAGES = (
    "torch numpy torchvision accelerate lightning transformers datasets horovod ray "
    "jinja2 matplotlib tensorboard wandb pillow pyarrow"
)

# A test compares these with pyproject.toml and constraints.txt.
OLDEST_TORCH, NEWEST_TESTED_TORCH = (2, 11), (2, 15)

# name -> (purpose, how to install it)
_OPTIONAL_PACKAGES: Mapping[str, tuple[str, str]] = {
    "jinja2": ("HTML reports", "pip install 'everyrank[html]'"),
    "matplotlib": ("HTML reports", "pip install 'everyrank[html]'"),
    **{
        launcher.package: (f"--launcher {launcher.name}", launcher.install_hint)
        for launcher in launchers()
        if launcher.package and launcher.install_hint
    },
    "horovod": ("--layout horovod and --launcher horovodrun", "build 0.28.1 for this torch: docs/horovod.md"),
    "accelerate": ("benchmarks/overhead.py", "pip install -e '.[benchmarks]'"),
    "lightning": ("benchmarks/overhead.py", "pip install -e '.[benchmarks]'"),
    "transformers": ("the workload causal-lm", "pip install 'everyrank[transformers]'"),
    "tensorboard": ("--tracker tensorboard", "pip install 'everyrank[tensorboard]'"),
    "wandb": ("--tracker wandb", "pip install 'everyrank[wandb]'"),
    "datasets": ("workloads that read Hugging Face's datasets", "pip install 'everyrank[datasets]'"),
    "pillow": ("workloads that read images", "pip install 'everyrank[images]'"),
    "pyarrow": ("workloads that read Parquet", "pip install 'everyrank[parquet]'"),
}
_OPTIONAL_PROGRAMS: Mapping[str, tuple[str, str]] = {
    **{
        launcher.program: (f"--launcher {launcher.name}", launcher.install_hint)
        for launcher in launchers()
        if launcher.program and launcher.install_hint
    },
    "gcc": ("--layout ...:compile on CPU", "apt install gcc"),
    "nvidia-smi": ("GPU use in reports", "it comes with the NVIDIA driver"),
}


def installed_versions() -> dict[str, str]:
    """Return the version of each installed package that everyrank uses."""
    versions: dict[str, str] = {}
    for name in _PACKAGES.split():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_software(versions: Mapping[str, str], driver: str | None) -> list[CheckResult]:
    """Run the checks of required packages. `driver` as for `check_combinations`."""
    results = [ok("everyrank", f"{__version__} on Python {platform.python_version()} ({platform.platform()})")]
    results += check_combinations(versions, driver)
    return results


def check_combinations(versions: Mapping[str, str], driver: str | None) -> list[CheckResult]:
    """Check the torch version, and packages that are known to be incompatible with it.

    `driver` is the device file of a GPU driver, None without one. Only that of NVIDIA shows that there is a GPU for
    torch: AMD's processors with graphics also have /dev/kfd, and each WSL with graphics has /dev/dxg.
    """
    torch_version = versions.get("torch")
    if torch_version is None:
        return [problem("torch", "not installed", "pip install torch")]
    torch_numbers = _numbers(torch_version)
    is_cpu_build = "+cpu" in torch_version
    results: list[CheckResult] = []
    oldest_text = ".".join(map(str, OLDEST_TORCH))
    if torch_numbers < OLDEST_TORCH:
        results.append(
            problem(
                "torch",
                f"{torch_version}: everyrank needs {oldest_text} or newer",
                f"pip install 'torch>={oldest_text}'",
            )
        )
    elif torch_numbers > NEWEST_TESTED_TORCH:
        newest_text = ".".join(map(str, NEWEST_TESTED_TORCH))
        results.append(
            warning(
                "torch",
                f"{torch_version} is newer than what everyrank was tested with ({oldest_text} to {newest_text})",
                f"pip install 'torch=={newest_text}.*', or report whether it works",
            )
        )
    else:
        results.append(ok("torch", torch_version))
    if driver is not None and is_cpu_build:
        is_nvidia = "nvidia" in driver
        results.append(
            (problem if is_nvidia else warning)(
                "torch",
                f"{torch_version} is the build for CPU, but this machine "
                + ("has an NVIDIA driver" if is_nvidia else f"may have a GPU ({driver} exists)"),
                "pip install --force-reinstall torch from the index that pytorch.org shows for your "
                + ("CUDA version" if is_nvidia else "GPU, unless torch does not support it"),
            )
        )
    if is_cpu_build and "torchvision" in versions and "+cpu" not in versions["torchvision"]:
        results.append(
            problem(
                "torchvision",
                f"{versions['torchvision']} with {torch_version}: it fails on import (operator torchvision::nms does "
                "not exist), and so do accelerate and lightning",
                "pip uninstall torchvision, or take both from https://download.pytorch.org/whl/cpu",
            )
        )
    if "numpy" not in versions:
        results.append(problem("numpy", "not installed; torch does not install it", "pip install numpy"))
    return results


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(int(number) for number in match.groups()) if match else (0, 0)


def check_optional(
    versions: Mapping[str, str], find_program: Callable[[str], str | None] = shutil.which
) -> list[CheckResult]:
    """Return the version of each optional package and the path of each program, or how to install what is missing."""
    results: list[CheckResult] = []
    for name, (purpose, install_hint) in _OPTIONAL_PACKAGES.items():
        if name in versions:
            results.append(ok(name, f"{versions[name]}, for {purpose}"))
        else:
            results.append(absent(name, f"not installed; it is for {purpose}", install_hint))
    for name, (purpose, install_hint) in _OPTIONAL_PROGRAMS.items():
        path = find_program(name)
        if path is not None:
            results.append(ok(name, f"{Path(path)}, for {purpose}"))
        else:
            results.append(absent(name, f"not found; it is for {purpose}", install_hint))
    return results
