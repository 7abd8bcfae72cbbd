"""Whatever happens to a file of Records: it is refused in one line, or what it says is shown, and steers nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everyrank.cli import main
from everyrank.errors import UsageError
from everyrank.record import Record, read_records, write_records

COUNT = 500
SHOWN_EVERY = 10  # of those that can be read

# --- what may happen to the bytes


def flip(content: bytearray, draw: random.Random) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def cut(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def leave_out(content: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(content))
    del content[begin : begin + draw.randrange(1, 40)]


def repeat(content: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(content))
    part = content[begin : begin + draw.randrange(1, 40)]
    content[begin:begin] = part


def put_in(content: bytearray, draw: random.Random) -> None:
    strange = [
        b"\x00",
        b"\xff\xfe",
        b'"',
        b"{",
        b"]",
        b",",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"\xe2\x80\xae",
        b"9" * 500,
    ]
    begin = draw.randrange(len(content))
    content[begin:begin] = draw.choice(strange)


BYTES: list[Callable[[bytearray, random.Random], None]] = [flip, flip, flip, cut, leave_out, repeat, put_in]

# --- what may stand in its place

STRANGE = [
    *(None, True, 0, -1, 2**70, 1e308, -0.0, "", "\x1b[31mred\x1b[0m", "a\nb", "\ud800", "<script>alert(1)</script>"),
    *("[bold]x[/]", "$x$", "x" * 5000, [], {}, [[]], {"a": None}, [None], ["x"], math.nan, math.inf),
]


def replace_value(rows: Any, draw: random.Random) -> None:
    """Another value at any place of the tree, or another key."""
    place: Any = rows
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = draw.choice(keys)
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.25:
            break
        place = inner
    if isinstance(place, dict) and draw.random() < 0.2:
        place[draw.choice(["surprise", "\x1b[2J", "schema", "loss"])] = place.pop(key)
    else:
        place[key] = draw.choice(STRANGE)


def mutated(text: str, draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        content = bytearray(text.encode())
        draw.choice(BYTES)(content, draw)
        return bytes(content)
    rows = json.loads(text)
    for _ in range(draw.randrange(1, 4)):
        replace_value(rows, draw)
    return json.dumps(rows).encode()


def read(path: Path) -> list[Record] | None:
    """The Records; None where the file is refused, in one line that names it."""
    try:
        return read_records(path)
    except UsageError as error:
        line = str(error)
    assert "\n" not in line
    assert str(path) in line
    return None


@pytest.mark.integration
def test_five_hundred_mutations_are_refused_or_shown(
    repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Never a traceback; a Record that can be read can be written, and stays the same; what is shown steers nothing."""
    source = repository / "benchmarks" / "records" / "digits-cpu.json"
    rows = json.loads(source.read_text())[:3]
    for row in rows:
        row["resources"] = None  # hundreds of samples: a change would nearly always hit one of them
        row["loss"] = row["loss"][:3]
    text = json.dumps(rows, indent=1)
    path, again = tmp_path / "records.json", tmp_path / "again.json"
    path.write_text(text)
    assert len(read(path) or []) == 3
    draw = random.Random(20261122)
    num_read = num_refused = 0
    for number in range(COUNT):
        path.write_bytes(mutated(text, draw))
        found = read(path)
        if found is None:
            num_refused += 1
        else:
            num_read += 1
            write_records(found, again)
            once = again.read_bytes()  # in which what is infinite is null
            write_records(read_records(again), again)
            assert again.read_bytes() == once, number
        if number % SHOWN_EVERY == 0:
            status = main(["report", str(path), "--markdown", str(tmp_path / "table.md")])
            out, err = capfd.readouterr()
            assert status == (2 if not found else 0), (number, err)
            assert "Traceback" not in err
            assert len(err.splitlines()) == (1 if status else 0), (number, err)
            assert not any(ord(letter) < 32 and letter != "\n" for letter in out + err), number
    assert num_read + num_refused == COUNT
    assert num_refused > 200
    assert num_read > 50
