"""Files of many samples each, tables, text of any files, and what may be fetched: real files, read in any order."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import json
import math
import random
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everyrank import find_workload
from everyrank.builtin.digits import Digits
from everyrank.builtin.text import perplexity
from everyrank.datasets import JsonLines, ParquetRows, TarShards, TextLines, TextWindows, files_in
from everyrank.datasets.download import File, download
from everyrank.errors import EveryrankError, UsageError, WorkloadError
from processes import Cli

PIL = pytest.importorskip("PIL.Image", reason="not verified here: needs Pillow")


def same(value: Any) -> Any:
    return value


# --- lines


def test_lines_are_found_wherever_they_end(tmp_path: Path) -> None:
    """No newline at the end, Windows ends of line, empty lines, an empty file, letters of several bytes."""
    (tmp_path / "a.txt").write_bytes("eins\r\nzwei\n\n\r\ndrei größer".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes("四\n".encode())
    lines = TextLines(files_in(tmp_path, [".txt"]), same)
    assert [lines[index] for index in (3, 0, 2, 1)] == ["四", "eins", "drei größer", "zwei"]
    assert lines.shard_sizes == [3, 0, 1]
    assert lines.checksum != TextLines([tmp_path / "a.txt"], same).checksum


def test_lines_of_blanks_marks_and_hidden_files(tmp_path: Path) -> None:
    """A byte order mark and lines of blanks are no content; what begins with a dot is not read."""
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf"eins"\n  \n\t\r\n"zwei"')
    for hidden in (".git/b.jsonl", ".ipynb_checkpoints/a.jsonl", ".c.jsonl"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text('"no"\n')
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbferste\n")
    assert TextLines([tmp_path / "d.txt"], same)[0] == "erste"
    values = TextLines(files_in(tmp_path, [".jsonl"]), same)
    assert [values[index] for index in range(len(values))] == ['"eins"', '"zwei"']


def test_lines_over_the_borders_of_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked through piece by piece; where a piece ends makes no difference."""
    content = b"".join(b"%d\n" % number for number in range(0, 3000, 7))
    (tmp_path / "a.txt").write_bytes(content)
    for chunk in (1, 2, 3, 64):
        monkeypatch.setattr("everyrank.datasets.shards._CHUNK", chunk)
        lines = TextLines([tmp_path / "a.txt"], int)
        assert [lines[index] for index in range(len(lines))] == list(range(0, 3000, 7))


def test_lines_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": \n')
    (tmp_path / "b.txt").write_bytes(b"fine\n\xff\xfe\n")
    (tmp_path / "c.jsonl").write_bytes(b"\x1f\x8b\x08")
    values = JsonLines([tmp_path / "a.jsonl"], same)
    assert values[0] == {"x": 1}
    with pytest.raises(WorkloadError, match=r"a\.jsonl: sample 1 is no JSON"):
        values[1]
    with pytest.raises(WorkloadError, match=r"b\.txt: sample 1 is not UTF-8"):
        TextLines([tmp_path / "b.txt"], same)[1]
    with pytest.raises(WorkloadError, match="compressed"):
        JsonLines([tmp_path / "c.jsonl"], same)
    with pytest.raises(WorkloadError, match=r"no \*\.csv there"):
        files_in(tmp_path, [".csv"])
    with pytest.raises(IndexError):
        values[2]


# --- tar files


def jpeg_of(pixels: torch.Tensor) -> bytes:
    """A digit of 8 x 8, enlarged to 32 x 32."""
    image = PIL.fromarray((pixels[0] * 255).to(torch.uint8).numpy()).resize((32, 32))
    content = io.BytesIO()
    image.save(content, "JPEG")
    return content.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))


def digits_in_tars(folder: Path, num_files: int = 3, each: int = 12) -> None:
    """train-*.tar and val-*.tar in the WebDataset layout, of the shipped digits."""
    for kind, held_out in (("train", False), ("val", True)):
        data = Digits(held_out)
        for number in range(num_files):
            members: list[tuple[str, bytes]] = []
            for index in range(number * each, number * each + each):
                image, label = data[index]
                members += [(f"{index:05d}.jpg", jpeg_of(image)), (f"{index:05d}.cls", str(int(label)).encode())]
            write_tar(folder / kind / f"{kind}-{number}.tar", members)


