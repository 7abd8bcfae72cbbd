"""The built wheel in an empty virtual environment: code, types, data, recipes and page template."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

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
for name in ("py.typed", "builtin/DIGITS.md", "builtin/digits.csv.gz", "report/page.html", "recipes/fsdp.py"):
    assert (package / name).is_file(), name
assert main(["new", "fsdp", sys.argv[1]]) == 0
"""


def test_wheel(tmp_path: Path, repository: Path) -> None:
    """Built from the checkout, installed without it; torch and the rest are borrowed from the tests' environment."""
    wheels = tmp_path / "dist"
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, repository]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = wheels.glob("everyrank-*.whl")
    folder = tmp_path / "wheelhouse"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    # the heavy libraries, but not the editable install of everyrank, which is a .pth file and not read from here
    borrowed = Path(sys.prefix).glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(map(str, borrowed)) + "\n")
    done = subprocess.run(
        [python, "-c", CODE, tmp_path / "mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine.py").exists()
    assert (tmp_path / "digits.csv.gz").exists()
    everyrank = folder / "bin" / "everyrank"
    done = subprocess.run(
        [everyrank, "verify", "digits", "--layout", "ddp", "--processes", "2", "--steps", "4"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout
