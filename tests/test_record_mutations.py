"""Random mutations of a Record file: it is refused in one line, or shown without control characters."""

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
SHOWN_EVERY = 10  # `report` is run for one in ten mutations

# --- mutations of bytes


def flip(content: bytearray, rng: random.Random) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def cut(content: bytearray, rng: random.Random) -> None:
    del content[rng.randrange(len(content)) :]


def leave_out(content: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(content))
    del content[start : start + rng.randrange(1, 40)]


def repeat(content: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(content))
    part = content[start : start + rng.randrange(1, 40)]
    content[start:start] = part


def put_in(content: bytearray, rng: random.Random) -> None:
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
    start = rng.randrange(len(content))
    content[start:start] = rng.choice(strange)


BYTES: list[Callable[[bytearray, random.Random], None]] = [flip, flip, flip, cut, leave_out, repeat, put_in]

# --- mutations of values

STRANGE = [
    *(None, True, 0, -1, 2**70, 1e308, -0.0, "", "\x1b[31mred\x1b[0m", "a\nb", "\ud800", "<script>alert(1)</script>"),
    *("[bold]x[/]", "$x$", "x" * 5000, [], {}, [[]], {"a": None}, [None], ["x"], math.nan, math.inf),
]


def replace_value(rows: Any, rng: random.Random) -> None:
    """Replace a random value in the tree, or rename its key."""
    parent: Any = rows
    while True:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        if not keys:
            return
        key = rng.choice(keys)
        child = parent[key]
        if not isinstance(child, dict | list) or not child or rng.random() < 0.25:
            break
        parent = child
    if isinstance(parent, dict) and rng.random() < 0.2:
        parent[rng.choice(["surprise", "\x1b[2J", "schema", "loss"])] = parent.pop(key)
    else:
        parent[key] = rng.choice(STRANGE)


def mutate(text: str, rng: random.Random) -> bytes:
    """Return the file with a mutation of its bytes or of one to three values."""
    if rng.random() < 0.5:
        content = bytearray(text.encode())
        rng.choice(BYTES)(content, rng)
        return bytes(content)
    rows = json.loads(text)
    for _ in range(rng.randrange(1, 4)):
        replace_value(rows, rng)
    return json.dumps(rows).encode()


def read(path: Path) -> list[Record] | None:
    """Return the Records, or None if the file is refused. The error must be one line that names the file."""
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
    """There is never a traceback. Readable Records survive a round trip, and are shown without control characters."""
    source = repository / "benchmarks" / "records" / "digits-cpu.json"
    rows = json.loads(source.read_text())[:3]
    for row in rows:
        row["resources"] = None  # it has hundreds of samples, so most mutations would change one of them
        row["loss"] = row["loss"][:3]
    text = json.dumps(rows, indent=1)
    path, rewritten_path = tmp_path / "records.json", tmp_path / "again.json"
    path.write_text(text)
    assert len(read(path) or []) == 3
    rng = random.Random(20261122)
    num_read = num_refused = 0
    for number in range(COUNT):
        path.write_bytes(mutate(text, rng))
        records = read(path)
        if records is None:
            num_refused += 1
        else:
            num_read += 1
            write_records(records, rewritten_path)
            rewritten = rewritten_path.read_bytes()  # infinite values are null here
            write_records(read_records(rewritten_path), rewritten_path)
            assert rewritten_path.read_bytes() == rewritten, number
        if number % SHOWN_EVERY == 0:
            status = main(["report", str(path), "--markdown", str(tmp_path / "table.md")])
            out, err = capfd.readouterr()
            assert status == (2 if not records else 0), (number, err)
            assert "Traceback" not in err
            assert len(err.splitlines()) == (1 if status else 0), (number, err)
            assert not any(ord(character) < 32 and character != "\n" for character in out + err), number
    assert num_read + num_refused == COUNT
    assert num_refused > 200
    assert num_read > 50
