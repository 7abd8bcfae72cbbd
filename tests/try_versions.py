"""Test the built wheel under several supported versions of Python and torch. `make test-versions` runs this script.

For each pair it creates a virtual environment under .versions/. It installs the wheel with the extra `html` and the
dependencies of the tests, and runs some of the tests. A pair that this machine cannot install is reported as
"not here", which is not a failure. The last line counts the pairs that passed, failed and were not here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

PYTHONS = ("3.11", "3.13", "3.14")
TORCHES = ("2.11", "2.13", "2.14", "2.15")
TESTS = ("tests/test_layout.py", "tests/test_workload.py", "tests/test_data.py", "tests/test_eject.py")
REPOSITORY = Path(__file__).parents[1]


class Result(NamedTuple):
    """The result of one pair: the outcome is "passed", "failed" or "not here", and the reason is one line."""

    python: str
    torch: str
    outcome: str
    reason: str


def find_python(version: str) -> str | None:
    """Return the path of a Python of this version, on PATH or under pyenv. Return None if there is none."""
    path = shutil.which(f"python{version}")
    if path is not None and "shims" in Path(path).parts:  # a shim of pyenv may have no Python to start
        path = None
    pyenv_versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    # not the free-threaded builds, such as 3.14.0t
    paths = [path for path in pyenv_versions.glob(f"{version}.*/bin/python") if path.parts[-3].split(".")[-1].isdigit()]
    pyenv_paths = sorted(paths, key=lambda path: int(path.parts[-3].split(".")[-1]))
    return path or (str(pyenv_paths[-1]) if pyenv_paths else None)


def last_line(text: str) -> str:
    """Return the last line that is not empty, at most 200 characters; "no output" if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def reason_of(output: str) -> str:
    """Return why pip has failed: the constraint that excludes this torch, or the last error of pip."""
    lines = [line.strip() for line in output.splitlines()]
    constraints = [line for line in lines if line.startswith("The user requested (constraint)")]
    if constraints:
        return f"pip on this machine is limited to {constraints[0].split()[-1]}; PIP_CONSTRAINT=/dev/null lifts it"
    errors = [line for line in lines if line.startswith("ERROR") and "ResolutionImpossible" not in line]
    return last_line("\n".join(errors[-1:]) or output)


def try_pair(
    python_version: str, torch_version: str, wheel: Path, folder: Path, tests: list[str], index_url: str
) -> Result:
    """Install the wheel for a pair of Python and torch, and run the tests."""
    base_python = find_python(python_version)
    if base_python is None:
        return Result(python_version, torch_version, "not here", f"no python{python_version} on PATH or under pyenv")
    venv = folder / f"{python_version}-{torch_version}"
    python = venv / "bin" / "python"
    if not python.exists():
        creation = subprocess.run([base_python, "-m", "venv", venv], capture_output=True, text=True)
        if creation.returncode:
            return Result(
                python_version, torch_version, "not here", f"no virtual environment: {last_line(creation.stderr)}"
            )
    options = [
        "--progress-bar=off",
        "--disable-pip-version-check",
        *(["--extra-index-url", index_url] if index_url else []),
    ]
    packages = [f"torch=={torch_version}.*", f"{wheel}[html]", "pytest", "pytest-timeout", "ruff", "pillow"]
    installation = subprocess.run([python, "-m", "pip", "install", *options, *packages], capture_output=True, text=True)
    if installation.returncode:
        return Result(python_version, torch_version, "not here", reason_of(installation.stdout + installation.stderr))
    # pip would keep a wheel of an earlier call, because it has the same version number
    reinstall_args = ["--force-reinstall", "--no-deps", str(wheel)]
    reinstallation = subprocess.run(
        [python, "-m", "pip", "install", *options, *reinstall_args], capture_output=True, text=True
    )
    if reinstallation.returncode:
        return Result(
            python_version, torch_version, "not here", reason_of(reinstallation.stdout + reinstallation.stderr)
        )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    test_run = subprocess.run(
        [python, "-m", "pytest", "-o", "addopts=-q --strict-markers", "-m", "not integration", *tests],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=environment,
    )
    outcome = "passed" if test_run.returncode == 0 else "failed"
    return Result(python_version, torch_version, outcome, last_line(test_run.stdout or test_run.stderr))


def main() -> int:
    """Test all pairs. Return 1 if tests of a pair failed, 3 if no pair could be installed, and otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--index", default="", help="an additional package index, for CPU builds of torch")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".versions")
    args = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as wheel_folder:
        build_command = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            wheel_folder,
            REPOSITORY,
        ]
        subprocess.run(build_command, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(wheel_folder).glob("*.whl")
        for python in args.python:
            for torch in args.torch:
                result = try_pair(python, torch, wheel, args.folder.absolute(), list(args.tests), args.index)
                print(f"Python {result.python}  torch {result.torch}  {result.outcome:8}  {result.reason}", flush=True)
                results.append(result)
    outcomes = [result.outcome for result in results]
    counts = {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "not here")}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["failed"] else 0 if counts["passed"] else 3


if __name__ == "__main__":
    sys.exit(main())
