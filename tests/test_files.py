"""Data files: lines of text, tar shards, Parquet tables, text windows, downloads, run length and global batch."""

from __future__ import annotations

import bz2
import functools
import hashlib
import http.client
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


def identity(value: Any) -> Any:
    return value


# --- lines


def test_lines_are_split_at_any_line_ending(tmp_path: Path) -> None:
    """The files have CRLF line endings, empty lines, multi-byte letters and no final newline. One file is empty."""
    (tmp_path / "a.txt").write_bytes("eins\r\nzwei\n\n\r\ndrei größer".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes("四\n".encode())
    lines = TextLines(files_in(tmp_path, [".txt"]), identity)
    assert [lines[index] for index in (3, 0, 2, 1)] == ["四", "eins", "drei größer", "zwei"]
    assert lines.shard_sizes == [3, 0, 1]
    assert lines.checksum != TextLines([tmp_path / "a.txt"], identity).checksum


def test_blank_lines_byte_order_marks_and_hidden_files_are_skipped(tmp_path: Path) -> None:
    """A file or folder whose name begins with a dot is not read."""
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf"eins"\n  \n\t\r\n"zwei"')
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf\r\n"drei"')
    for hidden in (".git/b.jsonl", ".ipynb_checkpoints/a.jsonl", ".c.jsonl"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text('"no"\n')
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbferste\n")
    assert TextLines([tmp_path / "d.txt"], identity)[0] == "erste"
    values = TextLines(files_in(tmp_path, [".jsonl"]), identity)
    assert [values[index] for index in range(len(values))] == ['"eins"', '"zwei"', '"drei"']


def test_lines_may_cross_read_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are scanned in chunks. The chunk size does not change the lines."""
    content = b"".join(b"%d\n" % number for number in range(0, 3000, 7))
    (tmp_path / "a.txt").write_bytes(content)
    for chunk_size in (1, 2, 3, 64):
        monkeypatch.setattr("everyrank.datasets.shards._CHUNK", chunk_size)
        lines = TextLines([tmp_path / "a.txt"], int)
        assert [lines[index] for index in range(len(lines))] == list(range(0, 3000, 7))


def test_unreadable_line_is_located(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": \n')
    (tmp_path / "b.txt").write_bytes(b"fine\n\xff\xfe\n")
    (tmp_path / "c.jsonl").write_bytes(b"\x1f\x8b\x08")
    values = JsonLines([tmp_path / "a.jsonl"], identity)
    assert values[0] == {"x": 1}
    with pytest.raises(WorkloadError, match=r"a\.jsonl: sample 1 is not JSON"):
        values[1]
    with pytest.raises(WorkloadError, match=r"b\.txt: sample 1 is not UTF-8"):
        TextLines([tmp_path / "b.txt"], identity)[1]
    with pytest.raises(WorkloadError, match="compressed"):
        JsonLines([tmp_path / "c.jsonl"], identity)
    (tmp_path / "d.jsonl").write_bytes(bz2.compress(b"{}\n"))
    with pytest.raises(WorkloadError, match="compressed"):
        JsonLines([tmp_path / "d.jsonl"], identity)
    (tmp_path / "e.txt").write_text("BZhang wrote this\n")
    assert TextLines([tmp_path / "e.txt"], identity)[0] == "BZhang wrote this"
    with pytest.raises(WorkloadError, match=r"no \*\.csv there"):
        files_in(tmp_path, [".csv"])
    with pytest.raises(IndexError):
        values[2]


# --- tar files


def jpeg_of(pixels: torch.Tensor) -> bytes:
    """Encode an 8 x 8 digit as a JPEG of 32 x 32 pixels."""
    image = PIL.fromarray((pixels[0] * 255).to(torch.uint8).numpy()).resize((32, 32))
    content = io.BytesIO()
    image.save(content, "JPEG")
    return content.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    """Write a tar file with these (name, content) members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


def write_digit_shards(folder: Path, num_files: int = 3, samples_per_file: int = 12) -> None:
    """Write the built-in digits as train-*.tar and val-*.tar in the WebDataset format."""
    for split, is_validation in (("train", False), ("val", True)):
        data = Digits(is_validation)
        for shard_index in range(num_files):
            members: list[tuple[str, bytes]] = []
            for index in range(shard_index * samples_per_file, shard_index * samples_per_file + samples_per_file):
                image, label = data[index]
                members += [(f"{index:05d}.jpg", jpeg_of(image)), (f"{index:05d}.cls", str(int(label)).encode())]
            write_tar(folder / split / f"{split}-{shard_index}.tar", members)


def test_tar_members_are_grouped_into_samples(tmp_path: Path) -> None:
    """Members with the same stem form one sample, also inside folders. Any sample can be read by its index."""
    write_tar(tmp_path / "a.tar", [("x/1.seg.png", b"S"), ("x/1.txt", b"T"), ("2.txt", b"U"), (".hidden", b"")])
    write_tar(tmp_path / "b.tar", [("1.txt", b"V" * 5000)])
    data = TarShards([tmp_path / "a.tar", tmp_path / "b.tar"], identity)
    assert data.shard_sizes == [2, 1]
    assert data[2] == {"__key__": "1", "txt": b"V" * 5000}
    assert data[0] == {"__key__": "x/1", "seg.png": b"S", "txt": b"T"}


def test_unreadable_tar_file_is_named_with_the_reason(tmp_path: Path) -> None:
    write_tar(tmp_path / "cut.tar", [("1.txt", b"V" * 5000)])
    (tmp_path / "cut.tar").write_bytes((tmp_path / "cut.tar").read_bytes()[:2000])
    write_tar(tmp_path / "twice.tar", [("1.txt", b"V"), ("1.txt", b"W")])
    (tmp_path / "no.tar").write_bytes(b"no tar at all" * 100)
    write_tar(tmp_path / "one.tar", [("1.txt", b"V" * 600), ("2.txt", b"W" * 600)])
    archive_bytes = (tmp_path / "one.tar").read_bytes()
    (tmp_path / "joined.tar").write_bytes(archive_bytes + archive_bytes)
    # this overwrites the header of 2.txt
    (tmp_path / "damaged.tar").write_bytes(archive_bytes[:1536] + b"\xff" * 512 + archive_bytes[2048:])
    (tmp_path / "endless.tar").write_bytes(archive_bytes[:1536])  # this cuts after the first sample
    with tarfile.open(tmp_path / "linked.tar", "w") as archive:
        header = tarfile.TarInfo("1.txt")
        header.type, header.linkname = tarfile.LNKTYPE, "2.txt"
        archive.addfile(header)
    expected = {
        "cut": "cut",
        "twice": "contains .* twice",
        "no": "cannot be read",
        "joined": "damaged, or two archives in one",
        "damaged": "damaged, or two archives in one",
        "endless": "the end of the archive",
        "linked": "1.txt is a link",
    }
    assert len(TarShards([tmp_path / "one.tar"], identity)) == 2
    for name, reason in expected.items():
        with pytest.raises(WorkloadError, match=f"{name}.tar.*{reason}"):
            TarShards([tmp_path / f"{name}.tar"], identity)


def test_imagenet_from_tar_shards_reads_each_sample_once(cli: Cli, tmp_path: Path) -> None:
    """With order=global, ddp is equal to single. With order=shard only the samples are checked."""
    write_digit_shards(tmp_path / "data")
    args = ["imagenet", "--data", str(tmp_path / "data"), "--layout", "ddp", "--samples"]
    settings = ["--set", "classes=10", "size=16", "width=4", "batch=8", "epochs=1"]
    result = cli.on_ranks(tmp_path, "verify", *args, "--steps", "3", *settings, size=2)
    assert result.statuses == [0, 0], result
    assert "36 samples, each read once" in result.out
    result = cli.on_ranks(tmp_path, "verify", *args, "--steps", "3", *settings, "order=shard", size=2)
    assert result.statuses[0] == 3, result
    assert "36 samples, each read once" in result.out
    assert "--samples" in result.err


def test_label_outside_the_classes_is_located(tmp_path: Path) -> None:
    write_digit_shards(tmp_path, num_files=1)
    workload = find_workload("imagenet", data=str(tmp_path), classes=2, size=16, width=4)
    data = workload.train_data()
    with pytest.raises(WorkloadError, match=r"train-0\.tar: sample 0000.*classes=N"):
        [data[index] for index in range(len(data))]


# --- tables


def test_parquet_rows_are_read_in_any_order(tmp_path: Path) -> None:
    """The data has several files with several row groups each. Only the selected columns are read."""
    pyarrow = pytest.importorskip("pyarrow", reason="not verified here: needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="not verified here: needs pyarrow")
    for file_index, num_rows in enumerate((7, 3)):
        row_values = list(range(10 * file_index, 10 * file_index + num_rows))
        table = pyarrow.table({"x": [[float(n), 0.5] for n in row_values], "y": row_values, "z": ["a"] * num_rows})
        parquet.write_table(table, tmp_path / f"{file_index}.parquet", row_group_size=2)
    data = ParquetRows(files_in(tmp_path, [".parquet"]), identity, columns=["x", "y"])
    assert data.shard_sizes == [2, 2, 2, 1, 2, 1]  # each row group is read as a whole
    indices = list(range(10))
    random.Random(0).shuffle(indices)
    for index in indices:
        expected = index if index < 7 else index + 3
        assert data[index] == {"x": [float(expected), 0.5], "y": expected}
    with pytest.raises(WorkloadError, match="column w; it has x, y, z"):
        ParquetRows([tmp_path / "0.parquet"], identity, columns=["w"])
    (tmp_path / "no.parquet").write_bytes(b"nothing")
    with pytest.raises(WorkloadError, match=r"no\.parquet: cannot be read as Parquet"):
        ParquetRows([tmp_path / "no.parquet"], identity)


HUGGING_FACE = """
import torch, torch.nn.functional as F
from datasets import Dataset
from everyrank import Workload
from everyrank.datasets import Rows
from everyrank.builtin.digits import Digits

def rows(is_validation):
    digits = Digits(is_validation)
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
def test_hugging_face_datasets_match_single_under_ddp(cli: Cli, tmp_path: Path) -> None:
    """A map-style and an iterable dataset under ddp with a loader worker match single and read each sample once."""
    pytest.importorskip("datasets", reason="not verified here: needs the datasets library")
    (tmp_path / "table.py").write_text(HUGGING_FACE)
    for name in ("by_row", "by_stream"):
        args = ["verify", f"table.py:{name}", "--layout", "ddp", "--steps", "6", "--samples", "--workers", "1"]
        assert cli.on_ranks(tmp_path, *args, "--json", "r.json", size=2).status == 0
        [record] = json.loads((tmp_path / "r.json").read_text())
        assert record["parity"]["status"] == "equal"
        assert any("60 samples, each read once" in check for check in record["parity"]["checks"])


# --- text


def test_text_windows_stay_in_their_file_and_cover_it(tmp_path: Path) -> None:
    """No window overlaps with the next, and none is lost between training and validation text."""
    texts = ["alpha " * 40, "", "größer " * 30, "x"]
    for file_index, text in enumerate(texts):
        (tmp_path / f"{file_index}.md").write_text(text, encoding="utf-8")
    files = files_in(tmp_path, ())
    training, validation = (TextWindows(files, 16, is_validation) for is_validation in (False, True))
    windows = [
        bytes([*data[index][0]["tokens"].tolist(), int(data[index][1][-1])])
        for data in (training, validation)
        for index in range(len(data))
    ]
    expected = [
        text.encode()[start : start + 17]
        for text in texts
        for start in range(0, 16 * ((len(text.encode()) - 1) // 16), 16)
    ]
    assert windows == expected
    assert sum(training.shard_sizes) == len(training)
    assert training.shard_sizes[1] == 0
    assert torch.equal(training[0][0]["tokens"][1:], training[0][1][:-1])
    assert training.checksum == validation.checksum


def test_invalid_or_too_short_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"text " * 100 + b"\xff\xff" + b"text " * 100)
    with pytest.raises(WorkloadError, match=r"a\.bin: not UTF-8 text .*near byte 500"):
        TextWindows([tmp_path / "a.bin"], 16, False)
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(WorkloadError, match=r"b\.txt: 2 windows of"):
        TextWindows([tmp_path / "b.txt"], 16, False)


def test_training_on_user_text_files(cli: Cli, tmp_path: Path) -> None:
    """`--data DIR` works with both orders. Perplexity is the exponential of the exact mean loss."""
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"the {number} quick brown foxes jump. " * 150)
    for order in ("global", "shard"):
        args = ["train", "text", "--data", "texts", "--layout", "ddp", "--steps", "3", "--set", f"order={order}"]
        run_folder = tmp_path / "runs" / order
        assert cli.on_ranks(tmp_path, *args, "batch=8", "--out", run_folder, size=2).status == 0
        [record] = json.loads((run_folder / "record.json").read_text())
        assert record["metrics"]["perplexity"] == math.exp(record["metrics"]["eval_loss"])
        assert record["provenance"]["data_checksum"].startswith("sha256:")
    assert perplexity({"eval_loss": 0.0}) == 1.0


# --- downloads


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL and folder of a local web server."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", folder
        running.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize("has_filters", [True, False], ids=["filters of Python 3.11.4", "older"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_download_checks_unpacks_and_reuses_files(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, has_filters: bool
) -> None:
    """Files are fetched once and unpacked. A file with a wrong checksum is fetched again."""
    if not has_filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    url, folder = server
    (folder / "plain.bin").write_bytes(b"content")
    archive_content = io.BytesIO()
    with tarfile.open(fileobj=archive_content, mode="w:gz") as archive:
        header = tarfile.TarInfo("inside/file")
        header.size = 3
        archive.addfile(header, io.BytesIO(b"abc"))
    (folder / "packed.tar.gz").write_bytes(archive_content.getvalue())
    files = {
        "w": [
            File(f"{url}/plain.bin", md5(b"content")),
            File(f"{url}/packed.tar.gz", md5(archive_content.getvalue())),
        ]
    }
    data = tmp_path / "data"
    download("w", data, files)
    assert (data / "plain.bin").read_bytes() == b"content"
    assert (data / "inside" / "file").read_bytes() == b"abc"
    (folder / "plain.bin").unlink()
    (data / "inside" / "file").unlink()  # this is the state after an interrupted unpacking or a manual download
    download("w", data, files)  # existing files are not fetched again
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


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ConnectionResetError(104, "reset")])
def test_connection_that_ends_in_the_middle_is_no_error_of_the_folder(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """The message names the file to download, and the status is not that of a wrong call."""
    url, folder = server
    (folder / "plain.bin").write_bytes(b"content")

    def raise_error(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(http.client.HTTPResponse, "read", raise_error)
    with pytest.raises(EveryrankError, match=r"plain\.bin: .*; download it yourself into") as caught:
        download("w", tmp_path / "data", {"w": [File(f"{url}/plain.bin", "")]})
    assert not isinstance(caught.value, UsageError)
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("has_filters", [True, False], ids=["filters of Python 3.11.4", "older"])
@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_archive_cannot_write_outside_its_folder(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, is_link: bool, has_filters: bool
) -> None:
    if not has_filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    url, folder = server
    archive_content = io.BytesIO()
    with tarfile.open(fileobj=archive_content, mode="w") as archive:
        if is_link:
            link = tarfile.TarInfo("inside")
            link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
            archive.addfile(link)
        header = tarfile.TarInfo("inside/outside" if is_link else "../outside")
        header.size = 3
        archive.addfile(header, io.BytesIO(b"abc"))
    (folder / "evil.tar").write_bytes(archive_content.getvalue())
    with pytest.raises(UsageError, match=r"outside|link"):
        download("w", tmp_path / "data", {"w": [File(f"{url}/evil.tar", md5(archive_content.getvalue()))]})
    assert not (tmp_path / "outside").exists()


# --- a different run length or global batch

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


def test_learning_rate_schedule_has_the_requested_length(cli: Cli, tmp_path: Path) -> None:
    """The schedule is built for the value of `--epochs`. A resumed run with more epochs uses the longer schedule."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    args = ["train", "lengths.py", "--out", "run"]
    assert cli.on_ranks(tmp_path, *args, "--epochs", "3").status == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 6)) for step in range(6)])
    resumed = cli.on_ranks(tmp_path, *args, "--epochs", "5", "--resume")
    assert resumed.status == 0, resumed.err
    assert "5 epochs from update 6 on" in resumed.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    resumed_rates = [row["lr"] for row in rows if "lr" in row][6:]
    assert resumed_rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 10)) for step in range(6, 10)])


