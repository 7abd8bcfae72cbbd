"""Batch sizes that stand in a script are found by their names."""

from __future__ import annotations

import ast

import pytest

from everyrank.rerun.batch_sizes import sizes_that_divide, with_larger_batches, with_larger_batches_in_args

TEXT = """
BATCH, WIDTH = 4, 16
EVAL_BATCH_SIZE: int = 8
GLOBAL_BATCH = 8
num_batches = 5
config = {"batch_size": 4, "width": 16}
parser.add_argument("--micro-batch-size", type=int, default=4)
parser.add_argument("--batches", type=int, default=4)

def draw(per_rank=4, bs=4, *, num_envs=4, prompts=3):
    return loader(data, batch_size=4)
"""


def test_batch_sizes_are_multiplied() -> None:
    """Not those of all ranks, nor numbers of batches."""
    tree = ast.parse(TEXT)
    with_larger_batches(tree, 2)
    assert ast.unparse(tree) == ast.unparse(
        ast.parse(
            TEXT.replace("BATCH, WIDTH = 4,", "BATCH, WIDTH = 8,")
            .replace("int = 8", "int = 16")
            .replace('"batch_size": 4', '"batch_size": 8')
            .replace('"--micro-batch-size", type=int, default=4', '"--micro-batch-size", type=int, default=8')
            .replace("per_rank=4, bs=4, *, num_envs=4", "per_rank=8, bs=8, *, num_envs=8")
            .replace("batch_size=4)", "batch_size=8)")
        )
    )


def test_another_integer_is_multiplied_by_its_name() -> None:
    tree = ast.parse(TEXT)
    with_larger_batches(tree, 2, "prompts")
    assert ast.unparse(tree) == ast.unparse(ast.parse(TEXT.replace("prompts=3", "prompts=6")))
    assert sizes_that_divide(TEXT, 6) == ["prompts"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["t.py", "--batch-size", "4", "--steps", "4"], ["t.py", "--batch-size", "8", "--steps", "4"]),
        (["t.py", "--batch-size=4", "4"], ["t.py", "--batch-size=8", "4"]),
        (["t.py", "--bs", "x", "--global-batch-size", "4"], ["t.py", "--bs", "x", "--global-batch-size", "4"]),
    ],
)
def test_arguments_are_multiplied(words: list[str], expected: list[str]) -> None:
    assert with_larger_batches_in_args(words, 2) == expected