def test_samples_of_a_tar_file(tmp_path: Path) -> None:
    """Files of one sample are put together by their names, in folders too; any of them can be read alone."""
    write_tar(tmp_path / "a.tar", [("x/1.seg.png", b"S"), ("x/1.txt", b"T"), ("2.txt", b"U"), (".hidden", b"")])
    write_tar(tmp_path / "b.tar", [("1.txt", b"V" * 5000)])
    data = TarShards([tmp_path / "a.tar", tmp_path / "b.tar"], same)
    assert data.shard_sizes == [2, 1]
    assert data[2] == {"__key__": "1", "txt": b"V" * 5000}
    assert data[0] == {"__key__": "x/1", "seg.png": b"S", "txt": b"T"}


def test_tar_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "cut.tar", [("1.txt", b"V" * 5000)])
    (tmp_path / "cut.tar").write_bytes((tmp_path / "cut.tar").read_bytes()[:2000])
    write_tar(tmp_path / "twice.tar", [("1.txt", b"V"), ("1.txt", b"W")])
    (tmp_path / "no.tar").write_bytes(b"no tar at all" * 100)
    write_tar(tmp_path / "one.tar", [("1.txt", b"V" * 600), ("2.txt", b"W" * 600)])
    whole = (tmp_path / "one.tar").read_bytes()
    (tmp_path / "joined.tar").write_bytes(whole + whole)
    (tmp_path / "damaged.tar").write_bytes(whole[:1536] + b"\xff" * 512 + whole[2048:])  # the header of 2.txt
    (tmp_path / "endless.tar").write_bytes(whole[:1536])  # cut at the border of a sample
    with tarfile.open(tmp_path / "linked.tar", "w") as archive:
        about = tarfile.TarInfo("1.txt")
        about.type, about.linkname = tarfile.LNKTYPE, "2.txt"
        archive.addfile(about)
    expected = {
        "cut": "cut",
        "twice": "is there twice",
        "no": "cannot be read",
        "joined": "damaged, or two archives in one",
        "damaged": "damaged, or two archives in one",
        "endless": "the end of the archive",
        "linked": "1.txt is a link",
    }
    assert len(TarShards([tmp_path / "one.tar"], same)) == 2
    for name, words in expected.items():
        with pytest.raises(WorkloadError, match=f"{name}.tar.*{words}"):
            TarShards([tmp_path / f"{name}.tar"], same)


def test_imagenet_out_of_tar_files(cli: Cli, tmp_path: Path) -> None:
    """Under order=shard the samples are audited and the trajectory is not verified; order=global equals single."""
    digits_in_tars(tmp_path / "data")
    words = ["imagenet", "--data", str(tmp_path / "data"), "--layout", "ddp", "--samples"]
    small = ["--set", "classes=10", "size=16", "width=4", "batch=8", "epochs=1"]
    done = cli.on_ranks(tmp_path, "verify", *words, "--steps", "3", *small, size=2)
    assert done.statuses == [0, 0], done
    assert "36 samples, each read once" in done.out
    done = cli.on_ranks(tmp_path, "verify", *words, "--steps", "3", *small, "order=shard", size=2)
    assert done.statuses[0] == 3, done
    assert "36 samples, each read once" in done.out
    assert "--samples" in done.err


def test_labels_outside_the_classes_are_named(tmp_path: Path) -> None:
    digits_in_tars(tmp_path, num_files=1)
    workload = find_workload("imagenet", data=str(tmp_path), classes=2, size=16, width=4)
    data = workload.train_data()
    with pytest.raises(WorkloadError, match=r"train-0\.tar: sample 0000.*classes=N"):
        [data[index] for index in range(len(data))]


# --- tables


def test_parquet_rows_in_any_order(tmp_path: Path) -> None:
    """Several files, several groups of rows in each, chosen columns, lists as arrays."""
    pyarrow = pytest.importorskip("pyarrow", reason="not verified here: needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="not verified here: needs pyarrow")
    for number, rows in enumerate((7, 3)):
        numbers = list(range(10 * number, 10 * number + rows))
        table = pyarrow.table({"x": [[float(n), 0.5] for n in numbers], "y": numbers, "z": ["a"] * rows})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=2)
    data = ParquetRows(files_in(tmp_path, [".parquet"]), same, columns=["x", "y"])
    assert data.shard_sizes == [2, 2, 2, 1, 2, 1]  # its groups of rows, each of which is read at once
    numbers = list(range(10))
    random.Random(0).shuffle(numbers)
    for index in numbers:
        expected = index if index < 7 else index + 3
        assert data[index] == {"x": [float(expected), 0.5], "y": expected}
    with pytest.raises(WorkloadError, match="column w; it has x, y, z"):
        ParquetRows([tmp_path / "0.parquet"], same, columns=["w"])
    (tmp_path / "no.parquet").write_bytes(b"nothing")
    with pytest.raises(WorkloadError, match=r"no\.parquet: cannot be read as Parquet"):
        ParquetRows([tmp_path / "no.parquet"], same)


HUGGING_FACE = """
import torch, torch.nn.functional as F
from datasets import Dataset
from everyrank import Workload
from everyrank.datasets import Rows
from everyrank.builtin.digits import Digits

def rows(held_out):
    digits = Digits(held_out)
    table = {"pixels": digits.tensors[0].flatten(1).tolist(), "label": digits.tensors[1].tolist()}
    return Dataset.from_dict(table).select(range(60))

def sample(row):
    return torch.tensor(row["pixels"]), row["label"]

def streamed():
    rename = lambda row: {"input": row["pixels"], "target": row["label"]}
    return rows(False).to_iterable_dataset(num_shards=3).map(rename).shuffle(0, buffer_size=20)

class Pairs:
    def __init__(self): self.rows = streamed()
    def set_epoch(self, epoch): self.rows.set_epoch(epoch)
    def __iter__(self): return ((torch.tensor(row["input"]), row["target"]) for row in self.rows)
    def __len__(self): return 60

def make(data):
    return Workload(
        name="table", model=lambda: torch.nn.Linear(64, 10), train_data=data,
        eval_data=lambda: Rows(rows(True), sample),
        loss=lambda output, target: (F.cross_entropy(output, target, reduction="sum"), len(target)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), global_batch=16, epochs=2)

by_row = make(lambda: Rows(rows(False), sample))
by_stream = make(Pairs)
"""


@pytest.mark.integration
def test_tables_of_the_datasets_library(cli: Cli, tmp_path: Path) -> None:
    """A map-style one and an iterable one, under ddp with a loader worker: equal to single, each sample once."""
    pytest.importorskip("datasets", reason="not verified here: needs the datasets library")
    (tmp_path / "table.py").write_text(HUGGING_FACE)
    for name in ("by_row", "by_stream"):
        words = ["verify", f"table.py:{name}", "--layout", "ddp", "--steps", "6", "--samples", "--workers", "1"]
        assert cli.on_ranks(tmp_path, *words, "--json", "r.json", size=2).status == 0
        [record] = json.loads((tmp_path / "r.json").read_text())
        assert record["parity"]["status"] == "equal"
        assert any("60 samples, each read once" in check for check in record["parity"]["checks"])


# --- text


