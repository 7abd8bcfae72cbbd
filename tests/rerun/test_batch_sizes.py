"""Batch sizes in a script's source and arguments are recognized by their names and multiplied."""

from __future__ import annotations

import ast
import codecs

import pytest

from everyrank.rerun.batch_sizes import sizes_that_divide, with_larger_batches, with_larger_batches_in_args

SCRIPT = """
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


def test_local_batch_sizes_are_multiplied() -> None:
    """Global batch sizes and numbers of batches stay as they are."""
    tree = ast.parse(SCRIPT)
    with_larger_batches(tree, 2)
    assert ast.unparse(tree) == ast.unparse(
        ast.parse(
            SCRIPT.replace("BATCH, WIDTH = 4,", "BATCH, WIDTH = 8,")
            .replace("int = 8", "int = 16")
            .replace('"batch_size": 4', '"batch_size": 8')
            .replace('"--micro-batch-size", type=int, default=4', '"--micro-batch-size", type=int, default=8')
            .replace("per_rank=4, bs=4, *, num_envs=4", "per_rank=8, bs=8, *, num_envs=8")
            .replace("batch_size=4)", "batch_size=8)")
        )
    )


def test_integer_with_two_names_is_multiplied_once() -> None:
    tree = ast.parse("batch_size = bs = 4")
    with_larger_batches(tree, 2)
    assert ast.unparse(tree) == "batch_size = bs = 8"


def test_integer_with_a_given_name_is_multiplied() -> None:
    """The name of a different integer, such as `prompts`, can be passed."""
    tree = ast.parse(SCRIPT)
    with_larger_batches(tree, 2, "prompts")
    assert ast.unparse(tree) == ast.unparse(ast.parse(SCRIPT.replace("prompts=3", "prompts=6")))
    assert sizes_that_divide(SCRIPT.encode(), 6) == ["prompts"]


def test_names_of_integers_are_found_in_a_script_with_any_encoding() -> None:
    """Some editors of Windows begin a script with a byte order mark, and others write Latin-1."""
    assert sizes_that_divide(codecs.BOM_UTF8 + SCRIPT.encode(), 6) == ["prompts"]
    assert sizes_that_divide("# coding: latin-1\nanzahl_für_jeden = 3".encode("latin-1"), 6) == ["anzahl_für_jeden"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["t.py", "--batch-size", "4", "--steps", "4"], ["t.py", "--batch-size", "8", "--steps", "4"]),
        (["t.py", "--batch-size=4", "4"], ["t.py", "--batch-size=8", "4"]),
        (["t.py", "--bs", "x", "--global-batch-size", "4"], ["t.py", "--bs", "x", "--global-batch-size", "4"]),
    ],
)
def test_batch_sizes_in_arguments_are_multiplied(args: list[str], expected: list[str]) -> None:
    """A global batch size and a value that is not an integer stay as they are."""
    assert with_larger_batches_in_args(args, 2) == expected
