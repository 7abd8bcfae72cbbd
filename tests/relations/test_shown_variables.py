"""The variables behind a printed number are read from the source of the call that printed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.relations.shown_variables import shown_variables

# Each case has a call, its output, a number in the output, and the variables behind this number.
PRINT_CALLS = {
    "a formatted text": (
        'print(f"epoch {epoch} loss {total / count:.3f} done")',
        "epoch 3 loss 0.412 done",
        "0.412",
        ("count", "total"),
    ),
    "several arguments": ('print("accuracy", hits, "of", rows)', "accuracy 7 of 8", "8", ("rows",)),
    "a logger's template": ('log.info("loss %.3f at %d%%", loss, share)', "loss 0.123 at 45%", "45", ("share",)),
    "percent": ('print("a %.2f b %d" % (a, b))', "a 0.25 b 8", "8", ("b",)),
    "format": ('print("x {:.3f} y {1}".format(x, y))', "x 0.250 y 8", "0.250", ("x",)),
    "texts that are added": ('print("x " + str(x) + f" y {y}")', "x 3 y 8", "8", ("y",)),
    "several lines": ('print(f"a {a:.1f} "\n      f"b {b[0]:.1f}", flush=True)', "a 1.0 b 2.0", "2.0", ("b",)),
    "another text": ('print(f"loss {loss:.3f}")', "error 0.412", "0.412", ()),
    "too few values": ('log.info("loss %.3f %d", loss)', "loss 0.412 3", "0.412", ()),
    "no call": ("loss = 0.412", "loss 0.412", "0.412", ()),
}


@pytest.mark.parametrize(("call", "text", "number", "variables"), PRINT_CALLS.values(), ids=list(PRINT_CALLS))
def test_variables_of_a_printed_number_are_returned(
    tmp_path: Path, call: str, text: str, number: str, variables: tuple[str, ...]
) -> None:
    """No variable is returned if the call does not match the output."""
    script = tmp_path / "train.py"
    script.write_text(f"{call}\n")
    assert shown_variables(f"{script}:1", text, text.index(number)) == variables


def test_script_that_cannot_be_read_has_no_variables(tmp_path: Path) -> None:
    """The file is missing, or the place is empty."""
    assert shown_variables(f"{tmp_path / 'train.py'}:1", "loss 1", 5) == ()
    assert shown_variables("", "loss 1", 5) == ()