def test_text_windows_of_any_files(tmp_path: Path) -> None:
    """Windows stay inside their file, none is lost between training and held-out text, and nothing overlaps."""
    texts = ["alpha " * 40, "", "größer " * 30, "x"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.md").write_text(text, encoding="utf-8")
    files = files_in(tmp_path, ())
    train, held_out = (TextWindows(files, 16, held_out) for held_out in (False, True))
    windows = [
        bytes([*data[index][0]["tokens"].tolist(), int(data[index][1][-1])])
        for data in (train, held_out)
        for index in range(len(data))
    ]
    expected = [
        text.encode()[start : start + 17]
        for text in texts
        for start in range(0, 16 * ((len(text.encode()) - 1) // 16), 16)
    ]
    assert windows == expected
    assert sum(train.shard_sizes) == len(train)
    assert train.shard_sizes[1] == 0
    assert torch.equal(train[0][0]["tokens"][1:], train[0][1][:-1])
    assert train.checksum == held_out.checksum


def test_text_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"text " * 100 + b"\xff\xff" + b"text " * 100)
    with pytest.raises(WorkloadError, match=r"a\.bin: not UTF-8 text .*near byte 500"):
        TextWindows([tmp_path / "a.bin"], 16, False)
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(WorkloadError, match="too little text"):
        TextWindows([tmp_path / "b.txt"], 16, False)


def test_training_on_text_of_ones_own(cli: Cli, tmp_path: Path) -> None:
    """--data DIR, under either order; perplexity is the exponential of the exact mean loss."""
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"the {number} quick brown foxes jump. " * 150)
    for order in ("global", "shard"):
        words = ["train", "text", "--data", "texts", "--layout", "ddp", "--steps", "3", "--set", f"order={order}"]
        out = tmp_path / "runs" / order
        assert cli.on_ranks(tmp_path, *words, "batch=8", "--out", out, size=2).status == 0
        [record] = json.loads((out / "record.json").read_text())
        assert record["metrics"]["perplexity"] == math.exp(record["metrics"]["eval_loss"])
        assert record["provenance"]["data_checksum"].startswith("sha256:")
    assert perplexity({"eval_loss": 0.0}) == 1.0


# --- what may be fetched


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server of a folder, on loopback."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", folder
        running.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def test_download(tmp_path: Path, server: tuple[str, Path]) -> None:
    """Fetched once, unpacked, and not kept where the checksum is wrong or the network fails."""
    url, folder = server
    (folder / "plain.bin").write_bytes(b"content")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        about = tarfile.TarInfo("inside/file")
        about.size = 3
        archive.addfile(about, io.BytesIO(b"abc"))
    (folder / "packed.tar.gz").write_bytes(packed.getvalue())
    files = {"w": [File(f"{url}/plain.bin", md5(b"content")), File(f"{url}/packed.tar.gz", md5(packed.getvalue()))]}
    data = tmp_path / "data"
    download("w", data, files)
    assert (data / "plain.bin").read_bytes() == b"content"
    assert (data / "inside" / "file").read_bytes() == b"abc"
    (folder / "plain.bin").unlink()
    (data / "inside" / "file").unlink()  # as if it had been fetched by hand, or unpacking had been interrupted
    download("w", data, files)  # what is there is not asked for again
    assert (data / "inside" / "file").read_bytes() == b"abc"
    (data / "plain.bin").write_bytes(b"contenT")
    with pytest.raises(EveryrankError, match=r"plain\.bin: File not found"):
        download("w", data, files)
    (folder / "plain.bin").write_bytes(b"another")
    with pytest.raises(EveryrankError, match="its MD5 is "):
        download("w", data, files)
    assert sorted(path.name for path in data.iterdir()) == ["inside", "packed.tar.gz", "plain.bin"]
    with pytest.raises(UsageError, match="only mnist, cifar10, cifar100"):
        download("imagenet", data)
    with pytest.raises(UsageError, match="add --data DIR"):
        download("mnist", None)


def test_an_archive_cannot_write_outside(tmp_path: Path, server: tuple[str, Path]) -> None:
    url, folder = server
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        about = tarfile.TarInfo("../outside")
        about.size = 3
        archive.addfile(about, io.BytesIO(b"abc"))
    (folder / "evil.tar").write_bytes(packed.getvalue())
    with pytest.raises(UsageError, match="outside"):
        download("w", tmp_path / "data", {"w": [File(f"{url}/evil.tar", md5(packed.getvalue()))]})
    assert not (tmp_path / "outside").exists()


# --- another length, another global batch

LENGTHS = """
import torch
from everyrank import Workload

def workload(epochs: int = 200, lr: float = 0.1):
    return Workload(
        name="lengths", model=lambda: torch.nn.Linear(1, 1), train_data=lambda: [(torch.ones(1), torch.ones(1))] * 4,
        loss=lambda output, target: (((output - target) ** 2).sum(), len(target)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * epochs),
        global_batch=2, epochs=epochs)
"""


def test_a_schedule_has_the_length_that_was_asked_for(cli: Cli, tmp_path: Path) -> None:
    """--epochs reaches the function that builds the schedule; a resumed run with more epochs has their rates."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    words = ["train", "lengths.py", "--out", "run"]
    assert cli.on_ranks(tmp_path, *words, "--epochs", "3").status == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 6)) for step in range(6)])
    done = cli.on_ranks(tmp_path, *words, "--epochs", "5", "--resume")
    assert done.status == 0, done.err
    assert "5 epochs from update 6 on" in done.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    later = [row["lr"] for row in rows if "lr" in row][6:]
    assert later == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 10)) for step in range(6, 10)])


def test_a_resumed_run_has_the_settings_and_length_of_its_checkpoint(cli: Cli, tmp_path: Path) -> None:
    """What the call does not give; and a setting that it gives differently is refused in the words that were typed."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    words = ["train", "lengths.py", "--out", "run", "--save-every", "1"]
    assert cli.on_ranks(tmp_path, *words, "--epochs", "3", "--set", "lr=0.3", "--batch", "4").status == 0
    first = str(next((tmp_path / "run" / "checkpoints").glob("step-*1")))
    done = cli.on_ranks(tmp_path, "train", "lengths.py", "--resume", first, "--out", "again")
    assert done.status == 0, done.err
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("run", "again")]
    whole, again = ([(row["lr"], row["loss"]) for row in map(json.loads, log) if "lr" in row] for log in logs)
    assert again == whole
    done = cli.on_ranks(tmp_path, "train", "lengths.py", "--resume", first, "--out", "other", "--set", "lr=0.2")
    assert done.status == 2
    assert all(setting in done.err for setting in ("--set lr=0.3", "--set lr=0.2"))
    done = cli.on_ranks(tmp_path, "train", "lengths.py", "--resume", first, "--out", "other", "--batch", "2")
    assert done.status == 2
    assert "--batch 4" in done.err


