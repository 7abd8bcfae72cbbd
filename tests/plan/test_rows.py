"""Rows of published benchmark tables: every row is predicted, or counted with the reason why not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyrank.plan.calibration import row_seconds, shipped_calibration
from everyrank.plan.hardware import GIB, parse_published_link
from everyrank.plan.rows import Row, read_rows
from everyrank.plan.validate import validate_rows

TORCHTITAN_ROW: dict[str, Any] = next(
    row for row in json.loads((Path(__file__).parent / "rows.json").read_text()) if row["id"].endswith("8xh100-bf16")
)


def torchtitan_row_with(**fields: Any) -> dict[str, Any]:
    """Return the torchtitan row with some fields replaced.

    For example, `model__layers=16` sets model.layers. The value `...` removes a field.
    """
    row = copy.deepcopy(TORCHTITAN_ROW)
    for path, value in fields.items():
        group: dict[str, Any] = row
        *parents, name = path.split("__")
        for part in parents:
            group = group.setdefault(part, {})
        if value is ...:
            group.pop(name, None)
        else:
            group[name] = value
    return row


def read_json_rows(tmp_path: Path, *rows: Any) -> tuple[list[Row], list[str]]:
    """Return the readable rows, and the reasons why the others are unreadable."""
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    readable_rows, unreadable_rows = read_rows(tmp_path / "rows.json")
    assert len(readable_rows) + len(unreadable_rows) == len(rows)
    return readable_rows, [reason for _, reason in unreadable_rows]


def test_equivalent_spellings_of_a_row_give_the_same_row(tmp_path: Path) -> None:
    """Numbers are text, fields and units have other names, or a size follows from other sizes."""
    equivalent_rows = [
        torchtitan_row_with(),
        torchtitan_row_with(model__layers="32", model__hidden="4,096", batch__micro=2.0, measured__tokens_s_gpu="5762"),
        torchtitan_row_with(hardware__gpus=..., hardware__nodes=1, hardware__gpus_per_node=8),
        torchtitan_row_with(hardware__gpus=..., hardware__nodes=..., hardware__gpus_per_node=...),
        torchtitan_row_with(batch__micro=..., batch__grad_accum=1),
        torchtitan_row_with(batch__global=..., batch__grad_accum="1"),
        torchtitan_row_with(parallel__fsdp=True),
        torchtitan_row_with(parallel__fsdp="FULL_SHARD", parallel__zero_stage="stage 3"),
        torchtitan_row_with(measured__tokens_s_gpu=..., measured__tokens_s=8 * 5762),
        torchtitan_row_with(measured__tokens_s_gpu=..., measured__step_s=16 * 8192 / 8 / 5762),
        torchtitan_row_with(measured__memory_gib="82.4 GiB"),
        torchtitan_row_with(measured__memory_gib=..., measured__memory_gb=82.4 * 1.073741824),
        torchtitan_row_with(model__layers=..., model__params=8.03e9),
    ]
    rows, reasons = read_json_rows(tmp_path, *equivalent_rows)
    assert not reasons
    for row in rows:
        assert row.step_seconds == pytest.approx(rows[0].step_seconds)
        assert row.memory_bytes == pytest.approx(82.4 * GIB)
        assert (row.sizes, row.stack, row.degrees) == (rows[0].sizes, rows[0].stack, rows[0].degrees)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hardware__gpu": "tpu_v5e"}, "tpu_v5e is unknown"),
        ({"hardware__gpu": None}, "hardware.gpu is missing"),
        ({"hardware__gpus": 0}, "0 GPUs"),
        ({"model__layers": 16.5}, "not a whole number"),
        ({"model__hidden": 10**30}, "model.hidden"),
        ({"model__heads": 33}, "heads do not divide"),
        ({"model__num_experts": 8}, "mixtures of experts"),
        ({"model__name": "Mixtral-8x7B"}, "mixtures of experts"),
        ({"parallel__ep": 8}, "mixtures of experts"),
        ({"kind": "image"}, "kind image"),
        ({"parallel__pp": 8, "model__layers": 4}, "more stages"),
        ({"parallel__cp": 3}, "does not divide"),
        ({"parallel__zero_stage": 4}, "zero_stage"),
        ({"precision": "nvfp4"}, "precision nvfp4"),
        ({"precision": "fp8", "hardware__gpu": "a100"}, "8-bit matrix products"),
        ({"batch__micro": 0}, "below 1"),
        ({"measured": {"mfu": None}}, "neither a time nor a memory"),
        ({"measured__tokens_s_gpu": "fast"}, "not a number"),
        ({"measured__step_ms": -1}, "not a number above 0"),
        ({"measured__memory_gib": float("nan")}, "not a number above 0"),
        ({"extra": ["x"]}, "extra is not a JSON object"),
        ({"extra__cpu_offload": True}, "offload"),
    ],
)
def test_row_that_cannot_be_predicted_has_a_reason(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    """The row is unsupported, or a value is missing or invalid."""
    rows, reasons = read_json_rows(tmp_path, torchtitan_row_with(**fields))
    assert not rows
    assert reason in reasons[0]


@pytest.mark.parametrize(
    "gpu", ["NVIDIA A100-SXM4-40GB", "V100-SXM2-32GB", "MI300X", "H20", "B300", "mi355x", "rtx_3090"]
)
def test_other_gpu_kinds_and_layouts_are_predicted(tmp_path: Path, gpu: str) -> None:
    """The rows have long sequences, all kinds of parallelism and a compiler. All predicted times are finite."""
    rows, reasons = read_json_rows(
        tmp_path,
        torchtitan_row_with(hardware__gpu=gpu),
        torchtitan_row_with(
            hardware__gpu=gpu, parallel__cp=8, parallel__fsdp=None, model__seq_len=131072, batch__micro=1
        ),
        torchtitan_row_with(hardware__gpu=gpu, parallel__tp=8, parallel__pp=4, hardware__gpus=128, hardware__nodes=16),
        torchtitan_row_with(hardware__gpu=gpu, parallel__fsdp=8, hardware__gpus=16384, batch__global=32768),
        torchtitan_row_with(hardware__gpu=gpu, measured={"tokens_s_gpu": "OOM"}),
        torchtitan_row_with(hardware__gpu=gpu, hardware__inter_node=200, hardware__intra_node="PCIe 4", compile="true"),
    )
    assert not reasons
    assert [row.ran_out for row in rows] == [False, False, False, False, True, False]
    seconds = row_seconds(rows, shipped_calibration())
    assert np.isfinite(seconds).all()
    assert (seconds > 0).all()
    table = validate_rows(rows, [], shipped_calibration())
    assert sum(entry["rows"] for entry in table["time"]) == 5


@pytest.mark.parametrize(
    ("text", "gigabits"),
    [
        ("1600 Gbps/node RoCE", 200),
        ("Slingshot 200 Gb/s a GPU", 200),
        ("8 x 400 Gb/s NDR", 400),
        ("3.2 Tbps EFA", 400),
        ("50 GB/s per GPU", 400),
        ("4x HDR", 100),
        ("NDR InfiniBand", 400),
        ("100GbE", 12.5),
        ("25 Gbps", 25),
        (800, 800),
    ],
)
def test_published_network_description_is_parsed(text: str | int, gigabits: float) -> None:
    """The bandwidth is per GPU, for nodes of 8 GPUs."""
    link = parse_published_link(text, 8)
    assert link is not None
    assert link.bandwidth == pytest.approx(0.96 * gigabits / 8 * 1e9)


@pytest.mark.parametrize("text", [None, "", "InfiniBand", "fast", {"rate": 1}, True, float("nan")])
def test_network_description_without_a_rate_is_not_parsed(text: Any) -> None:
    """The result is None, and the default network of the GPU is used."""
    assert parse_published_link(text, 8) is None
