"""The wheel and the source distribution contain code, types, data, recipes and the page template."""

from __future__ import annotations

import email
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

CODE = """
import importlib.resources, sys
import everyrank
from everyrank import find_workload
from everyrank.cli import main
assert "wheelhouse" in everyrank.__file__, everyrank.__file__
workload = find_workload("digits")
assert len(workload.train_data()) == 1438
assert len(workload.eval_data()) == 359
package = importlib.resources.files("everyrank")
data = ("py.typed", "builtin/DIGITS.md", "builtin/digits.csv.gz", "report/page.html", "eject/parts/main.py.txt")
for name in (*data, "recipes/fsdp.py", "recipes/shared/digits.py"):
    assert (package / name).is_file(), name
assert main(["new", "fsdp", sys.argv[1]]) == 0
assert main(["eject", "digits", sys.argv[1] + "-project", "--layout", "fsdp"]) == 0
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that is built from the checkout."""
    return built("--wheel", Path(__file__).parents[2], tmp_path_factory.mktemp("dist"))


def test_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path, repository: Path) -> None:
    """The checkout is not on the path. torch and other libraries come from the environment of the tests."""
    check_extras(wheel, repository)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    folder = tmp_path / "wheelhouse"
    python = installed(wheel, folder)
    done = subprocess.run(
        [python, "-c", CODE, tmp_path / "mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine.py").exists()
    assert (tmp_path / "digits.csv.gz").exists()
    everyrank = folder / "bin" / "everyrank"
    command = [everyrank, "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    version = runpy.run_path(str(repository / "src/everyrank/_version.py"))["__version__"]
    assert done.stdout == f"everyrank {version}\n"
    done = subprocess.run(
        [everyrank, "verify", "digits", "--layout", "ddp", "--processes", "2", "--steps", "4"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout


def test_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path, repository: Path) -> None:
    """Its wheel has the same files as the wheel of the checkout."""
    archive = built("--sdist", repository, tmp_path / "dist")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path)  # our own archive; `filter` is new in Python 3.11.4
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    assert checksums(built("--wheel", source, tmp_path / "from-source")) == checksums(wheel)


def built(kind: str, source: Path, folder: Path) -> Path:
    """Build a source tree with `python -m build` and return the distribution."""
    command = [sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", folder, source]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    [distribution] = folder.iterdir()
    return distribution


def installed(wheel: Path, folder: Path) -> Path:
    """Return the Python of a fresh environment with this wheel, and with the libraries of the tests."""
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-deps", wheel], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    # the heavy libraries, but not the editable install of everyrank, which is a .pth file and not read from here
    borrowed = Path(sys.prefix).glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(map(str, borrowed)) + "\n")
    return python


def checksums(wheel: Path) -> dict[str, int]:
    """Return the CRC of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def check_extras(wheel: Path, repository: Path) -> None:
    """Check that the wheel has the extras and packages of pyproject.toml, and that pip accepts them."""
    wanted = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert set(metadata.get_all("Provides-Extra", [])) == set(wanted)
    lines = metadata.get_all("Requires-Dist", [])
    for extra, packages in wanted.items():
        found = {re.split(r"[^\w-]", line)[0] for line in lines if line.endswith(f"extra == '{extra}'")}
        assert found == {re.split(r"[^\w-]", package)[0] for package in packages}
    words = ["--dry-run", "--quiet", "--no-index", "--report", "-", f"{wheel}[html,images,dev]"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
