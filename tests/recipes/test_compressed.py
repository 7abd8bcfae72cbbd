"""The recipe with compressed gradients: without a hook it equals ddp, and with a hook it is close."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import Cli
from recipes.test_recipes import (
    NUM_ROWS,
    RecipeOutput,
    difference_from_record,
    digits_record,
    parse_output,
    write_recipe,
)

pytestmark = pytest.mark.integration


def run_recipe(cli: Cli, folder: Path, hook: str) -> RecipeOutput:
    """Run the recipe on two ranks with this communication hook."""
    write_recipe(folder, "ddp_compressed")
    result = cli.on_ranks(folder, "--float64", "--hook", hook, size=2, script="ddp_compressed.py")
    assert result.status == 0, result.err
    return parse_output(result.out)


def test_without_a_hook_it_equals_ddp(cli: Cli, tmp_path: Path) -> None:
    assert (
        difference_from_record(run_recipe(cli, tmp_path, "none"), digits_record(cli, "ddp:precision=float64", NUM_ROWS))
        <= 1e-12
    )


@pytest.mark.parametrize(("hook", "bound"), [("fp16", 1e-2), ("powersgd", 1.0)])
def test_with_a_hook_the_losses_are_close_to_ddp(cli: Cli, tmp_path: Path, hook: str, bound: float) -> None:
    """The first loss is equal. Later losses differ by at most a hundredth with fp16, and by more with PowerSGD."""
    output = run_recipe(cli, tmp_path, hook)
    record = digits_record(cli, "ddp:precision=float64", NUM_ROWS)
    relative_differences = [abs(a - b) / b for a, b in zip(output.losses, record.loss, strict=True)]
    assert relative_differences[0] <= 1e-12
    assert 1e-9 < max(relative_differences) <= bound
