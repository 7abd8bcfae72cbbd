"""The recipes that show operations without training. They check each result. A wrong result gives exit status 1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes import Cli, EndedRanks, rank_environment
from recipes.test_recipes import OPERATION_RECIPES, RECIPES_FOLDER, _forked_programs, refusal_line, write_recipe

pytestmark = pytest.mark.integration

__all__ = ["_forked_programs"]

# The number of results that all ranks check, by recipe and world size.
NUM_RESULTS = {
    "point_to_point": {2: 14, 3: 20, 4: 26},
    "collectives": {1: 21, 2: 39, 3: 57, 4: 75, 14: 255},  # 14! is not exact in float32
    "process_groups": {1: 17, 2: 29, 3: 45, 4: 57},
}
# Some lines that rank 0 prints in a run on four ranks.
EXPECTED_OUTPUT = {
    "point_to_point": ["came back as 3", "rank 1 received 200 first", "1000 numbers of rank 3"],
    "collectives": [
        "all_to_all             rank 0            0 1 2 3  ->  0 10 20 30\n",
        "reduce_scatter         rank 0            0 1 2 3  ->  60\n",
    ],
    "process_groups": [
        "    rank 2: rank 1 of 2 in the group; sum of its ranks: 2\n",
        "    rank 3: data 1, tensor 1: sum 5 in its row, 4 in its column, 6 over both\n",
    ],
}
# (recipe, ranks, original text, replacement, error)
MISTAKES = [
    ("point_to_point", 3, "        tensor += 1\n", "", "recv from the previous rank: got 0.0, not 1"),
    (
        "point_to_point",
        2,
        "dist.isend(sent[:1], dst=previous",
        "dist.isend(sent[1:], dst=previous",
        "irecv from both neighbours",
    ),
    ("point_to_point", 2, "tensor([rank**2])", "tensor([rank * 2])", "answers by rank"),
    (
        "point_to_point",
        3,  # sends in the opposite direction
        "P2POp(dist.isend, sent, (rank + 1) % world_size),\n        dist.P2POp(dist.irecv, received, (rank - 1)",
        "P2POp(dist.isend, sent, (rank - 1) % world_size),\n        dist.P2POp(dist.irecv, received, (rank + 1)",
        "received in the batch",
    ),
    ("collectives", 2, "op=dist.ReduceOp.SUM", "op=dist.ReduceOp.MAX", "reduce: got [2.0], not [3.0]"),
    ("collectives", 2, "op=getattr(dist.ReduceOp, name)", "op=dist.ReduceOp.SUM", "all_reduce AVG"),
    (
        "collectives",
        2,
        "dist.reduce_scatter(local, chunks)",
        "dist.reduce_scatter(local, chunks[::-1])",
        "reduce_scatter",
    ),
    (
        "collectives",
        2,
        "dist.all_to_all_single(received, local)",
        "received.copy_(local)",
        "all_to_all: got [0.0, 1.0]",
    ),
    ("collectives", 2, "    dist.barrier()\n", "", "barrier: all arrived before one left"),
    (
        "process_groups",
        3,
        'group)\n    check("sum of the group"',
        'None)\n    check("sum of the group"',
        "sum of the group",
    ),
    ("process_groups", 4, "group = mesh.get_group(axis)", 'group = mesh.get_group("data")', "ranks along tensor"),
    ("process_groups", 4, 'mesh.get_group("tensor")), mesh', 'mesh.get_group("data")), mesh', "sum along both axes"),
    (
        "ring_allreduce",
        3,
        "local_chunk += received",
        "local_chunk.copy_(received)",
        "differs from dist.all_reduce's by",
    ),
    (
        "ring_allreduce",
        3,
        "isend(outgoing, next_rank)",
        "isend(tensor[: len(outgoing)], next_rank)",
        "differs from dist.all_reduce's by",
    ),
    (
        "ring_allreduce",
        2,
        "/ len(batch)",
        "/ len(local_batch)",
        "too much for rounding",
    ),  # uses the sum of the means of each rank
]


def run_on_ranks(cli: Cli, folder: Path, name: str, size: int) -> EndedRanks:
    """Run the recipe on `size` ranks, and return how they ended."""
    return cli.on_ranks(folder, size=size, script=f"{name}.py")


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in NUM_RESULTS for size in NUM_RESULTS[name]])
def test_every_result_is_checked_and_correct(cli: Cli, tmp_path: Path, name: str, size: int) -> None:
    write_recipe(tmp_path, name)
    result = run_on_ranks(cli, tmp_path, name, size)
    assert result.status == 0, result.err
    assert result.out.splitlines()[-1].strip() == f"{NUM_RESULTS[name][size]} results on {size} ranks, all correct"
    if size == 4:
        assert all(text in result.out for text in EXPECTED_OUTPUT[name])


def test_all_recipes_with_operations_are_tested() -> None:
    assert set(NUM_RESULTS) == set(EXPECTED_OUTPUT) == OPERATION_RECIPES


@pytest.mark.parametrize(("name", "size", "before", "after", "message"), MISTAKES)
def test_wrong_result_ends_the_recipe(
    cli: Cli, tmp_path: Path, name: str, size: int, before: str, after: str, message: str
) -> None:
    """The rank with the wrong result exits with status 1 and prints it."""
    text = (RECIPES_FOLDER / f"{name}.py").read_text()
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    write_recipe(tmp_path, name, text.replace(before, after))
    result = run_on_ranks(cli, tmp_path, name, size)
    assert 1 in result.statuses
    assert "all correct" not in result.out
    errors = "".join((tmp_path / f"rank{rank}.err").read_text() for rank in range(size))
    assert re.search(rf"^{name}.py: .*{re.escape(message)}", errors, re.MULTILINE), errors


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("point_to_point", {}, "got 0: start it with torchrun"),
        ("point_to_point", rank_environment(0, "1", 1), "got 1: start it with torchrun"),
        ("collectives", {}, "start it with torchrun"),
        ("process_groups", {}, "start it with torchrun"),
    ],
)
def test_start_without_torchrun_is_refused(tmp_path: Path, name: str, variables: dict[str, str], message: str) -> None:
    write_recipe(tmp_path, name)
    line = refusal_line(tmp_path, f"python {name}.py", **variables)
    assert line.startswith(f"{name}.py: ")
    assert message in line