def test_resumed_run_takes_settings_and_length_from_its_checkpoint(cli: Cli, tmp_path: Path) -> None:
    """Settings that the command omits come from the checkpoint. A conflicting `--set` or `--batch` is refused."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    args = ["train", "lengths.py", "--out", "run", "--save-every", "1"]
    assert cli.on_ranks(tmp_path, *args, "--epochs", "3", "--set", "lr=0.3", "--batch", "4").status == 0
    first_checkpoint = str(next((tmp_path / "run" / "checkpoints").glob("step-*1")))
    result = cli.on_ranks(tmp_path, "train", "lengths.py", "--resume", first_checkpoint, "--out", "again")
    assert result.status == 0, result.err
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("run", "again")]
    uninterrupted, resumed = ([(row["lr"], row["loss"]) for row in map(json.loads, log) if "lr" in row] for log in logs)
    assert resumed == uninterrupted
    result = cli.on_ranks(
        tmp_path, "train", "lengths.py", "--resume", first_checkpoint, "--out", "other", "--set", "lr=0.2"
    )
    assert result.status == 2
    assert all(setting in result.err for setting in ("--set lr=0.3", "--set lr=0.2"))
    result = cli.on_ranks(
        tmp_path, "train", "lengths.py", "--resume", first_checkpoint, "--out", "other", "--batch", "2"
    )
    assert result.status == 2
    assert "--batch 4" in result.err


def learning_rate(workload: Any) -> float:
    """Return the learning rate of the optimizer that the workload builds."""
    optimizer = workload.optimizer(torch.nn.Linear(1, 1))
    return float(optimizer.param_groups[0]["lr"])


def test_learning_rate_rules_for_a_different_global_batch() -> None:
    """By default the rate is unchanged. The rules scale it by the batch ratio or its square root."""
    from everyrank.workload import Source, load

    workloads = {rule: load(Source("digits", {"lr": 0.05}, 256, rule)) for rule in ("none", "linear", "sqrt")}
    assert {rule: (workload.global_batch, learning_rate(workload)) for rule, workload in workloads.items()} == {
        "none": (256, 0.05),
        "linear": (256, 0.2),
        "sqrt": (256, 0.1),
    }
    assert workloads["linear"].batch_rule == "global batch 64 -> 256: learning rate x 4 (linear rule)"
    assert "--lr-rule linear or sqrt would" in str(workloads["none"].batch_rule)
    with pytest.raises(UsageError, match="add --batch N"):
        load(Source("digits", {}, None, "linear"))
    with pytest.raises(UsageError, match="--batch 0"):
        load(Source("digits", {}, 0, "none"))


def test_learning_rate_rule_is_printed(cli: Cli, tmp_path: Path) -> None:
    args = ["train", "digits", "--batch", "128", "--lr-rule", "sqrt", "--steps", "2", "--out", "run"]
    result = cli.on_ranks(tmp_path, *args)
    assert result.status == 0
    assert "global batch 64 -> 128: learning rate x 1.41421 (sqrt rule)" in result.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert rows[0]["lr"] == pytest.approx(0.05 * np.sqrt(2))
