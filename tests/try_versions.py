"""The built wheel under each Python and torch that it is for, as far as this machine can have them: make test-versions.

For each pair a virtual environment of its own is made under .versions/, the wheel is installed there with its extra
html and what the tests need, and a part of the tests runs. A pair that cannot be had here (no such Python, no such
torch for it) is no failure, and is said: the last line counts what was tested, what failed and what was not here.
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
    """Of one pair: passed, failed or not here, and what is to be said of it."""

    python: str
    torch: str
    outcome: str
    why: str


def find_python(version: str) -> str | None:
    """The program of a Python of this version: on PATH, or one of pyenv's; None where there is none."""
    found = shutil.which(f"python{version}")
    found = None if found is not None and "shims" in Path(found).parts else found  # pyenv's, which may start nothing
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    others = sorted(pyenv.glob(f"{version}.*/bin/python"), key=lambda path: len(str(path)))
    return found or (str(others[-1]) if others else None)


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no word"


def reason_of(output: str) -> str:
    """Why pip installed nothing: the constraint that forbids this torch, or else pip's last error."""
    lines = [line.strip() for line in output.splitlines()]
    forbidden = [line for line in lines if line.startswith("The user requested (constraint)")]
    if forbidden:
        return f"pip on this machine is limited to {forbidden[0].split()[-1]}; PIP_CONSTRAINT=/dev/null lifts it"
    errors = [line for line in lines if line.startswith("ERROR") and "ResolutionImpossible" not in line]
    return last_line("\n".join(errors[-1:]) or output)


def try_pair(version: str, torch: str, wheel: Path, folder: Path, tests: list[str], index: str) -> Result:
    """Install the wheel for a pair, and run the tests."""
    program = find_python(version)
    if program is None:
        return Result(version, torch, "not here", f"no python{version} on PATH or under pyenv")
    place = folder / f"{version}-{torch}"
    python = place / "bin" / "python"
    if not python.exists():
        made = subprocess.run([program, "-m", "venv", place], capture_output=True, text=True)
        if made.returncode:
            return Result(version, torch, "not here", f"no virtual environment: {last_line(made.stderr)}")
    options = ["--progress-bar=off", "--disable-pip-version-check", *(["--extra-index-url", index] if index else [])]
    wanted = [f"torch=={torch}.*", f"{wheel}[html]", "pytest", "pytest-timeout", "ruff", "pillow"]
    done = subprocess.run([python, "-m", "pip", "install", *options, *wanted], capture_output=True, text=True)
    if done.returncode:
        return Result(version, torch, "not here", reason_of(done.stdout + done.stderr))
    again = ["--force-reinstall", "--no-deps", str(wheel)]  # the same version number, of an earlier try
    subprocess.run([python, "-m", "pip", "install", *options, *again], capture_output=True, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [python, "-m", "pytest", "-o", "addopts=-q --strict-markers", "-m", "not integration", *tests],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=environment,
    )
    return Result(version, torch, "passed" if ran.returncode == 0 else "failed", last_line(ran.stdout or ran.stderr))


def main() -> int:
    """Try all pairs; 1 where tests of one failed, 3 where none could be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--index", default="", help="a further package index, for CPU builds of torch")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".versions")
    args = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as wheels:
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, REPOSITORY]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(wheels).glob("*.whl")
        for python in args.python:
            for torch in args.torch:
                result = try_pair(python, torch, wheel, args.folder, list(args.tests), args.index)
                print(f"Python {result.python}  torch {result.torch}  {result.outcome:8}  {result.why}", flush=True)
                results.append(result)
    counts = {word: sum(one.outcome == word for one in results) for word in ("passed", "failed", "not here")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 1 if counts["failed"] else 0 if counts["passed"] else 3


if __name__ == "__main__":
    sys.exit(main())
