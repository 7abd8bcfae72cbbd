"""Step times from a measured machine: interpolated curves, the calibration file, and the time of a traced step."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everyrank.cli import main
from everyrank.errors import UsageError
from everyrank.layout import parse_layout
from everyrank.plan import calibrate
from everyrank.plan.kernels import _normalisation, split_matmul_time
from everyrank.plan.machine import Machine, kernel_kind, read_machine, traced_seconds, write_machine
from everyrank.plan.pretend import trace_step

KERNELS = (
    *("product", "other", "strided", "exponential", "trigonometric", "sum", "normalisation", "normalisation_backward"),
    *("convolution", "convolution_backward", "attention", "attention_backward"),
)
LINKS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


@dataclass(frozen=True)
class Operator:
    """An operator of a traced step."""

    name: str
    flops: int = 0
    bytes: int = 0
    group: str = ""
    tensors: int = 1
    is_strided: bool = False
    is_half: bool = False
    is_causal: bool = False
    phase: str = "activations"


def machine(cache: float = 0.0) -> Machine:
    """Return a CPU with made-up curves.

    Kernels take 1 us, or a second for a billion FLOPs or bytes. Cold kernels take twice as long.
    Messages take 10 us, or a second for 100 million bytes.
    """
    kernels = {kind: [(1e3, 1e-6), (1e9, 1.0)] for kind in KERNELS}
    cold = {kind: [(size, 2 * seconds) for size, seconds in points] for kind, points in kernels.items()}
    links = {"shm": {kind: [(1e3, 1e-5), (1e8, 1.0)] for kind in LINKS}}
    overhead = {"shm": dict.fromkeys(("ddp", "pipeline", "fsdp", "zero1", "tensor"), (1e-4, 2e-6))}
    return Machine("cpu", 2, 1, cache, kernels, cold, links, overhead, {"host": "test"})


def test_step_time_is_that_of_the_slowest_rank() -> None:
    """Products are timed by FLOPs, other kernels and collectives by bytes. Waiting takes no time."""
    light_rank = [Operator("mm", flops=10**6), Operator("add", bytes=10), Operator("wait_tensor", group="0")]
    heavy_rank = [*light_rank, Operator("mm", flops=10**9), Operator("allreduce_", bytes=10**8, group="0")]
    parts = traced_seconds([light_rank, heavy_rank], "ddp", machine(), "shm")
    assert parts["kernels"] == pytest.approx(1 + 1e-3 + 1e-6, rel=1e-6)
    assert parts["links"] == pytest.approx(1)
    assert parts["overhead"] == pytest.approx(1e-4 + 5 * 2e-6)
    parts_beyond_last_point = traced_seconds([[Operator("mm", flops=4 * 10**9)]], "ddp", machine(), "shm")
    assert parts_beyond_last_point["kernels"] == pytest.approx(4), "beyond the last point at its rate"


def test_pipeline_stages_wait_for_messages() -> None:
    """Two micro-batches in two stages of 1 s take 3 s. Each stage runs in the order of its trace."""
    product, long_product = Operator("mm", flops=10**9), Operator("mm", flops=2 * 10**9)
    send, receive = Operator("send", bytes=10, group="F"), Operator("recv_", bytes=10, group="F")
    first_stage = [product, send, product, send]
    parts = traced_seconds([first_stage, [receive, product, receive, product]], "pipeline", machine(), "shm")
    overhead = 1e-4 + 6 * 2e-6
    assert sum(parts.values()) == pytest.approx(3 + 1e-5 + overhead, abs=3e-6)
    assert parts["waiting"] == pytest.approx(1, abs=1e-4)
    parts_of_slow_last_stage = traced_seconds(
        [first_stage, [receive, long_product, receive, long_product]], "pipeline", machine(), "shm"
    )
    assert parts_of_slow_last_stage["waiting"] == pytest.approx(1, abs=1e-4), (
        "the last stage is never idle after the first micro-batch"
    )
    assert sum(parts_of_slow_last_stage.values()) == pytest.approx(5, abs=1e-3)
    with pytest.raises(ValueError, match="never sent"):
        traced_seconds([[product], [receive]], "pipeline", machine(), "shm")


def test_kernel_time_depends_on_the_cache() -> None:
    """The cold share grows with the bytes of all ranks, up to half of the cache size."""
    operators = [Operator("add", bytes=10**9)]
    for footprint, expected_seconds in ((0.0, 1.0), (250.0, 1.5), (500.0, 2.0), (5000.0, 2.0)):
        assert machine(cache=1000.0).kernel_seconds(operators, footprint) == pytest.approx(expected_seconds)
    assert machine().kernel_seconds(operators, 5000.0) == pytest.approx(1.0), "of a GPU there are no cold curves"


def test_product_of_few_rows_is_bound_by_the_bytes_of_its_matrix() -> None:
    """The matrix has far more bytes than the product has FLOPs."""
    assert machine().kernel_seconds([Operator("mm", flops=10**3, bytes=10**9)]) == pytest.approx(1.0)


def test_product_time_is_split_into_flops_and_bytes() -> None:
    """The time of a product is the time of its FLOPs plus the time of its bytes.

    Both are fitted to square products and to products of 8 rows.
    """
    flops_second, bytes_second = 1e11, 1e10

    def true_seconds(rows: float, width: float) -> float:
        return 2 * rows * width**2 / flops_second + 4 * (width**2 + 2 * rows * width) / bytes_second

    square_products = [(2.0 * size**3, true_seconds(size, size)) for size in (16, 48, 128, 256, 512)]
    thin_products = [(2.0 * 8 * size**2, true_seconds(8, size)) for size in (64, 128, 256, 512, 1024, 2048)]
    curves = split_matmul_time({"product": square_products, "thin product": thin_products, "other": [(1.0, 1.0)]})
    assert set(curves) == {"product", "matrix", "other"}
    plain_machine = machine()
    fitted_machine = replace(
        plain_machine, kernels={**plain_machine.kernels, **curves}, cold={**plain_machine.cold, **curves}
    )
    for rows, width in ((8, 1024), (16, 1024), (64, 512), (256, 256)):
        product = Operator("mm", flops=2 * rows * width**2, bytes=4 * (width**2 + 2 * rows * width))
        assert fitted_machine.kernel_seconds([product]) == pytest.approx(true_seconds(rows, width), rel=0.1)


def test_foreach_operator_is_one_kernel_per_tensor() -> None:
    """On a CPU an operator for 100 tensors takes 100 times the shortest kernel time."""
    assert machine().kernel_seconds([Operator("_foreach_add_", bytes=10**4, tensors=100)]) == pytest.approx(100 * 1e-6)


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        (Operator("addmm", flops=1), "product"),
        (Operator("convolution_backward", flops=1), "convolution_backward"),
        (Operator("_scaled_dot_product_flash_attention_for_cpu", flops=1), "attention"),
        (Operator("native_batch_norm"), "normalisation"),
        (Operator("native_layer_norm_backward"), "normalisation_backward"),
        (Operator("silu_backward"), "exponential"),
        (Operator("_log_softmax"), "exponential"),
        (Operator("cos"), "trigonometric"),
        (Operator("linalg_vector_norm"), "sum"),
        (Operator("mul"), "other"),
        (Operator("mul", is_strided=True), "strided"),
    ],
)
def test_operator_has_its_kind_of_kernel(operator: Operator, kind: str) -> None:
    """The kind of kernel selects the measured curve."""
    assert kernel_kind(operator) == kind
    assert kind in KERNELS


def test_machine_file_is_written_and_read(tmp_path: Path) -> None:
    """A damaged file, an older version and a missing backend are errors that name `plan --calibrate`."""
    path = tmp_path / "machine.json"
    path.write_text(write_machine(machine()))
    assert read_machine(path) == machine()
    path.write_text(json.dumps([1]))
    assert read_machine(path) is None
    path.write_text(write_machine(machine()).replace('"product"', '"produce"').replace("1e-05", "-1"))
    with pytest.raises(UsageError, match="plan --calibrate"):
        read_machine(path)
    path.write_text(write_machine(machine()).replace('"machine": 2', '"machine": 1'))
    with pytest.raises(UsageError, match="older version"):
        read_machine(path)
    with pytest.raises(UsageError, match="calibrate again"):
        machine().link_seconds([], "gloo")


@pytest.mark.parametrize(
    ("args", "expected_text"),
    [
        ("--decoder 8b", "a workload"),
        ("digits --gpus 8xh100", "leave --gpus out"),
        ("digits --per-node 4", "leave --per-node out"),
        ("digits --link 100Gb", "leave --link out"),
        ("digits --backend gloo --layout ddp", "ddp on gloo"),
        ("digits --layout local_sgd", "local_sgd on shm"),
    ],
)
def test_invalid_arguments_with_a_machine_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: str, expected_text: str
) -> None:
    """The exit code is 2, and the error names what is missing or not supported."""
    path = tmp_path / "machine.json"
    path.write_text(write_machine(machine()))
    assert main(["plan", *args.split(), "--calibration", str(path)]) == 2
    assert expected_text in capsys.readouterr().err


def test_plan_of_a_workload_uses_the_machine_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step time is the sum of its parts."""
    machine_path, plan_path = tmp_path / "machine.json", tmp_path / "plan.json"
    machine_path.write_text(write_machine(machine()))
    args = ["plan", "digits", "--layout", "ddp", "--calibration", str(machine_path), "--json", str(plan_path)]
    assert main(args) == 0
    row = json.loads(plan_path.read_text())["layouts"][0]
    assert row["step_seconds"] == pytest.approx(sum(row["parts"].values()))
    assert row["parts"]["links"] > 0
    assert "an update" in capsys.readouterr().out


