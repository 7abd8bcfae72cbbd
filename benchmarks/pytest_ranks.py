"""Measure how long 20 tests on 2 and 4 ranks take with the pytest plugin of the built wheel.

Run: python benchmarks/pytest_ranks.py [--json F] [--rounds N]

The wheel is installed in a fresh environment, which uses torch and pytest of the environment that runs this script. The
tests run collectives, messages and DistributedDataParallel, over gloo and shm, with the fixture `ranks` and the marker.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import site
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from silent_bugs import provenance

REPOSITORY = Path(__file__).parent.parent
TESTS = """
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def summed(value):
    total = torch.full((1000,), value + dist.get_rank())
    dist.all_reduce(total)
    return float(total[0])


def pass_to_next(count):
    rank, received = dist.get_rank(), torch.zeros(1)
    request = dist.isend(torch.tensor([float(rank)]), (rank + 1) % count)
    dist.recv(received, (rank - 1) % count)
    request.wait()
    return float(received)


def train(steps):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4) * (dist.get_rank() + step)).square().mean().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("count", [2, 4])
class TestOwnCode:
    def test_all_reduce(self, ranks, count, backend):
        assert ranks(count, backend=backend).run(summed, 1.0) == [count + sum(range(count))] * count

    def test_ring(self, ranks, count, backend):
        assert ranks(count, backend=backend).run(pass_to_next, count) == [(rank - 1) % count for rank in range(count)]

    def test_ddp(self, ranks, count, backend):
        first, *others = ranks(count, backend=backend).run(train, 3)
        assert all(other == first for other in others)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(4))
def test_on_two_ranks(number):
    total = torch.ones(number + 1)
    dist.all_reduce(total)
    assert total.sum() == 2 * (number + 1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("number", range(4))
def test_on_four_ranks(number):
    rows = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(rows, torch.tensor([float(dist.get_rank())]))
    assert torch.cat(rows).tolist() == [0, 1, 2, 3]
"""


def make_environment(folder: Path) -> Path:
    """Build the wheel, install it in a new environment, and return the Python of the environment."""
    run_options: dict[str, Any] = {"check": True, "capture_output": True, "timeout": 300}
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY]
    subprocess.run(build, **run_options)
    venv.create(folder / "venv")
    packages = next((folder / "venv").rglob("site-packages"))
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    [wheel] = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, wheel]
    subprocess.run(install, **run_options)
    return folder / "venv" / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seconds: list[float] = []
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = make_environment(folder)
        (folder / "tests").mkdir()
        (folder / "tests" / "test_ranks.py").write_text(TESTS)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        for _ in range(args.rounds):
            loads.append(round(os.getloadavg()[0], 1))
            start = time.monotonic()
            process = subprocess.run(
                [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
                cwd=folder / "tests",
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
                env=environment,
            )
            seconds.append(round(time.monotonic() - start, 2))
            passed = re.search(r"(\d+) passed", process.stdout)
            if process.returncode or not passed or passed[1] != "20":
                raise SystemExit(process.stdout + process.stderr)
            print(f"20 tests in {seconds[-1]} s, load {loads[-1]}", flush=True)
    print(f"20 tests: {statistics.median(seconds)} s, median of {args.rounds}")
    if args.json:
        rows = [{"tests": 20, "seconds": run, "load_before": load} for run, load in zip(seconds, loads, strict=True)]
        content = {"rows": rows, "provenance": provenance()}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
