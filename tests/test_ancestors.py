"""`everyrank bench --preset ancestors`: a small ImageNet folder with the methods of two earlier repositories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everyrank import read_records
from processes import Cli, refusal_message

METHODS = [
    "single",
    "dataparallel:batch_norm=local",
    "ddp:batch_norm=local",
    "ddp:precision=fp16,batch_norm=local",
    "horovod:batch_norm=local",
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 36 by 40 pixel images of two classes: twelve for training and six for validation."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for name, count in {"train/cat": 6, "train/dog": 6, "val/cat": 3, "val/dog": 3}.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = torch.randint(0, 256, (36, 40, 3), dtype=torch.uint8, generator=generator)
            image.frombytes("RGB", (40, 36), bytes(pixels.flatten().tolist())).save(folder / name / f"{index}.png")
    return folder


@pytest.mark.integration
def test_bench_with_preset_ancestors(images: Path, tmp_path: Path, cli: Cli) -> None:
    """Layouts that this machine cannot run have a reason. The others are compared with a simulation before timing."""
    arguments = ["--data", images, "--set", "size=32", "width=8", "--batch", 6, "--trials", 1, "--steps", 2]
    ended = cli(
        tmp_path, "bench", "imagenet", "--preset", "ancestors", "--processes", 2, *arguments, "--json", "records.json"
    )
    assert ended.status == 0, ended.err
    records = {record.layout: record for record in read_records(tmp_path / "records.json")}
    assert list(records) == METHODS
    for layout, record in records.items():
        assert record.parity.status in ("equal", "not_verified"), (layout, record.parity)
        assert (record.throughput_samples_per_second is not None) == (record.parity.status == "equal")
    assert "simulation" in (records["ddp:batch_norm=local"].parity.scope or "")
    if torch.cuda.device_count() < 2:
        assert records["dataparallel:batch_norm=local"].parity.reason == "needs 2 CUDA devices"


def test_preset_together_with_layouts_is_refused(capsys: Any) -> None:
    arguments = ["bench", "digits", "--preset", "ancestors", "--layout", "ddp"]
    assert "--preset ancestors --layout ddp: give one of them" in refusal_message(capsys, *arguments)