def rate(workload: Any) -> float:
    optimizer = workload.optimizer(torch.nn.Linear(1, 1))
    return float(optimizer.param_groups[0]["lr"])


def test_another_batch_says_what_becomes_of_the_learning_rate() -> None:
    """Off by default; linear and square root; a workload that takes `batch` makes its schedule anew."""
    from everyrank.workload import Source, load

    found = {rule: load(Source("digits", {"lr": 0.05}, 256, rule)) for rule in ("none", "linear", "sqrt")}
    assert {rule: (workload.global_batch, rate(workload)) for rule, workload in found.items()} == {
        "none": (256, 0.05),
        "linear": (256, 0.2),
        "sqrt": (256, 0.1),
    }
    assert found["linear"].batch_rule == "global batch 64 -> 256: learning rate x 4 (linear rule)"
    assert "--lr-rule linear or sqrt would" in str(found["none"].batch_rule)
    with pytest.raises(UsageError, match="add --batch N"):
        load(Source("digits", {}, None, "linear"))
    with pytest.raises(UsageError, match="--batch 0"):
        load(Source("digits", {}, 0, "none"))


def test_the_rule_is_printed(cli: Cli, tmp_path: Path) -> None:
    words = ["train", "digits", "--batch", "128", "--lr-rule", "sqrt", "--steps", "2", "--out", "run"]
    done = cli.on_ranks(tmp_path, *words)
    assert done.status == 0
    assert "global batch 64 -> 128: learning rate x 1.41421 (sqrt rule)" in done.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert rows[0]["lr"] == pytest.approx(0.05 * np.sqrt(2))
