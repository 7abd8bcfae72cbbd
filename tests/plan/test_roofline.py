"""The time of a traced step by a roofline: kernels or the host, links by place, what hides behind what."""

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
class Called:
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
    operators: tuple[Called, ...]
    groups: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"all": tuple(range(16)), "node": (0, 1)})
    rank: int = 0


CLUSTER = parse_cluster("16xh100")
H100 = CLUSTER.gpu


def seconds(*operators: Called, strategy: str = "ddp") -> dict[str, float]:
    return roofline_seconds(Step(operators), strategy, CLUSTER)


def test_a_kernel_takes_its_operations_or_its_bytes() -> None:
    product = Called("mm", flops=10**14)
    assert seconds(product)["kernels"] == pytest.approx(1e14 / (0.7 * 989e12), rel=1e-3)
    wide = Called("mm", flops=10**14, is_half=False)
    assert seconds(wide)["kernels"] == pytest.approx(1e14 / (0.7 * 67e12), rel=1e-3), "torch's default is no TF32"
    assert seconds(Called("add", bytes=10**12))["kernels"] == pytest.approx(1e12 / (0.75 * 3.35e12))
    square = Called("_scaled_dot_product_flash_attention_for_cpu", flops=10**14)
    causal = Called("_scaled_dot_product_flash_attention_for_cpu", flops=10**14, is_causal=True)
    assert seconds(causal)["kernels"] == pytest.approx(seconds(square)["kernels"] / 2, rel=1e-3)


def test_the_gpu_waits_for_the_host_or_the_host_for_it() -> None:
    small = Called("add", bytes=100)
    assert seconds(*[small] * 1000)["host"] == pytest.approx(1.1e-3 + 21e-3, rel=1e-2)
    large = Called("add", bytes=10**9)
    assert seconds(*[large] * 1000)["host"] == pytest.approx(1.1e-3)


def test_what_travels_behind_kernels() -> None:
    """Gathers of FSDP and gradients of replicas do; what a tensor layout waits for does not."""
    work = [Called("mm", flops=10**15, phase=phase) for phase in ("activations", "temporary")]
    gather, reduce = (
        Called("_allgather_base_", bytes=10**9, group="all"),
        Called("allreduce_", bytes=10**9, group="all"),
    )
    assert seconds(*work, gather, strategy="fsdp")["links"] == 0
    assert seconds(*work, reduce)["links"] == 0
    assert seconds(*work, Called("all_reduce", bytes=10**9, group="all"), strategy="tensor")["links"] > 0.004
    alone = [
        seconds(Called("_allgather_base_", bytes=10**9, group=name), strategy="fsdp")["links"]
        for name in ("all", "node")
    ]
    assert alone[0] > 1.5 * alone[1], "a group on one node does not use the network"


def test_a_traced_decoder_has_its_time_on_every_kind() -> None:
    """The peak of a kind and its links decide; more ranks share the work."""
    shape = DecoderShape(num_blocks=2, num_heads=4, width=128, hidden=256, vocabulary=512)
    workload = decoder_workload(shape, 64, 128, global_batch=64, steps=1)
    layout = parse_layout("tensor:precision=bf16")
    step = trace_step(workload, layout, 2, on_gpu=True)
    assert {len(step.groups[one.group]) for one in step.operators if one.group and one.group in step.groups} == {2}
    assert any(one.is_causal for one in step.operators)
    times = {kind: sum(roofline_seconds(step, "tensor", parse_cluster(f"2x{kind}")).values()) for kind in GPUS}
    assert all(0 < value < 1 for value in times.values())
    assert times["t4"] > times["a100_80gb"] >= times["b200"]


def test_an_answer_has_seconds_and_an_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", "digits", "--gpus", "2xh100", "--layout", "ddp", "--json", str(out)]) == 0
    row = json.loads(out.read_text())["layouts"][0]
    assert row["step_seconds"] == pytest.approx(sum(row["parts"].values()))
    assert row["low_seconds"] < row["step_seconds"] < row["high_seconds"]
    assert row["reserved_bytes"] >= row["allocated_bytes"] >= sum(row["categories"].values()) * 0.999
    assert "an update" in capsys.readouterr().out


def test_the_h100_record(repository: Path) -> None:
    """What the page says of the replay and of the roofline: the Record has it."""
    rows = json.loads((repository / "benchmarks" / "records" / "gpu-h100.json").read_text())["rows"]
    workspace = 64 * 2**20  # of cuBLAS, where nothing was alive before
    errors, allocated = [], []
    for row in rows:
        if "replayed" in row and row["workload"] != "digits":
            extra = 0 if row["alive_before"] else workspace
            errors.append(abs((row["replayed"]["reserved"] + extra) / row["reserved"] - 1))
            if "bf16" in row["layout"] and row["workload"] != "text":
                allocated.append(abs((row["replayed"]["allocated"] + extra) / row["allocated"] - 1))
    assert len(errors) == 14
    assert max(errors) < 0.16
    assert sum(errors) / len(errors) < 0.05
    assert len(allocated) == 8
    assert max(allocated) < 0.002
    times = [abs(row["roofline_seconds"] / row["seconds"] - 1) for row in rows if "roofline_seconds" in row]
    assert sorted(times)[len(times) // 2] < 0.15
