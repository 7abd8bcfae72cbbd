"""The recipe whose gradients are rounded: without a hook it is the library's ddp, with one near it and not equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import Cli
from recipes.test_recipes import NUM_ROWS, Printed, beside, by_the_library, distance, read

pytestmark = pytest.mark.integration


def run(cli: Cli, folder: Path, hook: str) -> Printed:
    beside(folder, "ddp_compressed")
    done = cli.on_ranks(folder, "--float64", "--hook", hook, size=2, script="ddp_compressed.py")
    assert done.status == 0, done.err
    return read(done.out)


def test_without_a_hook(cli: Cli, tmp_path: Path) -> None:
    assert distance(run(cli, tmp_path, "none"), by_the_library(cli, "ddp:precision=float64", NUM_ROWS)) <= 1e-12


@pytest.mark.parametrize(("hook", "bound"), [("fp16", 1e-2), ("powersgd", 1.0)])
def test_with_a_hook(cli: Cli, tmp_path: Path, hook: str, bound: float) -> None:
    """It begins with the same loss, and goes on near it: fp16 within a hundredth, PowerSGD less near."""
    found = run(cli, tmp_path, hook)
    right = by_the_library(cli, "ddp:precision=float64", NUM_ROWS)
    gaps = [abs(a - b) / b for a, b in zip(found.losses, right.loss, strict=True)]
    assert gaps[0] <= 1e-12
    assert 1e-9 < max(gaps) <= bound
