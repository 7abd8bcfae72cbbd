"""A measured machine: curves are read between their points, files are read back, and a traced step has its time."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from everyrank.cli import main
from everyrank.errors import UsageError
from everyrank.layout import parse_layout
from everyrank.plan import calibrate
from everyrank.plan.kernels import separate_matrices
from everyrank.plan.machine import Machine, kernel_kind, read_machine, traced_seconds, write_machine
from everyrank.plan.pretend import trace_step

KERNELS = (
    *("product", "other", "strided", "exponential", "trigonometric", "sum", "normalisation", "normalisation_backward"),
    *("convolution", "convolution_backward", "attention", "attention_backward"),
)
LINKS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


@dataclass(frozen=True)
class Called:
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
    """Kernels of 1 us or a billion a second, cold ones take twice as long, links of 10 us or 100 million a second."""
    kernels = {kind: [(1e3, 1e-6), (1e9, 1.0)] for kind in KERNELS}
    cold = {kind: [(size, 2 * seconds) for size, seconds in points] for kind, points in kernels.items()}
    links = {"shm": {kind: [(1e3, 1e-5), (1e8, 1.0)] for kind in LINKS}}
    overhead = {"shm": dict.fromkeys(("ddp", "pipeline", "fsdp", "zero1", "tensor"), (1e-4, 2e-6))}
    return Machine("cpu", 2, 1, cache, kernels, cold, links, overhead, {"host": "test"})


def test_the_time_of_a_step_is_that_of_the_slowest_rank() -> None:
    """Products go by operations, others by bytes, collectives by theirs; waiting takes nothing."""
    light = [Called("mm", flops=10**6), Called("add", bytes=10), Called("wait_tensor", group="0")]
    heavy = [*light, Called("mm", flops=10**9), Called("allreduce_", bytes=10**8, group="0")]
    parts = traced_seconds([light, heavy], "ddp", machine(), "shm")
    assert parts["kernels"] == pytest.approx(1 + 1e-3 + 1e-6, rel=1e-6)
    assert parts["links"] == pytest.approx(1)
    assert parts["overhead"] == pytest.approx(1e-4 + 5 * 2e-6)
    more = traced_seconds([[Called("mm", flops=4 * 10**9)]], "ddp", machine(), "shm")
    assert more["kernels"] == pytest.approx(4), "beyond the last point at its rate"


def test_stages_of_a_pipeline_wait_for_messages() -> None:
    """Two micro-batches in two stages of 1 s take 3 s; the order is that of the trace."""
    work, last = Called("mm", flops=10**9), Called("mm", flops=2 * 10**9)
    send, receive = Called("send", bytes=10, group="F"), Called("recv_", bytes=10, group="F")
    first = [work, send, work, send]
    parts = traced_seconds([first, [receive, work, receive, work]], "pipeline", machine(), "shm")
    overhead = 1e-4 + 6 * 2e-6
    assert sum(parts.values()) == pytest.approx(3 + 1e-5 + overhead, abs=3e-6)
    assert parts["waiting"] == pytest.approx(1, abs=1e-4)
    slow = traced_seconds([first, [receive, last, receive, last]], "pipeline", machine(), "shm")
    assert slow["waiting"] == pytest.approx(1, abs=1e-4), "the last stage is never idle after the first micro-batch"
    assert sum(slow.values()) == pytest.approx(5, abs=1e-3)
    with pytest.raises(ValueError, match="never sent"):
        traced_seconds([[work], [receive]], "pipeline", machine(), "shm")


def test_what_caches_cannot_hold_comes_from_memory() -> None:
    """In proportion to the bytes of a step of all ranks over those of the cache, which are half here."""
    called = [Called("add", bytes=10**9)]
    for footprint, seconds in ((0.0, 1.0), (250.0, 1.5), (500.0, 2.0), (5000.0, 2.0)):
        assert machine(cache=1000.0).kernel_seconds(called, footprint) == pytest.approx(seconds)
    assert machine().kernel_seconds(called, 5000.0) == pytest.approx(1.0), "of a GPU there are no cold curves"


def test_a_product_of_few_rows_takes_the_bytes_of_its_matrix() -> None:
    assert machine().kernel_seconds([Called("mm", flops=10**3, bytes=10**9)]) == pytest.approx(1.0)


def test_products_are_operations_and_the_bytes_of_their_matrices() -> None:
    """From squares and from products of 8 rows, whose sum of parts they are; a curve without bytes has the old rule."""
    flops_second, bytes_second = 1e11, 1e10

    def seconds(rows: float, width: float) -> float:
        return 2 * rows * width**2 / flops_second + 4 * (width**2 + 2 * rows * width) / bytes_second

    squares = [(2.0 * size**3, seconds(size, size)) for size in (16, 48, 128, 256, 512)]
    thin = [(2.0 * 8 * size**2, seconds(8, size)) for size in (64, 128, 256, 512, 1024, 2048)]
    curves = separate_matrices({"product": squares, "thin product": thin, "other": [(1.0, 1.0)]})
    assert set(curves) == {"product", "matrix", "other"}
    plain = machine()
    measured = replace(plain, kernels={**plain.kernels, **curves}, cold={**plain.cold, **curves})
    for rows, width in ((8, 1024), (16, 1024), (64, 512), (256, 256)):
        called = Called("mm", flops=2 * rows * width**2, bytes=4 * (width**2 + 2 * rows * width))
        assert measured.kernel_seconds([called]) == pytest.approx(seconds(rows, width), rel=0.1)


def test_a_foreach_operator_is_one_kernel_for_each_tensor() -> None:
    assert machine().kernel_seconds([Called("_foreach_add_", bytes=10**4, tensors=100)]) == pytest.approx(100 * 1e-6)


@pytest.mark.parametrize(
    ("called", "kind"),
    [
        (Called("addmm", flops=1), "product"),
        (Called("convolution_backward", flops=1), "convolution_backward"),
        (Called("_scaled_dot_product_flash_attention_for_cpu", flops=1), "attention"),
        (Called("native_batch_norm"), "normalisation"),
        (Called("native_layer_norm_backward"), "normalisation_backward"),
        (Called("silu_backward"), "exponential"),
        (Called("_log_softmax"), "exponential"),
        (Called("cos"), "trigonometric"),
        (Called("linalg_vector_norm"), "sum"),
        (Called("mul"), "other"),
        (Called("mul", is_strided=True), "strided"),
    ],
)
def test_each_operator_has_its_curve(called: Called, kind: str) -> None:
    assert kernel_kind(called) == kind
    assert kind in KERNELS


def test_a_machine_is_read_back(tmp_path: Path) -> None:
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
    ("words", "named"),
    [
        ("--decoder 8b", "a workload"),
        ("digits --gpus 8xh100", "leave --gpus out"),
        ("digits --backend gloo --layout ddp", "ddp on gloo"),
        ("digits --layout local_sgd", "local_sgd on shm"),
    ],
)
def test_wrong_calls_with_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, named: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(write_machine(machine()))
    assert main(["plan", *words.split(), "--calibration", str(path)]) == 2
    assert named in capsys.readouterr().err


def test_a_workload_has_its_time_on_a_measured_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "machine.json", tmp_path / "plan.json"
    path.write_text(write_machine(machine()))
    words = ["plan", "digits", "--layout", "ddp", "--calibration", str(path), "--json", str(out)]
    assert main(words) == 0
    row = json.loads(out.read_text())["layouts"][0]
    assert row["step_seconds"] == pytest.approx(sum(row["parts"].values()))
    assert row["parts"]["links"] > 0
    assert "an update" in capsys.readouterr().out


def test_a_gpu_computes_while_the_host_dispatches() -> None:
    """The longer of the two counts; a kernel takes many tensors; products of 16 bits have their own curve."""
    measured = machine()
    kernels = {**measured.kernels, "product_half": [(1e3, 1e-7), (1e9, 0.1)]}
    overhead = {"shm": {"single": (0.5, 0.01)}}
    gpu = replace(measured, device="NVIDIA H100", ranks=1, kernels=kernels, cold=kernels, overhead=overhead)
    heavy = [Called("mm", flops=10**9), Called("mm", flops=10**9, is_half=True)]
    assert sum(traced_seconds([heavy], "single", gpu, "shm").values()) == pytest.approx(0.5 + 1.1)
    light = [Called("add", bytes=10)] * 300
    assert sum(traced_seconds([light], "single", gpu, "shm").values()) == pytest.approx(0.5 + 3)
    many = Called("_foreach_add_", bytes=10**9, tensors=100)
    assert gpu.kernel_seconds([many]) == pytest.approx(1.0)
    small = Called("_foreach_add_", bytes=10**3, tensors=100)  # 100 launches would take 100 times as long
    assert gpu.kernel_seconds([small]) == pytest.approx(1e-6)


def test_a_step_takes_longer_than_the_sum_of_its_parts(tmp_path: Path) -> None:
    """By the factor that two reference models have shown, which the file keeps; a file without factors has none."""
    calls = [Called("mm", flops=10**9)]
    plain = sum(traced_seconds([calls], "ddp", machine(), "shm").values())
    longer = replace(machine(), factors={"shm": {"ddp": 1.25}})
    path = tmp_path / "machine.json"
    path.write_text(write_machine(longer))
    kept = read_machine(path)
    assert kept is not None
    assert sum(traced_seconds([calls], "ddp", kept, "shm").values()) == pytest.approx(1.25 * plain)
    assert traced_seconds([calls], "fsdp", kept, "shm")["rest"] == 0.0
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "factors"}))
    kept = read_machine(path)
    assert kept is not None
    assert kept.factors == {}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("pipeline", marks=pytest.mark.integration)])
def test_the_overhead_of_a_strategy_is_found_again(strategy: str) -> None:
    """From the seconds of two decoders, also where stages wait for each other."""
    overhead = {"shm": {strategy: (1e-3, 2e-5)}}
    ranks = range(2 if strategy == "pipeline" else 1)
    seconds = []
    for num_blocks in calibrate._BLOCKS:
        steps = [trace_step(calibrate._tiny(num_blocks), parse_layout(strategy), 2, rank) for rank in ranks]
        parts = traced_seconds(
            [step.operators for step in steps], strategy, replace(machine(), overhead=overhead), "shm"
        )
        seconds.append(sum(parts.values()))
        assert (parts["waiting"] > 0) == (strategy == "pipeline")
    assert calibrate._overhead(strategy, seconds, machine(), "shm") == pytest.approx((1e-3, 2e-5), rel=0.01)