def test_plan_with_the_machine_file_and_less_memory(tmp_path: Path) -> None:
    """--memory replaces the memory of this host, in which neither CUDA nor NCCL takes any."""
    machine_path, plan_path = tmp_path / "machine.json", tmp_path / "plan.json"
    machine_path.write_text(write_machine(machine()))
    args = ["plan", "digits", "--layout", "ddp", "--calibration", str(machine_path), "--json", str(plan_path)]
    verdicts: list[str] = []
    for memory in ([], ["--memory", "1GiB"], ["--memory", "1MB"]):
        assert main([*args, *memory]) == 0
        verdicts.append(json.loads(plan_path.read_text())["layouts"][0]["verdict"])
    assert verdicts == ["fits", "fits", "does not fit"]


def test_gpu_time_and_host_time_overlap() -> None:
    """The longer of host time and GPU time counts.

    One kernel processes many tensors. Products of 16 bits have their own curve.
    """
    cpu_machine = machine()
    kernels = {**cpu_machine.kernels, "product_half": [(1e3, 1e-7), (1e9, 0.1)]}
    overhead = {"shm": {"single": (0.5, 0.01)}}
    gpu_machine = replace(cpu_machine, device="NVIDIA H100", ranks=1, kernels=kernels, cold=kernels, overhead=overhead)
    products = [Operator("mm", flops=10**9), Operator("mm", flops=10**9, is_half=True)]
    assert sum(traced_seconds([products], "single", gpu_machine, "shm").values()) == pytest.approx(0.5 + 1.1)
    small_kernels = [Operator("add", bytes=10)] * 300
    assert sum(traced_seconds([small_kernels], "single", gpu_machine, "shm").values()) == pytest.approx(0.5 + 3)
    large_foreach = Operator("_foreach_add_", bytes=10**9, tensors=100)
    assert gpu_machine.kernel_seconds([large_foreach]) == pytest.approx(1.0)
    small_foreach = Operator("_foreach_add_", bytes=10**3, tensors=100)  # 100 launches would take 100 times as long
    assert gpu_machine.kernel_seconds([small_foreach]) == pytest.approx(1e-6)


