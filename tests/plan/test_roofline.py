"""The roofline time of a traced step: kernels, host, communication, and what overlaps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from everyrank.builtin import DecoderShape
from everyrank.cli import main
from everyrank.layout import parse_layout
from everyrank.plan.calibrate import decoder_workload
from everyrank.plan.hardware import GPUS, parse_cluster
from everyrank.plan.pretend import trace_step
from everyrank.plan.roofline import roofline_seconds


@dataclass(frozen=True)
class Operator:
    """An operator of a traced step."""

    name: str
    flops: int = 0
    bytes: int = 0
    group: str = ""
    phase: str = "activations"
    tensors: int = 1
    is_strided: bool = False
    is_half: bool = True
    is_causal: bool = False


@dataclass(frozen=True)
class Step:
    """A traced step of one rank on 16 ranks."""

    operators: tuple[Operator, ...]
    groups: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"all": tuple(range(16)), "node": (0, 1)})
    rank: int = 0


CLUSTER = parse_cluster("16xh100")
H100 = CLUSTER.gpu


def roofline_of(*operators: Operator, strategy: str = "ddp") -> dict[str, float]:
    """Return the seconds of a step with these operators, by category."""
    return roofline_seconds(Step(operators), strategy, CLUSTER)


def test_kernel_time_is_bound_by_flops_or_bytes() -> None:
    """FLOPs bound a matrix product, and bytes bound an addition. Causal attention takes half of the time."""
    half_product = Operator("mm", flops=10**14)
    assert roofline_of(half_product)["kernels"] == pytest.approx(1e14 / (0.7 * 989e12), rel=1e-3)
    float32_product = Operator("mm", flops=10**14, is_half=False)
    assert roofline_of(float32_product)["kernels"] == pytest.approx(1e14 / (0.7 * 67e12), rel=1e-3), (
        "torch's default is no TF32"
    )
    assert roofline_of(Operator("add", bytes=10**12))["kernels"] == pytest.approx(1e12 / (0.75 * 3.35e12))
    full_attention = Operator("_scaled_dot_product_flash_attention_for_cpu", flops=10**14)
    causal_attention = Operator("_scaled_dot_product_flash_attention_for_cpu", flops=10**14, is_causal=True)
    assert roofline_of(causal_attention)["kernels"] == pytest.approx(
        roofline_of(full_attention)["kernels"] / 2, rel=1e-3
    )


def test_host_time_counts_only_for_small_kernels() -> None:
    """Many small kernels are bound by the host. Large kernels hide its time."""
    small = Operator("add", bytes=100)
    assert roofline_of(*[small] * 1000)["host"] == pytest.approx(1.1e-3 + 21e-3, rel=1e-2)
    large = Operator("add", bytes=10**9)
    assert roofline_of(*[large] * 1000)["host"] == pytest.approx(1.1e-3)


def test_communication_overlaps_with_kernels() -> None:
    """FSDP's all-gathers and DDP's all-reduces overlap with computation. Tensor parallel communication does not."""
    products = [Operator("mm", flops=10**15, phase=phase) for phase in ("activations", "temporary")]
    all_gather, all_reduce = (
        Operator("_allgather_base_", bytes=10**9, group="all"),
        Operator("allreduce_", bytes=10**9, group="all"),
    )
    assert roofline_of(*products, all_gather, strategy="fsdp")["links"] == 0
    assert roofline_of(*products, all_reduce)["links"] == 0
    assert roofline_of(*products, Operator("all_reduce", bytes=10**9, group="all"), strategy="tensor")["links"] > 0.004
    seconds_by_group = [
        roofline_of(Operator("_allgather_base_", bytes=10**9, group=group_name), strategy="fsdp")["links"]
        for group_name in ("all", "node")
    ]
    assert seconds_by_group[0] > 1.5 * seconds_by_group[1], "a group on one node does not use the network"


def test_traced_decoder_has_a_time_on_every_gpu() -> None:
    """A faster kind of GPU takes less time. All times are below a second."""
    shape = DecoderShape(num_blocks=2, num_heads=4, width=128, hidden=256, vocabulary=512)
    workload = decoder_workload(shape, 64, 128, global_batch=64, steps=1)
    layout = parse_layout("tensor:precision=bf16")
    step = trace_step(workload, layout, 2, on_gpu=True)
    assert {
        len(step.groups[operator.group])
        for operator in step.operators
        if operator.group and operator.group in step.groups
    } == {2}
    assert any(operator.is_causal for operator in step.operators)
    times = {
        gpu_name: sum(roofline_seconds(step, "tensor", parse_cluster(f"2x{gpu_name}")).values()) for gpu_name in GPUS
    }
    assert all(0 < step_seconds < 1 for step_seconds in times.values())
    assert times["t4"] > times["a100_80gb"] >= times["b200"]


def test_plan_output_has_step_time_and_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON output also has the memory by category."""
    json_path = tmp_path / "plan.json"
    assert main(["plan", "digits", "--gpus", "2xh100", "--layout", "ddp", "--json", str(json_path)]) == 0
    row = json.loads(json_path.read_text())["layouts"][0]
    assert row["step_seconds"] == pytest.approx(sum(row["parts"].values()))
    assert row["low_seconds"] < row["step_seconds"] < row["high_seconds"]
    assert row["reserved_bytes"] >= row["allocated_bytes"] >= sum(row["categories"].values()) * 0.999
    assert "an update" in capsys.readouterr().out


def test_h100_record_has_the_documented_errors(repository: Path) -> None:
    """The documentation quotes these errors of the memory replay and of the roofline on an H100."""
    rows = json.loads((repository / "benchmarks" / "records" / "gpu-h100.json").read_text())["rows"]
    cublas_workspace = 64 * 2**20  # cuBLAS allocates it if no memory was in use before the step
    reserved_errors, allocated_errors = [], []
    for row in rows:
        if "replayed" in row and row["workload"] != "digits":
            workspace_bytes = 0 if row["alive_before"] else cublas_workspace
            reserved_errors.append(abs((row["replayed"]["reserved"] + workspace_bytes) / row["reserved"] - 1))
            if "bf16" in row["layout"] and row["workload"] != "text":
                allocated_errors.append(abs((row["replayed"]["allocated"] + workspace_bytes) / row["allocated"] - 1))
    assert len(reserved_errors) == 14
    assert max(reserved_errors) < 0.16
    assert sum(reserved_errors) / len(reserved_errors) < 0.05
    assert len(allocated_errors) == 8
    assert max(allocated_errors) < 0.002
    time_errors = [abs(row["roofline_seconds"] / row["seconds"] - 1) for row in rows if "roofline_seconds" in row]
    assert sorted(time_errors)[len(time_errors) // 2] < 0.15
