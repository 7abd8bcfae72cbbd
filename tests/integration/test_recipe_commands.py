"""Each recipe by the very command in its header, with the data beside it: the losses are those of the library."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import everyrank
from forge import Forge
from recipes.test_recipes import LAYOUTS, LOOPBACK, NAMES, RECIPES, distance, library, read

PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


@pytest.mark.parametrize("name", NAMES)
def test_by_its_own_command(forge: Forge, tmp_path: Path, name: str) -> None:
    """Every loss to 1e-12, and the held-out images that are read right, exactly."""
    text = (RECIPES / f"{name}.py").read_text()
    (tmp_path / f"{name}.py").write_text(text)
    data = Path(everyrank.__file__).parent / "workloads" / "digits.csv.gz"
    (tmp_path / data.name).write_bytes(data.read_bytes())
    stdout = ""
    for command in re.findall(r"^Run: (.*)$", text, re.MULTILINE):
        program, *words = shlex.split(command)
        done = subprocess.run(
            [*PROGRAMS[program], *words],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        stdout += done.stdout
    assert distance(read(stdout), library(forge, LAYOUTS[name])) <= 1e-12