def test_step_time_is_scaled_by_the_measured_factor(tmp_path: Path) -> None:
    """The machine file has a factor per strategy, measured with two reference models.

    A file without factors adds nothing.
    """
    operators = [Operator("mm", flops=10**9)]
    unscaled_seconds = sum(traced_seconds([operators], "ddp", machine(), "shm").values())
    machine_with_factor = replace(machine(), factors={"shm": {"ddp": 1.25}})
    path = tmp_path / "machine.json"
    path.write_text(write_machine(machine_with_factor))
    read_back = read_machine(path)
    assert read_back is not None
    assert sum(traced_seconds([operators], "ddp", read_back, "shm").values()) == pytest.approx(1.25 * unscaled_seconds)
    assert traced_seconds([operators], "fsdp", read_back, "shm")["rest"] == 0.0
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "factors"}))
    read_back = read_machine(path)
    assert read_back is not None
    assert read_back.factors == {}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("pipeline", marks=pytest.mark.integration)])
def test_strategy_overhead_is_recovered_from_step_times(strategy: str) -> None:
    """It is computed from the step times of two decoders, also where pipeline stages wait."""
    overhead = {"shm": {strategy: (1e-3, 2e-5)}}
    ranks = range(2 if strategy == "pipeline" else 1)
    step_seconds = []
    for num_blocks in calibrate._BLOCKS:
        steps = [trace_step(calibrate._tiny(num_blocks), parse_layout(strategy), 2, rank) for rank in ranks]
        parts = traced_seconds(
            [step.operators for step in steps], strategy, replace(machine(), overhead=overhead), "shm"
        )
        step_seconds.append(sum(parts.values()))
        assert (parts["waiting"] > 0) == (strategy == "pipeline")
    assert calibrate._overhead(strategy, step_seconds, machine(), "shm") == pytest.approx((1e-3, 2e-5), rel=0.01)


def test_measured_batch_norm_does_not_change_its_weights() -> None:
    """Training changes the running statistics in place. Weights near zero would make later calls slow."""
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    forward, _ = _normalisation(world, 64)
    value = torch.randn(forward.shape)
    first_output = forward.call(value)[0]
    for _ in range(5):
        forward.call(torch.ones(forward.shape))
    assert torch.equal(forward.call(value)[0], first_output)
